"""Check 2, continued: the fields of a certificate, all of which are known."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from fedlgm_lab.certificate.verifier.envelope import (
    PREDICATE_TYPE,
    STATEMENT_TYPE,
    NotCheckable,
    Refused,
    canonical,
)

PROTECTED_FROM = (
    "readers of the released vectors and models; not the server, which sees the sums before noise"
)
NOT_COVERED = [
    "that the noise was added (level 2 checks this)",
    "that the stated code ran, and that initial weights and fixed tensors saw none of these data",
    (
        "that each contribution was bounded, that there are as many units as stated, and that they "
        "were drawn as stated"
    ),
    "that this run is the only one on these data, and that its settings were not chosen with them",
    "that the operator did not certify the better of two runs",
    "what the operator, its server or its auditor saw, and how they keep it",
    "figures outside the released models, such as test metrics and the metadata in the model file",
    "side channels, and the quality of the operating system's randomness",
    "that the data are what they are said to be, and were collected lawfully",
]
"""What no level-1 check shows; every certificate repeats it."""

Spec = Any


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _maybe_text(value: Any) -> bool:
    return value is None or isinstance(value, str)


def _hash(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def _key(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{32,64}", value) is not None


def _count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _maybe_number(value: Any) -> bool:
    return value is None or _number(value)


def _hash_or_operator(value: Any) -> bool:
    return value == "operator" or _hash(value)


_NOISE = {
    "commitment": _hash,
    "beacon": _hash,
    "by": _hash_or_operator,
    "signature": _text,
    "backend": _text,
}
_START = {
    "owner": _hash,
    "initial": _hash,
    "layers": [(_text, _count, [(_text, _count)])],
    "fixed": {"*": _hash},
    "noise": lambda value: value is None or _fits(value, _NOISE),
    "software": dict.fromkeys(
        ("fedlgm", "dp-accounting", "torch", "numpy", "python", "source"), _text
    ),
}
_PREDICATE = {
    "claim": {
        **dict.fromkeys(
            ("unit", "relation", "trust", "protected_from", "status", "mechanism", "variant"), _text
        ),
        **{"composition": _text, "epsilon": _number, "delta": _number, "seed": _maybe_text},
        **{"claimed_epsilon": _maybe_number, "audited_lower_bound": lambda value: value is None},
    },
    "population": {"size": _count, "rate": _number, "sampling": _text, "denominator": _number},
    "recipe": {"text": _text, "sha256": _hash},
    "start": _START,
    "plans": {"*": _text},
    "events": {"*": _text},
    "ledger": {
        "owner": _hash,
        "head": _text,
        "rows": [
            {
                "round": _count,
                "key": _key,
                "event": _hash,
                "claim": _text,
                "protects": _text,
                "guarantee": _text,
            }
        ],
    },
    "rounds": [{"round": _count, "row": _count, "plan": _hash, "released": _hash, "head": _hash}],
    "arithmetic": _text,
    "keys_merkle_root": _hash,
    "anchors": [{"round": _count, "head": _hash, "by": _hash, "signature": _text}],
    "not_covered": [_text],
}
_STATEMENT = {
    "_type": _text,
    "subject": [{"name": _text, "digest": {"sha256": _hash}}],
    "predicateType": _text,
    "predicate": _PREDICATE,
}


def read_statement(payload: bytes) -> dict[str, Any]:
    """The statement in a payload, with all of its fields and no other.

    Raises:
        Refused: a field is missing, unknown or has another type.
        NotCheckable: it is a statement of another version.
    """
    statement = canonical(payload, 2, "the certificate")
    if not isinstance(statement, dict):
        raise Refused(2, "the certificate must be an object")
    kinds = statement.get("_type"), statement.get("predicateType")
    if kinds != (STATEMENT_TYPE, PREDICATE_TYPE):
        raise NotCheckable(
            f"this program checks {PREDICATE_TYPE} in {STATEMENT_TYPE}, but the certificate is "
            f"{kinds[1]!r} in {kinds[0]!r}: use the version that wrote it"
        )
    _require(statement, _STATEMENT, "the certificate")
    return statement


def _require(value: Any, spec: Spec, where: str) -> None:
    if isinstance(spec, dict):
        if not isinstance(value, dict):
            raise Refused(2, f"{where} must be an object")
        every = spec.get("*")
        known = set(value) if every else set(spec)
        for name in sorted(set(value) ^ known):
            word = "unknown" if name in value else "missing"
            raise Refused(2, f"{where} has the field {name!r}, which is {word}")
        for name, part in value.items():
            _require(part, every or spec[name], f"{where}.{name}")
    elif isinstance(spec, list):
        if not isinstance(value, list):
            raise Refused(2, f"{where} must be a list")
        for number, part in enumerate(value):
            _require(part, spec[0], f"{where}[{number}]")
    elif isinstance(spec, tuple):
        if not (isinstance(value, list) and len(value) == len(spec)):
            raise Refused(2, f"{where} must be a list of {len(spec)} values")
        for number, (part, inner) in enumerate(zip(value, spec, strict=True)):
            _require(part, inner, f"{where}[{number}]")
    elif not _holds(spec, value):
        raise Refused(2, f"{where} has an impossible value, {str(value)[:60]!r}")


def _holds(spec: Callable[[Any], bool], value: Any) -> bool:
    return bool(spec(value))


def _fits(value: Any, spec: Spec) -> bool:
    try:
        _require(value, spec, "noise")
    except Refused:
        return False
    return True
