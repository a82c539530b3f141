"""Costs of secure aggregation for a node and the server:
`python -m benchmarks.secure_aggregation --json`.

All nodes of a round run in this process, one after the other, with their stores on disk and no
transport. The benchmark reports the processor time of each step per node and round, as a mean over
all nodes. It also reports the bytes that one node sends and receives. This node does not drop out;
its messages are JSON, with the vector as raw words. One in ten nodes drops out after sharing its
secrets, and the server removes the masks of these nodes. The time to make the vector (training,
rounding, noise) is not included: `mask` starts from the words.

`--large` measures nodes of cohorts with hundreds of members, on a ring of neighbours and without
it. Ten nodes are real. The messages of all other nodes are made without these nodes' work, so no
sum can be opened and the server is not measured. `--whole NODES` runs a whole round with nine nodes
in ten as the threshold. With `--complete` the round has no ring.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import statistics
import tempfile
import time
from base64 import b64encode
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedlgm_nodes.protocol.messages import public_text
from fedlgm_nodes.secagg import cohort
from fedlgm_nodes.secagg.cohort import Advert, Cohort, Survivors, Terms, key_pairs
from fedlgm_nodes.secagg.keys import seal
from fedlgm_nodes.secagg.neighbours import Shape
from fedlgm_nodes.secagg.shamir import SHARE_BYTES
from fedlgm_nodes.server.secagg import SecureSum
from fedlgm_nodes.service.ledger import NodeLedger
from fedlgm_nodes.service.secagg import Distributed, Participant, SessionStore

SETTINGS = ((10, 26_010), (10, 1_000_000), (100, 26_010))
LARGE = ((500, 26_010), (1000, 26_010))
SAMPLE = 10


class Costs:
    """Processor seconds of each step, and the bytes of client 0's messages."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.up = self.down = 0

    def timed(self, step: str, call: Callable[[], Any]) -> Any:
        """Return the result of the call, and add its time to `step`."""
        started = time.process_time()
        answer = call()
        self.seconds[step] = self.seconds.get(step, 0.0) + time.process_time() - started
        return answer

    def of(self, nodes: int) -> dict[str, Any]:
        """Return the mean times over the nodes, and the bytes of one node."""
        steps = {step: 1000 * seconds / nodes for step, seconds in self.seconds.items()}
        return {
            "node_ms": sum(steps.values()),
            "steps_ms": steps,
            "bytes_up": self.up,
            "bytes_down": self.down,
        }

    def message(self, client: int, sent: Any, answer: Any) -> None:
        """Count the bytes of a question and of its answer."""
        if client == 0:
            self.down += _size(sent)
            self.up += _size(answer)


