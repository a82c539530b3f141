"""A node's report for a data protection officer, as plain values and as one HTML page."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from fedlgm.errors import LedgerError
from fedlgm.privacy.cost import Cost
from fedlgm.privacy.events import decode
from fedlgm_nodes.deploy.pages import render
from fedlgm_nodes.policy import Policy
from fedlgm_nodes.service.ledger import NodeLedger
from fedlgm_nodes.service.record import Record
from fedlgm_nodes.service.row import protected


def compared(ledger: NodeLedger, record: Record) -> dict[str, Any]:
    """The numbers of rows in the ledger and in the record, and the releases that are in the ledger
    but not in the record.

    Raises:
        LedgerError: a release in the record is missing in the ledger, or is another release there.
    """
    rows, heads = ledger.rows(), record.release_heads()
    for release, head in heads.items():
        if ledger.head_at(release) != head:
            raise LedgerError(
                f"the record states release {release}, but the ledger {ledger.path} has a "
                "different release or none: the record or the ledger was replaced; restore both "
                "from the same backup"
            )
    return {
        "releases": len(rows),
        "head": ledger.head,
        "rows": len(record.rows),
        "unrecorded": [row.seq for row in rows if row.seq not in heads],
    }


def facts_of(policy: Policy, ledger: NodeLedger, record: Record) -> dict[str, Any]:
    """The content of the report, as plain values.

    Raises:
        LedgerError: see `compared`.
    """
    facts, budget = compared(ledger, record), policy.privacy
    spent = ledger.epsilon(budget.delta, protected(budget))
    stated = {row["release"]: row for row in record.rows if row["kind"] == "release"}
    purposes = {row["work"]: row["purpose"] for row in record.rows if row["kind"] == "approve"}
    releases = []
    for row in ledger.rows():
        more = stated.get(row.seq, {})
        releases.append(
            {"release": row.seq, "at": row.charged_at, "run": row.run, "round": row.round,
             "cost": Cost.of(decode(json.loads(row.event))).sentence(budget.unit),
             "trust": row.trust, "purpose": purposes.get(more.get("work", ""), "")}
            | {name: more.get(name) for name in
               ("model", "task", "mechanism", "layers", "plan", "work", "asked_by", "signature")}
        )  # fmt: skip
    return facts | {
        "node": policy.node.name,
        "data": policy.data.name,
        "made_at": datetime.now(UTC).isoformat(),
        "test": ledger.test,
        "unit": budget.unit,
        "nodes": budget.nodes,
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        "epsilon_spent": spent,
        "epsilon_left": max(0.0, budget.epsilon - spent),
        "attack": _attack(ledger, budget.units),
        "paused": record.paused is not None,
        "released": releases,
        "decisions": list(_decisions(record)),
        "refusals": [row for row in record.rows if row["kind"] == "refusal"],
    }


def _decisions(record: Record) -> Iterator[dict[str, Any]]:
    """The rows of the record that are neither releases nor refusals. For a row of a policy, the
    list tells what has changed since the previous policy.
    """
    before: dict[str, Any] = {}
    for row in record.rows:
        if row["kind"] == "policy":
            values = row.get("values", {})
            changes = [
                f"{name}.{key}: {before[name][key]}, now {value}"
                for name, section in values.items()
                for key, value in (section or {}).items()
                if key in (before.get(name) or {}) and before[name][key] != value
            ]
            row, before = row | {"changes": "; ".join(changes)}, values
        if row["kind"] not in ("release", "refusal"):
            yield row


def _attack(ledger: NodeLedger, units: str) -> str:
    """A sentence that says how well an attacker who knows all releases can at best tell whether a
    unit's data were used.
    """
    from dp_accounting import dp_event

    from fedlgm.privacy import attack_rates

    counts = Counter(row.event for row in ledger.rows())
    events = [
        dp_event.SelfComposedDpEvent(decode(json.loads(text)), count)
        for text, count in counts.items()
    ]
    return attack_rates(dp_event.ComposedDpEvent(events)).sentence(units)


def page(facts: dict[str, Any]) -> bytes:
    """The report as one HTML page."""
    return render("record_report.html", facts)
