"""Costs of secure aggregation for a node and the server: `python -m benchmarks.secure_aggregation --json`.

All nodes of a round run in this process, one after the other, with their stores on disk and no transport. Reported per
node and round: processor time of each step, a mean over all nodes, and the bytes up and down of one that stays, in JSON
with the vector as raw words. One node in ten drops out after sharing its secrets, and the server removes its masks.
Making the vector (training, rounding, noise) is not included: `mask` starts from the words.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from clients.node.ledger import NodeLedger
from clients.node.secagg import Distributed, Participant, SessionStore
from fedlgm.node_protocol import public_text
from fedlgm.secagg.cohort import Terms
from strategies.node.secagg import SecureSum

SETTINGS = ((10, 26_010), (10, 1_000_000), (100, 26_010))


class Costs:
    """Processor seconds by step, and bytes of client 0."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.up = self.down = 0

    def timed(self, step: str, call: Callable[[], Any]) -> Any:
        """The call's answer; its time counts for `step`."""
        started = time.process_time()
        answer = call()
        self.seconds[step] = self.seconds.get(step, 0.0) + time.process_time() - started
        return answer

    def message(self, client: int, sent: Any, answer: Any) -> None:
        """Count a question and its answer."""
        if client == 0:
            self.down += _size(sent)
            self.up += _size(answer)


def one_round(nodes: int, size: int, folder: Path, number: int) -> dict[str, Any]:
    """Costs of one round; the sum is checked."""
    threshold, colluders, dropped = 2 * nodes // 3 + 1, nodes // 10, nodes // 10
    signers = [Ed25519PrivateKey.generate() for _ in range(nodes)]
    policy = Distributed(min_cohort=nodes, max_colluders=colluders, peers=tuple(map(public_text, signers)))
    ledgers = [_ledger(folder / f"{number}-{client}") for client in range(nodes)]
    stores = [SessionStore(ledger.path.with_name("rounds.sqlite"), ledger) for ledger in ledgers]
    members = [Participant(client, signers[client], policy, stores[client]) for client in range(nodes)]
    terms = Terms("run", 1, "00" * 32, threshold, colluders, size, f"{number:032x}")
    server, costs, attempt = SecureSum(terms, policy.services), Costs(), terms.digest
    words = np.random.default_rng(number).integers(0, 2**32, size, dtype=np.uint32)

    adverts, shares, signatures, revealed = {}, {}, {}, {}
    for client, member in enumerate(members):
        adverts[client] = costs.timed("advertise", lambda m=member: m.advertise(terms).values())
        costs.message(client, terms.values(), adverts[client])
    cohort = costs.timed("server", lambda: server.advertised(adverts))
    for client, member in enumerate(members):
        shared = costs.timed("share", lambda m=member: m.share(attempt, cohort))
        shares[client] = shared.sealed, shared.commitment
        costs.message(client, cohort, shares[client])
    delivered = costs.timed("server", lambda: server.shared(shares))
    here = range(nodes - dropped)
    for client in here:
        masked = costs.timed(
            "mask", lambda c=client: members[c].mask(attempt, delivered[c], lambda name: None, lambda name: words)
        )
        sent = costs.timed("mask", lambda c=client: members[c].sent(attempt))
        costs.message(client, delivered[client], (masked, sent))
        costs.timed("server", lambda c=client, w=masked, s=sent: server.add(c, w, s))
    answered = server.answered()
    for client in here:
        signatures[client] = costs.timed("agree", lambda c=client: members[c].agree(attempt, answered))
        costs.message(client, answered, signatures[client])
    signed = costs.timed("server", lambda: server.signed(signatures))
    for client in here:
        revealed[client] = costs.timed("unmask", lambda c=client: members[c].unmask(attempt, signed))
        costs.message(client, signed, revealed[client])
    total = costs.timed("server", lambda: server.total(revealed))
    if not (total == words * np.uint32(len(here))).all():
        raise RuntimeError("the sum is wrong")
    for store, ledger in zip(stores, ledgers, strict=True):
        store.close()
        ledger.close()
    steps = {step: 1000 * seconds / nodes for step, seconds in costs.seconds.items() if step != "server"}
    return {
        "node_ms": sum(steps.values()), "steps_ms": steps, "server_ms": 1000 * costs.seconds["server"],
        "bytes_up": costs.up, "bytes_down": costs.down,
    }  # fmt: skip


def measure(nodes: int, size: int, repeats: int) -> dict[str, Any]:
    """Medians over rounds, and the least and largest time of a node."""
    with tempfile.TemporaryDirectory(prefix="fedlgm-secagg-") as place:
        rounds = [one_round(nodes, size, Path(place), number) for number in range(repeats)]
    times = [one["node_ms"] for one in rounds]
    return {
        "nodes": nodes, "parameters": size, "threshold": 2 * nodes // 3 + 1, "colluders": nodes // 10,
        "dropped": nodes // 10, "repeats": repeats,
        "node_ms": statistics.median(times), "node_ms_range": [min(times), max(times)],
        "steps_ms": {
            step: statistics.median(one["steps_ms"][step] for one in rounds) for step in rounds[0]["steps_ms"]
        },
        "server_ms": statistics.median(one["server_ms"] for one in rounds),
        "bytes_up": rounds[0]["bytes_up"], "bytes_down": rounds[0]["bytes_down"], "vector_bytes": 4 * size,
    }  # fmt: skip


def _ledger(folder: Path) -> NodeLedger:
    """A node's new ledger, which keeps the sets that it signs."""
    folder.mkdir()
    files = folder / "ledger.sqlite", folder / "seen.json"
    NodeLedger.create(*files, "vectors")
    return NodeLedger(*files)


def _size(message: Any) -> int:
    if isinstance(message, tuple):
        return sum(map(_size, message))
    return message.nbytes if isinstance(message, np.ndarray) else len(json.dumps(message))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [measure(nodes, size, options.repeats) for nodes, size in SETTINGS]
    found = {"python": platform.python_version(), "machine": platform.machine(), "rounds": rows}
    if options.json:
        print(json.dumps(found, indent=1))
        return
    for row in rows:
        print(
            f"{row['nodes']} nodes, {row['parameters']} parameters: {row['node_ms']:.1f} ms per node, "
            f"{row['server_ms']:.0f} ms for the server, {row['bytes_up'] / 1e3:.0f} kB up, "
            f"{row['bytes_down'] / 1e3:.0f} kB down"
        )


if __name__ == "__main__":
    main()
