"""A node's certificate, which states what was released from its data to all servers."""

from __future__ import annotations

import hashlib
from collections import Counter
from datetime import UTC, datetime
from typing import Any

from fedlgm.errors import RunError
from fedlgm.privacy.signed import NODE_PREDICATE, STATEMENT_TYPE, envelope_of
from fedlgm_nodes.protocol.messages import public_text
from fedlgm_nodes.service.folder import NodeFolder
from fedlgm_nodes.service.row import protected


def certify_node(folder: NodeFolder) -> bytes:
    """Make a node's certificate, in an envelope that is signed with the key of the node's service.

    The certificate lists the costs of the releases, how many releases have each cost, and the runs
    that requested them. It does not hold the digest of the data, because with this digest a reader
    could confirm a guess of the data.

    Args:
        folder: the node's folder.

    Raises:
        RunError: the ledger's releases have known noise.
        LedgerError: the ledger is damaged.
    """
    policy, signer = folder.policy(), folder.signer()
    with folder.ledger(readonly=True) as ledger:
        if ledger.test:
            raise RunError(
                f"{folder.path} is a node for tests: anyone who knows its seed knows its noise, so "
                "its releases protect nobody and have no certificate"
            )
        budget, rows = policy.privacy, ledger.rows()
        spent = ledger.epsilon(budget.delta, protected(budget))
        identity, head = ledger.identity, ledger.head
    charges = Counter((row.event, row.trust, row.protects, row.run) for row in rows)
    texts = {_sha(row.event): row.event for row in rows}
    unit, relation = protected(budget).split(", ")  # "add-remove at 2 nodes"
    statement: dict[str, Any] = {
        "_type": STATEMENT_TYPE,
        "predicateType": NODE_PREDICATE,
        "subject": [{"name": identity, "digest": {"sha256": head.rpartition(":")[2]}}],
        "predicate": {
            "node": {
                "name": policy.node.name,
                "client": policy.node.client,
                "service_key": public_text(signer),
            },
            "data": policy.data.name,
            "unit": unit,
            "relation": relation,
            "epsilon": _round_up(spent),
            "delta": budget.delta,
            "budget": budget.epsilon,
            "releases": len(rows),
            "events": texts,
            "charges": [
                {"event": _sha(event), "trust": trust, "protects": kind, "run": run, "count": count}
                for (event, trust, kind, run), count in sorted(charges.items())
            ],
            "stated_at": datetime.now(UTC).isoformat(timespec="seconds"),
        },
    }
    return envelope_of(statement, signer)


def _round_up(value: float) -> float:
    """Round to six decimals, never below the value, so that machines with other rounding agree."""
    rounded = round(value, 6)
    return rounded if rounded >= value else round(value + 1e-6, 6)


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