def one_round(nodes: int, threshold: int, size: int, folder: Path, number: int) -> dict[str, Any]:
    """Run one round, check its sum and return its costs."""
    colluders, dropped = nodes // 10, nodes // 10
    signers = [Ed25519PrivateKey.generate() for _ in range(nodes)]
    policy = Distributed(
        min_cohort=nodes, max_colluders=colluders, peers=tuple(map(public_text, signers))
    )
    ledgers = [_ledger(folder / f"{number}-{client}") for client in range(nodes)]
    stores = [SessionStore(ledger.path.with_name("rounds.sqlite"), ledger) for ledger in ledgers]
    members = [
        Participant(client, signers[client], policy, stores[client]) for client in range(nodes)
    ]
    terms = Terms("run", 1, "00" * 32, threshold, colluders, size, f"{number:032x}")
    server, costs, attempt = SecureSum(terms, policy.services), Costs(), terms.digest
    words = np.random.default_rng(number).integers(0, 2**32, size, dtype=np.uint32)

    adverts, shares, signatures, revealed = {}, {}, {}, {}
    for client, member in enumerate(members):
        adverts[client] = costs.timed("advertise", lambda m=member: m.advertise(terms).values())
        costs.message(client, terms.values(), adverts[client])
    listed = costs.timed("server", lambda: server.advertised(adverts))
    for client, member in enumerate(members):
        shared = costs.timed("share", lambda m=member: m.share(attempt, listed))
        shares[client] = shared.sealed, shared.commitment
        costs.message(client, listed, shares[client])
    delivered = costs.timed("server", lambda: server.shared(shares))
    here, named = range(nodes - dropped), server.sharing_field()
    for client in here:
        masked = costs.timed(
            "mask", lambda c=client: _masked(members[c], attempt, delivered[c], words, named)
        )
        sent = costs.timed("mask", lambda c=client: members[c].sent(attempt))
        costs.message(client, (delivered[client], named), (masked, sent))
        costs.timed("server", lambda c=client, w=masked, s=sent: server.add(c, w, s))
    answered = server.answered()
    for client in here:
        signatures[client] = costs.timed(
            "agree", lambda c=client: members[c].agree(attempt, answered)
        )
        costs.message(client, answered, signatures[client])
    signed = costs.timed("server", lambda: server.signed(signatures))
    for client in here:
        revealed[client] = costs.timed(
            "unmask", lambda c=client: members[c].unmask(attempt, signed)
        )
        costs.message(client, signed, revealed[client])
    total = costs.timed("server", lambda: server.total(revealed))
    if not (total == words * np.uint32(len(here))).all():
        raise RuntimeError("the sum is wrong")
    for store, ledger in zip(stores, ledgers, strict=True):
        store.close()
        ledger.close()
    server_ms = 1000 * costs.seconds.pop("server")
    return costs.of(nodes) | {"server_ms": server_ms, "neighbours": len(shares[0][0])}


def sampled(nodes: int, threshold: int, size: int, folder: Path, number: int) -> dict[str, Any]:
    """Measure the costs of the first ten nodes of a round; the cost of making the other nodes'
    messages does not count.
    """
    colluders, answered = nodes // 10, list(range(nodes - nodes // 10))
    signers = [Ed25519PrivateKey.generate() for _ in range(nodes)]
    policy = Distributed(
        min_cohort=nodes, max_colluders=colluders, peers=tuple(map(public_text, signers))
    )
    ledgers = [_ledger(folder / f"{number}-{client}") for client in range(SAMPLE)]
    stores = [SessionStore(ledger.path.with_name("rounds.sqlite"), ledger) for ledger in ledgers]
    members = [
        Participant(client, signers[client], policy, stores[client]) for client in range(SAMPLE)
    ]
    terms, costs = Terms("run", 1, "00" * 32, threshold, colluders, size, f"{number:032x}"), Costs()
    words = np.random.default_rng(number).integers(0, 2**32, size, dtype=np.uint32)

    keys = {client: key_pairs() for client in range(SAMPLE, nodes)}
    own = [costs.timed("advertise", lambda m=member: m.advertise(terms)) for member in members]
    others = [Advert.make(terms, client, signers[client], *pair) for client, pair in keys.items()]
    whole = Cohort(terms, own + others, policy.services, check=False)
    listed = [advert.values() for advert in whole.adverts.values()]
    shares = [
        costs.timed("share", lambda m=member: m.share(terms.digest, listed)) for member in members
    ]
    named = {} if whole.complete else {"sharing": list(range(nodes))}
    survivors = Survivors(whole.digest, tuple(range(nodes)), tuple(answered))
    signed = {client: survivors.sign(signers[client]) for client in answered}
    for client, member in enumerate(members):
        costs.message(client, terms.values(), own[client].values())
        costs.message(client, listed, (shares[client].sealed, shares[client].commitment))
        delivered = {
            by: _sealed(keys[by][0], whole, by, client) if by in keys else shares[by].sealed[client]
            for by in sorted(whole.neighbours.holders(client) - {client})
        }
        masked = costs.timed("mask", lambda: _masked(member, terms.digest, delivered, words, named))  # noqa: B023
        sent = costs.timed("mask", lambda m=member: m.sent(terms.digest))
        costs.message(client, (delivered, named), (masked, sent))
        costs.message(
            client, answered, costs.timed("agree", lambda m=member: m.agree(terms.digest, answered))
        )
        costs.message(
            client, signed, costs.timed("unmask", lambda m=member: m.unmask(terms.digest, signed))
        )
    for store, ledger in zip(stores, ledgers, strict=True):
        store.close()
        ledger.close()
    return costs.of(SAMPLE) | {"neighbours": len(shares[0].sealed)}


