"""Contributions of clients that bound the gradients of their examples and, under local trust, add
noise to their own steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from clients.source import ClientData
from clients.updates import LocalWork
from fedlgm.aggregation.client_release import Asked, Contributions, Keys, Noised
from fedlgm.aggregation.contributions import Updates
from fedlgm.errors import ConfigError
from fedlgm.noise.keys import KeyRing, Purpose
from fedlgm.planning.allocator import Allocator
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.records import Sampling
from fedlgm.training import inputs
from fedlgm.training.devices import Numerics, torch_threads
from fedlgm.training.example_level.trainer import (
    Examples,
    ExampleTrainer,
    batch_keys,
    digest_of,
    local_steps,
    poisson_rows,
)

GROUP_BYTES = 1 << 20
"""Largest total size of the sums of clients that take their steps together. The sums then fit the
processor's cache.
"""
HELD_BYTES = 32 << 20
"""Largest total size of the clients' data that a process keeps in memory from one round to the
next.
"""


@dataclass(frozen=True)
class ExampleWork(LocalWork):
    """Training and data of clients that bound the gradients of their examples.

    Attributes:
        trainer: bounds the examples' gradients.
    """

    trainer: ExampleTrainer  # type: ignore[assignment]

    @override
    def contributions(self, numerics: Numerics | None = None) -> Contributions:
        return ExampleSteps(self, numerics)


class ExampleSteps(Contributions):
    """Clients' contributions under mechanisms that bound examples.

    Under central trust a round is one step: the client samples a Poisson batch of its examples and
    returns the sum of their bounded gradients. Under local trust the client takes the local steps
    of the plan, adds noise to each step and returns the resulting change of its model, which the
    noise protects.

    Args:
        work: training and data.
        numerics: see `Contributions`.
    """

    def __init__(self, work: ExampleWork, numerics: Numerics | None = None) -> None:
        super().__init__(numerics)
        self._work, self.trainer = work, work.trainer
        self._held: dict[int, tuple[ClientData, bytes]] = {}
        self._allocators: dict[tuple[KeyRing, int, Sampling], Allocator] = {}

    @override
    def updates(self, asked: Asked, order: KeyRing) -> Iterator[tuple[list[int], Updates | None]]:
        """Yield for each client the sum of the bounded gradients of its batch in this round.

        Raises:
            ConfigError: the plan has local steps, and this client adds no noise to them.
        """
        if asked.plan.facts.steps:
            raise ConfigError(
                "under local trust a plan with local steps needs clients that add noise to each "
                "step"
            )
        for client, data, rows in self.batches(asked, order):
            yield [client], self.trainer.sum(data.x, data.y, rows, asked.plan)

    @override
    def releases(self, asked: Asked, keys: Keys) -> Iterator[Noised]:
        """Yield the noised update of every client after its local steps. A client without data also
        takes these steps.
        """
        plan, model, round_, clients = asked
        settings, backend = self._work.settings, self.numerics.noise_backend
        with torch_threads(self.numerics.threads):
            for group in self._groups(clients, plan):
                steps = local_steps(
                    self.trainer, settings, model, group, plan, keys.noise, round_, backend
                )
                for examples, (update, name) in zip(group, steps, strict=True):
                    yield Noised(examples.client, update, name, plan)

    def batches(self, asked: Asked, order: KeyRing) -> Iterator[tuple[int, ClientData, Tensor]]:
        """Copy the model into the trainer; yield each client's examples and the rows of its batch
        in this round. The batch is a Poisson sample or consists of the examples that are allocated
        to the round.
        """
        self.trainer.weights.copy_(asked.model)
        with torch_threads(self.numerics.threads):
            for client in asked.clients:
                data, digest = self._examples(client)
                ring, sampling = batch_keys(order, digest), asked.plan.facts.sampling
                if sampling.block is None:
                    path = asked.round, client
                    yield client, data, poisson_rows(ring, len(data), sampling.rate, *path)
                else:
                    drawn = self._allocator(ring, client, len(data), sampling).draw(asked.round)
                    yield client, data, torch.from_numpy(drawn.nonzero()[0])

    def _allocator(
        self, ring: KeyRing, client: int, examples: int, sampling: Sampling
    ) -> Allocator:
        """Return the allocation of a client's examples to rounds. It is made once and reused in
        every round.
        """
        key = ring, client, sampling
        if key not in self._allocators:
            self._allocators[key] = Allocator.of(
                sampling,
                lambda round: ring.numpy_generator(Purpose.TRAIN, round, client).random(examples),
            )
        return self._allocators[key]

    def _groups(self, clients: list[int], plan: ReleasePlan) -> Iterator[list[Examples]]:
        """Group the clients that take their steps together, so that the sums of a group have at
        most `GROUP_BYTES` and its data at most `HELD_BYTES`.
        """
        most = max(1, GROUP_BYTES // (8 * max(plan.size, 1)))
        group, held = list[Examples](), 0
        for client in clients:
            data, digest = self._examples(client)
            held += _bytes(data)
            if group and (len(group) == most or held > HELD_BYTES):
                yield group
                group, held = [], _bytes(data)
            group.append(Examples(client, data.x, data.y, digest))
        if group:
            yield group

    def _examples(self, client: int) -> tuple[ClientData, bytes]:
        """Return a client's data and their digest. Up to `HELD_BYTES` of data are kept in memory
        for later rounds; the data of the last client are always kept.
        """
        if client not in self._held:
            data = self._work.source(client)
            if sum(_bytes(held) for held, _ in self._held.values()) + _bytes(data) > HELD_BYTES:
                self._held.clear()
            self._held[client] = data, digest_of(data.x, data.y)
        return self._held[client]


def _bytes(data: ClientData) -> int:
    return sum(part.nbytes for part in (*inputs.parts(data.x), data.y))
