"""Checks of a node's statement of its own ledger."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from fedlgm.errors import FedlgmError
from fedlgm.privacy import events
from fedlgm.privacy.attackers import percent
from fedlgm.privacy.guarantee import COVERS
from fedlgm.privacy.signed import NODE_PREDICATE
from fedlgm.privacy.spending import Spending
from fedlgm_lab.certificate.verifier.checks import hash_of, worst_rates
from fedlgm_lab.certificate.verifier.envelope import (
    NotCheckable,
    Refused,
    is_count,
    is_hash,
    is_number,
    is_text,
    open_envelope,
    read_json,
    write_json,
)
from fedlgm_lab.certificate.verifier.statement import read_statement

_LARGEST = 1.001
"""Largest ratio of the stated epsilon to the computed one, above one unit of its last digit."""
_LIMIT = (
    "The node's own statement holds: its epsilon follows from the releases that it names. It does not "
    "prove that the ledger names every release."
)
_FIELDS = {
    "_type": is_text,
    "predicateType": is_text,
    "subject": [{"name": is_text, "digest": {"sha256": is_text}}],
    "predicate": {
        "node": {"name": is_text, "client": is_count, "service_key": is_hash},
        **dict.fromkeys(("data", "unit", "relation", "stated_at"), is_text),
        **dict.fromkeys(("epsilon", "delta", "budget"), is_number),
        "releases": is_count,
        "events": {"*": is_text},
        "charges": [
            {
                "event": is_hash,
                "trust": is_text,
                "protects": is_text,
                "run": is_text,
                "count": is_count,
            }
        ],
    },
}


def is_node_statement(data: bytes) -> bool:
    """Whether a file holds a node's statement, signed or not.

    Raises:
        Refused: it holds no envelope.
    """
    value = read_json(open_envelope(data, None)[0], 2, "the certificate")
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
    told: dict[str, Any] = read_statement(payload, NODE_PREDICATE, _FIELDS)["predicate"]
    texts, charges = told["events"], told["charges"]
    if told["node"]["service_key"] != signer:
        raise Refused(3, "the statement is about another node than the one that signed it")
    if {charge["event"] for charge in charges} != set(texts):
        raise Refused(4, "the events are not those of the charges")
    if sum(charge["count"] for charge in charges) != told["releases"]:
        raise Refused(4, "the charges are not as many as the releases")
    for name, text in texts.items():
        if hash_of(text) != name:
            raise Refused(6, f"the event {name[:8]} has another text than its hash says")
        read_json(text.encode(), 6, f"event {name[:8]}", write_json)
    for charge in charges:
        if f"{told['unit']}, {told['relation']}" not in COVERS.get(charge["protects"], ()):
            raise Refused(3, f"a release protects ({charge['protects']}), not ({told['unit']})")
    counts: Counter[str] = Counter()
    for charge in charges:
        counts[texts[charge["event"]]] += charge["count"]
    spending = Spending(counts, {})
    try:
        accountant = events.accountant_of([events.decode(json.loads(text)) for text in counts])
        right = spending.epsilon(told["delta"], accountant)
    except (FedlgmError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise Refused(11, f"the charges cannot be composed ({error})") from None
    if not right <= told["epsilon"] <= max(right * _LARGEST, right + 1e-6):
        raise Refused(11, f"epsilon is stated as {told['epsilon']:.6g}, but it is {right:.6g}")
    if key is None:
        raise NotCheckable(
            f"check 1: everything else holds, but who signed? The statement is signed by {signer}: "
            "name the node's public key (--key)"
        )
    return told | {"attack_rates": worst_rates(spending).figures()}


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
