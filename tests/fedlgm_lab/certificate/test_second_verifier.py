"""Two verifiers that share no code agree on honest certificates and on all tamperings."""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import rfc8785
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load, save

from fedlgm_lab.certificate import signing
from fedlgm_lab.certificate.verifier.envelope import NotCheckable, Refused
from fedlgm_lab.certificate.verifier.replay import fused
from tests.fedlgm_lab.certificate import second_verifier
from tests.fedlgm_lab.certificate.test_tampering import EDITS, REPAIRED
from tests.support.certificates import Certified, fit


def holds_twice(run: Certified, certificate: bytes, model: bytes | None = None) -> bool:
    """Whether a certificate holds, on which both verifiers must agree."""
    try:
        run.verify(certificate, model)
        first = True
    except (Refused, NotCheckable):
        first = False
    try:
        second_verifier.verify(
            certificate,
            run.model if model is None else model,
            signing.public_hex(run.operator),
            signing.public_hex(run.witness),
            run.releases,
            run.statement["predicate"]["start"]["software"]["source"],
        )
        second = True
    except (second_verifier.Wrong, LookupError, TypeError, ValueError, ArithmeticError):
        second = False
    assert first == second
    return first


def test_both_accept_an_honest_certificate(honest: Certified) -> None:
    """tests/fedlgm_lab/certificate/test_trust.py has those of every kind of run."""
    assert holds_twice(honest, honest.sign(honest.statement))


@pytest.mark.parametrize("fitted", [False, True])
@pytest.mark.parametrize("name", EDITS)
def test_both_refuse_a_tampering(honest: Certified, name: str, fitted: bool) -> None:
    statement = honest.copy()
    EDITS[name](statement)
    try:
        statement = fit(statement) if fitted else statement
    except (Refused, NotCheckable):
        return  # nothing fits
    assert holds_twice(honest, honest.sign(statement)) == (fitted and name in REPAIRED)


def _text(change: Callable[[bytes], bytes]) -> Callable[[Certified, Certified], Any]:
    """A certificate whose payload was edited as text, and signed."""

    def tamper(run: Certified, other: Certified) -> tuple[bytes, bytes]:
        payload = change(rfc8785.dumps(run.statement))
        key, kind = run.operator, "application/vnd.in-toto+json"
        text = b"DSSEv1 %d %s %d %s" % (len(kind), kind.encode(), len(payload), payload)
        signature = {"keyid": signing.public_hex(key), "sig": b64encode(key.sign(text)).decode()}
        envelope = {"payload": b64encode(payload).decode(), "payloadType": kind}
        return rfc8785.dumps(envelope | {"signatures": [signature]}), run.model

    return tamper


def _number(text: bytes) -> Callable[[Certified, Certified], Any]:
    old = b'"audited_lower_bound":null'
    return _text(lambda payload: payload.replace(old, old.replace(b"null", text)))


def _anchors_of_another_run(run: Certified, other: Certified) -> tuple[bytes, bytes]:
    statement = run.copy()
    statement["predicate"]["anchors"] = other.statement["predicate"]["anchors"]
    return run.sign(statement), run.model


def _with_a_mask(run: Certified, other: Certified) -> tuple[bytes, bytes]:
    return run.sign(run.statement), save(load(run.model) | {"mask": np.ones(3, np.float32)})


def _another_bit(run: Certified, other: Certified) -> tuple[bytes, bytes]:
    """A model that differs in one bit, with both of its hashes rewritten (42)."""
    tensors, statement = {k: v.copy() for k, v in load(run.model).items()}, run.copy()
    next(iter(tensors.values())).reshape(-1)[:1].view(np.uint32)[0] ^= 1
    slots = [slot for _, _, part in statement["predicate"]["start"]["layers"] for slot in part]
    flat, model = np.concatenate([tensors[n].reshape(-1) for n, _ in slots]), save(tensors)
    for entry, content in zip(statement["subject"], (model, flat.tobytes()), strict=True):
        entry["digest"]["sha256"] = hashlib.sha256(content).hexdigest()
    return run.sign(statement), model


def _two_signers(run: Certified, other: Certified) -> tuple[bytes, bytes]:
    envelope = json.loads(run.sign(run.statement))
    envelope["signatures"] += json.loads(other.sign(run.statement))["signatures"]
    return rfc8785.dumps(envelope), run.model


OTHERS: dict[str, Callable[[Certified, Certified], tuple[bytes, bytes]]] = {
    "27 anchors of another run": _anchors_of_another_run,
    "28 another model": lambda run, other: (run.sign(run.statement), other.model),
    "29 another model file": _with_a_mask,
    "32 order": _text(
        lambda payload: json.dumps(
            dict(reversed(json.loads(payload).items())), separators=(",", ":")
        ).encode()
    ),
    "32 white space": _text(lambda payload: payload.replace(b":", b": ", 1)),
    "32 a key twice": _text(
        lambda payload: payload.replace(b'{"_type"', b'{"_type":"x","_type"', 1)
    ),
    "32 NaN": _number(b"NaN"),
    "32 1e400": _number(b"1e400"),
    "32 -0.0": _number(b"-0.0"),
    "33 another key": lambda run, other: (other.sign(run.statement), run.model),
    "33 two signers": _two_signers,
    "34 another run": lambda run, other: (run.sign(other.statement), run.model),
    "42 another bit": _another_bit,
}


@pytest.mark.parametrize("name", OTHERS)
def test_both_refuse_other_files(honest: Certified, other: Certified, name: str) -> None:
    assert not holds_twice(honest, *OTHERS[name](honest, other))


@given(st.floats(allow_nan=False, allow_infinity=False))
@settings(max_examples=500)
def test_canonical_numbers_are_those_of_the_library(value: float) -> None:
    assert second_verifier.canonical(value).encode() == rfc8785.dumps(value)


@given(st.lists(st.floats(-100, 100, width=32), min_size=3, max_size=3))
def test_exact_steps_are_those_of_the_other_rounding(values: list[float]) -> None:
    x, u, lr = (np.array([value], np.float32) for value in values)
    exact = second_verifier.step(x, u, lr[0], "fused")
    assert exact.tolist() == fused(u, lr[0], x).tolist()
