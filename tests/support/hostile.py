"""Nodes of an in-process federation that may lie: each holds one client, and what it sends can be
replaced."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, Metadata, MetricRecord, RecordDict
from torch import Tensor

from fedlgm import wire
from fedlgm.aggregation import BoundedSum
from fedlgm.planning.plan import ReleasePlan
from simulations.engines.local import LocalGrid
from strategies import Releaser

CLIENTS = 10
Tamper = Callable[[Message, Message], "Message | list[Message] | None"]


def node_of(client: int) -> int:
    """A node id that is not the client's number."""
    return 1000 - 7 * client


class NodeGrid(LocalGrid):
    """One node per client, with ids in another order than the clients' numbers, over one app per
    client.

    Class attributes (replace them in a subclass or on the instance):
        clients: which clients have a node.
        tamper: by client, what becomes of its honest reply: another, several, or None for none.
        places: by node, what it says of itself instead of the truth; None for no answer at all.
    """

    clients: tuple[int, ...] = tuple(range(CLIENTS))
    population: int = CLIENTS
    tamper: dict[int, Tamper]
    places: dict[int, Any]

    def __init__(self, apps: Any) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.apps = apps
        self.tamper = dict(getattr(type(self), "tamper", {}))
        self.places = dict(getattr(type(self), "places", {}))
        self.extra: list[int] = []
        self.asked: list[int] = []

    def get_node_ids(self) -> list[int]:
        return [node_of(client) for client in self.clients] + self.extra

    def deliver(self, messages: list[Message]) -> Iterator[Message]:
        for message in messages:
            node = message.metadata.dst_node_id
            client = (1000 - node) // 7
            if message.metadata.message_type == "query":
                self.asked.append(node)
                place = self.places.get(
                    node, {wire.PARTITION: client, wire.PARTITIONS: self.population}
                )
                if place is not None:
                    yield Message(RecordDict({wire.CONFIG: ConfigRecord(place)}), reply_to=message)
                continue
            honest = self.apps[client](message, self._context)
            if client not in self.tamper:
                yield honest
                continue
            made = self.tamper[client](message, honest)
            yield from made if isinstance(made, list) else [] if made is None else [made]


def reply_with(message: Message, values: np.ndarray | Array, **metrics: Any) -> Message:
    """A reply to `message` that holds `values` as its sum."""
    array = values if isinstance(values, Array) else Array(values)
    content: dict[str, Any] = {wire.ARRAYS: ArrayRecord({wire.SUM: array})}
    content[wire.METRICS] = MetricRecord({wire.CLIENT_COUNT: 1, wire.DISCARDED: 0} | metrics)
    return Message(RecordDict(content), reply_to=message)


def forged(reply: Message, **changes: Any) -> Message:
    """The same reply with other metadata."""
    known = reply.metadata
    fields = {
        "run_id": known.run_id,
        "message_id": known.message_id,
        "src_node_id": known.src_node_id,
        "dst_node_id": known.dst_node_id,
        "reply_to_message_id": known.reply_to_message_id,
        "group_id": known.group_id,
        "created_at": time.time(),
        "ttl": known.ttl,
        "message_type": known.message_type,
    }
    return Message(content=reply.content, metadata=Metadata(**(fields | changes)))  # type: ignore[call-overload]


@dataclass(frozen=True)
class WatchedReleaser(Releaser):
    """Keeps every exact sum before it is noised, which only a test may do."""

    sums: list[Tensor] = field(default_factory=list)

    def mean(self, total: BoundedSum, plan: ReleasePlan, round: int) -> Tensor:
        self.sums.append(total.total.clone())
        return super().mean(total, plan, round)


def watch(strategy: Any) -> list[Tensor]:
    """From now on the exact sums of `strategy`'s rounds."""
    old = strategy.releaser
    strategy.releaser = WatchedReleaser(old.keys, old.ledger, old.numerics, old.attempt)
    return strategy.releaser.sums


def part_norms(total: Tensor, plan: ReleasePlan) -> np.ndarray:
    """Norm of every part of a released vector, in the norm that the plan's noise needs."""
    order = 2 if plan.family == "gaussian" else 1
    pieces: Iterable[Tensor] = total.double().split([part.size for part in plan.parts])
    return np.array([float(np.linalg.norm(piece.numpy(), ord=order)) for piece in pieces])
