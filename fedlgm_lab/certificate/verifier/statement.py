"""Check 2, continued: the fields that a certificate must have."""

from __future__ import annotations

from typing import Any

from fedlgm.privacy.signed import STATEMENT_TYPE
from fedlgm_lab.certificate.verifier.envelope import (
    Maybe,
    NotCheckable,
    Refused,
    is_count,
    is_hash,
    is_number,
    is_text,
    read_json,
    require,
)

PREDICATE_TYPE = "urn:fedlgm:privacy-certificate:v2"
PROTECTED_FROM = {
    "central": "readers of the released vectors and models; not the server, which sees the sums "
    "before noise",
    "local": "the server and readers of the released vectors and models, if each client's own "
    "software added its noise",
    "distributed": "readers of the released vectors and models, and the server, if it sees sums "
    "alone, at least the threshold of clients added their noise, and no more clients collude than "
    "the plans state",
}
"""The parties against whom a guarantee holds, by trust model."""
_BY_SERVER = [
    "that the noise was added (level 2 checks this)",
    "what the operator, its server or its auditor saw, and how they keep it",
]
_BY_CLIENTS = [
    "that the clients added their noise, which they alone can show",
    "that the ledger names every client that took part in a round",
]
_NEVER = [
    "that the stated code ran, and that initial weights and fixed tensors saw none of these data",
    (
        "that each contribution was bounded, that there are as many units as stated, and that they "
        "were drawn as stated"
    ),
    "that this run is the only one on these data, and that its settings were not chosen with them",
    "that the operator did not certify the better of two runs",
    "figures outside the released models, such as test metrics and the metadata in the model file",
    "side channels, and the quality of the operating system's randomness",
    "that the data are what they are said to be, and were collected lawfully",
]
NOT_COVERED = {
    "central": [*_BY_SERVER, *_NEVER],
    "local": [*_BY_CLIENTS, *_NEVER],
    "distributed": [*_BY_CLIENTS, *_NEVER],
}
"""What no level-1 check shows, by trust model; every certificate repeats it."""

_CLAIM = {
    **dict.fromkeys(("unit", "relation", "trust", "protected_from", "status"), is_text),
    **dict.fromkeys(("mechanism", "variant", "composition"), is_text),
    **{"epsilon": is_number, "delta": is_number, "claimed_epsilon": Maybe(is_number)},
    **{"audited_lower_bound": lambda value: value is None, "seed": Maybe(is_text)},
}
_NOISE = {
    **dict.fromkeys(("commitment", "beacon"), is_hash),
    "by": lambda value: value == "operator" or is_hash(value),
    **dict.fromkeys(("signature", "backend"), is_text),
}
_START = {
    **{"owner": is_hash, "initial": is_hash, "fixed": {"*": is_hash}, "noise": Maybe(_NOISE)},
    "layers": [(is_text, is_count, [(is_text, is_count)])],
    "software": dict.fromkeys(
        ("fedlgm", "dp-accounting", "torch", "numpy", "python", "source"), is_text
    ),
}
_CHARGE = {
    **{"round": is_count, "client": lambda value: value == -1 or is_count(value)},
    **{"event": is_hash},
    **dict.fromkeys(("key", "claim", "protects", "guarantee"), is_text),
}
_ROUND = {
    **{"round": is_count, "row": is_count},
    **dict.fromkeys(("plan", "released", "head"), is_hash),
}
_PREDICATE = {
    "claim": _CLAIM,
    "population": {
        **{"size": is_count, "rate": is_number, "sampling": is_text, "denominator": is_number}
    },
    "recipe": {"text": is_text, "sha256": is_hash},
    "start": _START,
    "plans": {"*": is_text},
    "events": {"*": is_text},
    "ledger": {"owner": is_hash, "head": is_text, "rows": [_CHARGE]},
    "rounds": [_ROUND],
    "arithmetic": is_text,
    "keys_merkle_root": is_hash,
    "anchors": [{"round": is_count, "head": is_hash, "by": is_hash, "signature": is_text}],
    "not_covered": [is_text],
}
_STATEMENT = {
    **{"_type": is_text, "predicateType": is_text, "predicate": _PREDICATE},
    "subject": [{"name": is_text, "digest": {"sha256": is_hash}}],
}


def read_statement(
    payload: bytes, predicate_type: str = PREDICATE_TYPE, form: Any = _STATEMENT
) -> dict[str, Any]:
    """Read the statement in a payload, which must have all required fields and no other field.

    Raises:
        Refused: a field is missing or unknown, or has a wrong type.
        NotCheckable: the statement has another version.
    """
    statement = read_json(payload, 2, "the certificate")
    if not isinstance(statement, dict):
        raise Refused(2, "the certificate must be an object")
    kinds = statement.get("_type"), statement.get("predicateType")
    if kinds != (STATEMENT_TYPE, predicate_type):
        raise NotCheckable(
            f"this program checks {predicate_type} in {STATEMENT_TYPE}, but the certificate is "
            f"{kinds[1]!r} in {kinds[0]!r}: use the version that wrote it"
        )
    require(statement, form, "the certificate")
    return statement
