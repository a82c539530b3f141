"""A node's report for a data protection officer, as plain values and as one HTML page."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from datetime import UTC, datetime
from html import escape
from typing import Any

from fedlgm.errors import LedgerError
from fedlgm.privacy.cost import Cost
from fedlgm.privacy.events import decode
from fedlgm_nodes.policy import Policy
from fedlgm_nodes.service.ledger import NodeLedger
from fedlgm_nodes.service.record import Record
from fedlgm_nodes.service.row import PROTECTED

_STYLE = (
    "body{font:15px/1.5 sans-serif;max-width:70em;margin:1em auto;padding:0 1em}"
    "table{border-collapse:collapse;width:100%}td,th{border-bottom:1px solid #bbb;padding:.3em;"
    "text-align:left;vertical-align:top}td,p{overflow-wrap:anywhere}th{white-space:nowrap}"
    "td{min-width:4em}.wide{overflow-x:auto}"
    "@media print{body{font-size:8px;padding:0}.wide{overflow:visible}tr{break-inside:avoid}}"
)


def compared(ledger: NodeLedger, record: Record) -> dict[str, Any]:
    """Sizes of ledger and record, and the releases that only the ledger has.

    Raises:
        LedgerError: the record states a release that the ledger does not have, or has otherwise.
    """
    rows, heads = ledger.rows(), record.release_heads()
    for release, head in heads.items():
        if ledger.head_at(release) != head:
            raise LedgerError(
                f"the record states release {release}, and the ledger {ledger.path} has another "
                "one or none: one of them was replaced; restore both from one backup"
            )
    return {
        "releases": len(rows),
        "head": ledger.head,
        "rows": len(record.rows),
        "unrecorded": [row.seq for row in rows if row.seq not in heads],
    }


def facts_of(policy: Policy, ledger: NodeLedger, record: Record) -> dict[str, Any]:
    """The content of the report.

    Raises:
        LedgerError: see `compared`.
    """
    facts, budget = compared(ledger, record), policy.privacy
    spent = ledger.epsilon(budget.delta, PROTECTED[budget.unit])
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
        "epsilon": budget.epsilon,
        "delta": budget.delta,
        "epsilon_spent": spent,
        "epsilon_left": max(0.0, budget.epsilon - spent),
        "attack": _attack(ledger, budget.unit),
        "paused": record.paused is not None,
        "released": releases,
        "decisions": [row for row in record.rows if row["kind"] not in ("release", "refusal")],
        "refusals": [row for row in record.rows if row["kind"] == "refusal"],
    }


def _attack(ledger: NodeLedger, unit: str) -> str:
    """What all releases together allow an attacker, in words."""
    from dp_accounting import dp_event

    from fedlgm.privacy import attack_rates

    counts = Counter(row.event for row in ledger.rows())
    events = [
        dp_event.SelfComposedDpEvent(decode(json.loads(text)), count)
        for text, count in counts.items()
    ]
    return attack_rates(dp_event.ComposedDpEvent(events)).sentence(f"{unit}s")


def page(facts: dict[str, Any]) -> str:
    """The report as one HTML page."""
    unit = "one example" if facts["unit"] == "example" else "all of the node's data"
    test = "<p><b>FOR TESTS, NOT PRIVATE: the noise is known.</b></p>" if facts["test"] else ""
    missing = len(facts["unrecorded"])
    parts = (
        (f"<h1>Releases from {escape(facts['data'])}</h1>{test}"
        f"<p>Node {escape(facts['node'])}, {facts['made_at'][:19]} UTC. "
        f"{facts['releases']} releases have spent an epsilon of {facts['epsilon_spent']:.4g} of "
        f"{facts['epsilon']:g} at delta {facts['delta']:g}, which protects {unit}: "
        f"{escape(facts['attack'])}. {facts['epsilon_left']:.4g} of epsilon is left. "
        "Every row of ledger and record was verified. "
        f"{missing} releases have no row in the record.</p>"
        f"{'<p><b>The node is paused.</b></p>' if facts['paused'] else ''}"
        f"<p>Head of the ledger: {facts['head']}</p>"),
        "<h2>What was released, to whom, when, at which cost</h2>",
        _table(("release", "at", "run", "round", "model", "task", "mechanism", "purpose",
                "asked_by", "trust", "cost"), facts["released"]),
        "<h2>Requests, decisions, policies and pauses</h2>",
        _table(("at", "kind", "work", "epsilon", "until", "purpose", "reason", "policy"),
               facts["decisions"]),
        "<h2>Refusals</h2><p>A reason is recorded once a day, at most 100 of them.</p>",
        _table(("at", "code", "why", "asked_by", "run"), facts["refusals"]),
    )  # fmt: skip
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>Report of {escape(facts['node'])}</title><style>{_STYLE}</style>"
        f"{''.join(parts)}</html>"
    )


def _table(columns: tuple[str, ...], rows: Iterable[dict[str, Any]]) -> str:
    head = "".join(f"<th>{column.replace('_', ' ')}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{_cell(row.get(column))}</td>" for column in columns) + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><tr>{head}</tr>{body}</table></div>'


def _cell(value: Any) -> str:
    if isinstance(value, dict):
        value = ", ".join(f"{key} = {item}" for key, item in value.items())
    return "" if value is None else escape(str(value))
