"""Checks of a node's statement of its own ledger."""

from __future__ import annotations

import hashlib
from typing import Any

from fedlgm.privacy.attackers import percent
from fedlgm.privacy.guarantee import COVERS
from fedlgm.privacy.signed import NODE_PREDICATE, STATEMENT_TYPE
from fedlgm_lab.certificate.verifier.costs import epsilon_of, rates_of, read_charges
from fedlgm_lab.certificate.verifier.envelope import (
    NotCheckable,
    Refused,
    canonical,
    open_envelope,
    parse,
)
from fedlgm_lab.certificate.verifier.statement import count, hexadecimal, number, require, text

_LARGEST = 1.001
"""Largest ratio of the stated epsilon to the computed one, above one unit of its last digit."""
_LIMIT = (
    "The node's own statement holds: its epsilon follows from the releases that it names. It does not "
    "prove that the ledger names every release."
)
_FIELDS = {
    "_type": text,
    "predicateType": text,
    "subject": [{"name": text, "digest": {"sha256": text}}],
    "predicate": {
        "node": {"name": text, "client": count, "service_key": hexadecimal},
        **dict.fromkeys(("data", "unit", "relation", "stated_at"), text),
        **dict.fromkeys(("epsilon", "delta", "budget"), number),
        "releases": count,
        "events": {"*": text},
        "charges": [
            {"event": hexadecimal, "trust": text, "protects": text, "run": text, "count": count}
        ],
    },
}


def is_node_statement(data: bytes) -> bool:
    """Whether a file holds a node's statement, signed or not.

    Raises:
        Refused: it holds no envelope.
    """
    payload, _ = open_envelope(data, None)
    value = parse(payload, 2, "the certificate")
    return isinstance(value, dict) and value.get("predicateType") == NODE_PREDICATE


def verify_node(data: bytes, key: str | None) -> dict[str, Any]:
    """Check a node's statement, and return its predicate with the computed bounds on attacks.

    Args:
        data: content of the file.
        key: public key of the node's service, in hexadecimal.

    Raises:
        Refused: a check does not hold.
        NotCheckable: the caller names no key, or the statement is of another version.
    """
    payload, signer = open_envelope(data, key)
    statement = canonical(payload, 2, "the certificate")
    if (statement.get("_type"), statement.get("predicateType")) != (STATEMENT_TYPE, NODE_PREDICATE):
        raise NotCheckable(f"this program checks {NODE_PREDICATE} in {STATEMENT_TYPE}")
    require(statement, _FIELDS, "the certificate")
    told: dict[str, Any] = statement["predicate"]
    if told["node"]["service_key"] != signer:
        raise Refused(3, "the statement is about another node than the one that signed it")
    protected = f"{told['unit']}, {told['relation']}"
    used = {charge["event"] for charge in told["charges"]}
    if used != set(told["events"]):
        raise Refused(4, "the events are not those of the charges")
    for name, event in told["events"].items():
        if hashlib.sha256(event.encode()).hexdigest() != name:
            raise Refused(6, f"the event {name[:8]} has another text than its hash says")
    for charge in told["charges"]:
        if protected not in COVERS.get(charge["protects"], ()):
            raise Refused(3, f"a release protects ({charge['protects']}), not ({protected})")
    if sum(charge["count"] for charge in told["charges"]) != told["releases"]:
        raise Refused(4, "the charges are not as many as the releases")
    composed = read_charges(
        ((charge["event"], charge["count"]) for charge in told["charges"]), told["events"]
    )
    right = epsilon_of(composed, told["delta"])
    if not right <= told["epsilon"] <= max(right * _LARGEST, right + 1e-6):
        raise Refused(11, f"epsilon is stated as {told['epsilon']:.6g}, but it is {right:.6g}")
    if key is None:
        raise NotCheckable(
            f"check 1: everything else holds, but who signed? The statement is signed by {signer}: "
            "name the node's public key (--key)"
        )
    return told | {"attack_rates": rates_of(composed).figures()}


def describe_node(told: dict[str, Any]) -> list[str]:
    """The outcome in sentences."""
    found = told["attack_rates"]["tpr"]["0.01"]
    runs = sorted({charge["run"] for charge in told["charges"]})
    node, unit = told["node"], told["unit"]
    spent = (
        f"{node['name']} (client {node['client']}), data set {told['data']!r}: epsilon "
        f"{told['epsilon']:.6g} of {told['budget']:g} spent at delta {told['delta']:g} for one "
        f"{unit} ({told['relation']}): an attacker who accepts 1 % false alarms finds at most "
        f"{percent(found)} of such {unit}s."
    )
    return [
        _LIMIT,
        spent,
        f"{told['releases']} releases for {len(runs)} runs, {told['stated_at']}.",
    ]