def _masked(
    member: Participant, attempt: str, delivered: Any, words: np.ndarray, named: dict[str, Any]
) -> np.ndarray:
    return member.mask(
        attempt, delivered, lambda name: None, lambda name: words, named.get("sharing")
    )


def _sealed(sealing: bytes, whole: Cohort, sender: int, receiver: int) -> str:
    """Seal shares of zeros, which a node opens as it opens real shares."""
    advert = whole.adverts[receiver]
    return b64encode(
        seal(sealing, advert.sealing, whole.digest, sender, receiver, bytes(2 * SHARE_BYTES))
    ).decode()


def measure(
    nodes: int,
    threshold: int,
    size: int,
    repeats: int,
    once: Callable[..., dict[str, Any]] = one_round,
) -> dict[str, Any]:
    """Return the medians over the rounds, and the smallest and largest time of a node."""
    with tempfile.TemporaryDirectory(prefix="fedlgm-secagg-") as place:
        rounds = [once(nodes, threshold, size, Path(place), number) for number in range(repeats)]
    times = [one["node_ms"] for one in rounds]
    return {
        "nodes": nodes,
        "parameters": size,
        "threshold": threshold,
        "colluders": nodes // 10,
        "dropped": nodes // 10,
        "repeats": repeats,
        "neighbours": rounds[0]["neighbours"],
        "node_ms": statistics.median(times),
        "node_ms_range": [min(times), max(times)],
        "steps_ms": {
            step: statistics.median(one["steps_ms"][step] for one in rounds)
            for step in rounds[0]["steps_ms"]
        },
        **(
            {"server_ms": statistics.median(one["server_ms"] for one in rounds)}
            if "server_ms" in rounds[0]
            else {}
        ),
        "bytes_up": rounds[0]["bytes_up"],
        "bytes_down": rounds[0]["bytes_down"],
        "vector_bytes": 4 * size,
    }


def _ledger(folder: Path) -> NodeLedger:
    """Make a new ledger for a node; it stores the sets that the node signs."""
    folder.mkdir()
    files = folder / "ledger.sqlite", folder / "seen.json"
    NodeLedger.create(*files, "vectors")
    return NodeLedger(*files)


def _complete(nodes: int, threshold: int, colluders: int) -> Shape:
    """Return the shape of a cohort in which all nodes are neighbours of each other."""
    return Shape(nodes // 2, threshold, 0, colluders)


def _size(message: Any) -> int:
    if isinstance(message, tuple):
        return sum(map(_size, message))
    return message.nbytes if isinstance(message, np.ndarray) else len(json.dumps(message))


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--whole", type=int, metavar="NODES")
    parser.add_argument("--complete", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    complete: AbstractContextManager[Any] = patch.object(cohort, "shape_of", _complete)
    if options.whole:
        with complete if options.complete else nullcontext():
            rows = [measure(options.whole, 9 * options.whole // 10, 26_010, options.repeats)]
    elif options.large:
        rows = []
        for graph in (nullcontext(), complete):
            with graph:
                rows += [
                    measure(nodes, 9 * nodes // 10, size, options.repeats, sampled)
                    for nodes, size in LARGE
                ]
    else:
        rows = [
            measure(nodes, 2 * nodes // 3 + 1, size, options.repeats) for nodes, size in SETTINGS
        ]
    found = {"python": platform.python_version(), "machine": platform.machine(), "rounds": rows}
    if options.json:
        print(json.dumps(found, indent=1))
        return
    for row in rows:
        print(
            f"{row['nodes']} nodes, {row['neighbours']} neighbours, {row['parameters']} "
            f"parameters: {row['node_ms']:.1f} ms per node, {row.get('server_ms', math.nan):.0f} "
            f"ms for the server, {row['bytes_up'] / 1e3:.0f} kB up, {row['bytes_down'] / 1e3:.0f} "
            "kB down"
        )


if __name__ == "__main__":
    main()
