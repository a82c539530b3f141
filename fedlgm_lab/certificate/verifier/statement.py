"""Check 2, continued: the fields of a certificate, all of which are known."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from fedlgm.privacy.signed import STATEMENT_TYPE
from fedlgm_lab.certificate.verifier.envelope import (
    PREDICATE_TYPE,
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


def text(value: Any) -> bool:
    """A text."""
    return isinstance(value, str)


def _maybe_text(value: Any) -> bool:
    return value is None or isinstance(value, str)


def hexadecimal(value: Any) -> bool:
    """64 hexadecimal digits."""
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def _key(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{32,64}", value) is not None


def count(value: Any) -> bool:
    """A whole number of at least 0."""
    return type(value) is int and value >= 0


def number(value: Any) -> bool:
    """A finite number."""
    return type(value) in (int, float) and math.isfinite(value)


def _maybe_number(value: Any) -> bool:
    return value is None or number(value)


def _hash_or_operator(value: Any) -> bool:
    return value == "operator" or hexadecimal(value)


_NOISE = {
    "commitment": hexadecimal,
    "beacon": hexadecimal,
    "by": _hash_or_operator,
    "signature": text,
    "backend": text,
}
_START = {
    "owner": hexadecimal,
    "initial": hexadecimal,
    "layers": [(text, count, [(text, count)])],
    "fixed": {"*": hexadecimal},
    "noise": lambda value: value is None or _fits(value, _NOISE),
    "software": dict.fromkeys(
        ("fedlgm", "dp-accounting", "torch", "numpy", "python", "source"), text
    ),
}
_PREDICATE = {
    "claim": {
        **dict.fromkeys(
            ("unit", "relation", "trust", "protected_from", "status", "mechanism", "variant"), text
        ),
        **{"composition": text, "epsilon": number, "delta": number, "seed": _maybe_text},
        **{"claimed_epsilon": _maybe_number, "audited_lower_bound": lambda value: value is None},
    },
    "population": {"size": count, "rate": number, "sampling": text, "denominator": number},
    "recipe": {"text": text, "sha256": hexadecimal},
    "start": _START,
    "plans": {"*": text},
    "events": {"*": text},
    "ledger": {
        "owner": hexadecimal,
        "head": text,
        "rows": [
            {
                "round": count,
                "key": _key,
                "event": hexadecimal,
                "claim": text,
                "protects": text,
                "guarantee": text,
            }
        ],
    },
    "rounds": [
        {
            "round": count,
            "row": count,
            "plan": hexadecimal,
            "released": hexadecimal,
            "head": hexadecimal,
        }
    ],
    "arithmetic": text,
    "keys_merkle_root": hexadecimal,
    "anchors": [{"round": count, "head": hexadecimal, "by": hexadecimal, "signature": text}],
    "not_covered": [text],
}
_STATEMENT = {
    "_type": text,
    "subject": [{"name": text, "digest": {"sha256": hexadecimal}}],
    "predicateType": text,
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
    require(statement, _STATEMENT, "the certificate")
    return statement


def require(value: Any, spec: Spec, where: str) -> None:
    """Refuse a value that has other fields than a specification, or fields of other types.

    Args:
        value: the value.
        spec: a function, or a mapping, list or tuple of specifications.
        where: name of the value, for messages.

    Raises:
        Refused: the message names the field.
    """
    if isinstance(spec, dict):
        if not isinstance(value, dict):
            raise Refused(2, f"{where} must be an object")
        every = spec.get("*")
        known = set(value) if every else set(spec)
        for name in sorted(set(value) ^ known):
            word = "unknown" if name in value else "missing"
            raise Refused(2, f"{where} has the field {name!r}, which is {word}")
        for name, part in value.items():
            require(part, every or spec[name], f"{where}.{name}")
    elif isinstance(spec, list):
        if not isinstance(value, list):
            raise Refused(2, f"{where} must be a list")
        for number, part in enumerate(value):
            require(part, spec[0], f"{where}[{number}]")
    elif isinstance(spec, tuple):
        if not (isinstance(value, list) and len(value) == len(spec)):
            raise Refused(2, f"{where} must be a list of {len(spec)} values")
        for number, (part, inner) in enumerate(zip(value, spec, strict=True)):
            require(part, inner, f"{where}[{number}]")
    elif not _holds(spec, value):
        raise Refused(2, f"{where} has an impossible value, {str(value)[:60]!r}")


def _holds(spec: Callable[[Any], bool], value: Any) -> bool:
    return bool(spec(value))


def _fits(value: Any, spec: Spec) -> bool:
    try:
        require(value, spec, "noise")
    except Refused:
        return False
    return True
