"""Checks of a node's statement of its own ledger."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from fedlgm.errors import FedlgmError
from fedlgm.privacy import events
from fedlgm.privacy.attackers import percent
from fedlgm.privacy.guarantee import covers
from fedlgm.privacy.signed import NODE_PREDICATE
from fedlgm.privacy.spending import Spending
from fedlgm_lab.certificate.verifier.case import worst_rates
from fedlgm_lab.certificate.verifier.checks import LARGEST, check_texts, require_signer
from fedlgm_lab.certificate.verifier.envelope import (
    Refused,
    is_count,
    is_hash,
    is_number,
    is_text,
    must,
    open_envelope,
    read_json,
)
from fedlgm_lab.certificate.verifier.statement import read_statement

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
    """Tell whether an envelope holds a node's statement, signed by any key."""
    value = read_json(open_envelope(data, None)[0], 2, "the certificate")
    return isinstance(value, dict) and value.get("predicateType") == NODE_PREDICATE


def verify_node(data: bytes, key: str | None) -> dict[str, Any]:
    """Check a node's statement, and return its predicate with the computed bounds on attacks.

    Args:
        data: content of the file.
        key: public key of the node's service, in hexadecimal.

    Raises:
        Refused: the statement is malformed or not signed, or its charges do not give its figures.
        NotCheckable: the statement is of another kind.
    """
    payload, signer = open_envelope(data, key)
    told: dict[str, Any] = read_statement(payload, NODE_PREDICATE, _FIELDS)["predicate"]
    texts, charges = told["events"], told["charges"]
    signed = told["node"]["service_key"] == signer
    must(3, signed, "the statement is about another node than the one that signed it")
    used = {charge["event"] for charge in charges}
    must(4, used == set(texts), "the events differ from the events of the charges")
    total = sum(charge["count"] for charge in charges)
    must(4, total == told["releases"], "the number of charges differs from the number of releases")
    check_texts(texts)
    protected, counts = f"{told['unit']}, {told['relation']}", Counter[str]()
    for charge in charges:
        implied = covers(charge["protects"], protected)
        must(3, implied, f"a release protects ({charge['protects']}), not ({protected})")
        counts[texts[charge["event"]]] += charge["count"]
    spending = Spending(counts, {})
    try:
        accountant = events.accountant_of([events.decode(json.loads(text)) for text in counts])
        right = spending.epsilon(told["delta"], accountant)
    except (FedlgmError, ValueError, TypeError, AttributeError, LookupError) as error:
        raise Refused(11, f"the charges cannot be composed ({error})") from None
    close = right <= told["epsilon"] <= max(right * LARGEST, right + 1e-6)
    must(11, close, f"epsilon is stated as {told['epsilon']:.6g}, but it is {right:.6g}")
    require_signer(signer, key, "node")
    return told | {"attack_rates": worst_rates(spending).figures()}


def describe_node(told: dict[str, Any]) -> list[str]:
    """Describe the outcome in sentences."""
    rate = told["attack_rates"]["tpr"]["0.01"]
    runs = sorted({charge["run"] for charge in told["charges"]})
    node, unit = told["node"], told["unit"]
    units = "people" if told["relation"].endswith(" nodes") else f"{unit}s"
    spent = (
        f"{node['name']} (client {node['client']}), data set {told['data']!r}: epsilon "
        f"{told['epsilon']:.6g} of {told['budget']:g} spent at delta {told['delta']:g} for one "
        f"{unit} ({told['relation']}): an attacker who accepts 1 % false alarms finds at most "
        f"{percent(rate)} of such {units}."
    )
    return [
        _LIMIT,
        spent,
        f"{told['releases']} releases for {len(runs)} runs, {told['stated_at']}.",
    ]
