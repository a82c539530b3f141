"""Contributions of clients that train on their data and whose updates are bounded as the plan says.

>>> from clients import ClientData
>>> from fedlgm import Guarantee, LayerTable, ReleasePlan, RunFacts, Sampling
>>> from fedlgm.training import SequentialTrainer
>>> model, settings = torch.nn.Linear(1, 2), LocalTraining()
>>> layers = LayerTable.from_module(model)
>>> def source(client):
...     return ClientData(torch.ones(client, 1), torch.zeros(client, dtype=torch.int64))
>>> work = LocalWork(SequentialTrainer(model, layers, settings), settings, source)
>>> facts, proven = RunFacts(1.0, Sampling("poisson", 3, 1.0)), Guarantee("proven", "an example")
>>> plan = ReleasePlan(layers, [1.0], [1.0], facts, proven)
>>> contributions = ClientUpdates(work)
>>> asked = Asked(plan, layers.flatten(model), 1, [2, 0, 1])
>>> [(clients, updates is None) for clients, updates in contributions.updates(asked, KeyRing.from_seed(1))]
[([2], False), ([0], True), ([1], False)]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from typing_extensions import override

from clients.source import ClientSource
from fedlgm.aggregation.client_release import Asked, Contributions, WholeUpdates
from fedlgm.aggregation.contributions import Updates
from fedlgm.noise.keys import KeyRing, Purpose
from fedlgm.planning.facts import LocalTraining
from fedlgm.training import ClientTask, Trainer
from fedlgm.training.devices import Numerics, torch_threads


@dataclass(frozen=True)
class LocalWork:
    """A client's training and data, before bounding.

    Attributes:
        trainer: local training.
        settings: settings of the training.
        source: the clients' data.
        straggler_rate: probability that a client stops after one epoch in a round (simulations
            only).
    """

    trainer: Trainer
    settings: LocalTraining
    source: ClientSource
    straggler_rate: float = 0.0

    def contributions(self, numerics: Numerics | None = None) -> Contributions:
        """Make the object that computes the clients' contributions; `numerics` is as in
        `clients.LayerwiseClient`.
        """
        return ClientUpdates(self, numerics)


class ClientUpdates(WholeUpdates):
    """Updates of clients that train on their data.

    Args:
        work: training and data.
        numerics: see `Contributions`.
    """

    def __init__(self, work: LocalWork, numerics: Numerics | None = None) -> None:
        super().__init__(numerics)
        self.work = work

    @override
    def updates(self, asked: Asked, order: KeyRing) -> Iterator[tuple[list[int], Updates | None]]:
        """Yield the updates of blocks of clients; None for a block of clients without data."""
        tasks = {client: self._task(client, asked, order) for client in asked.clients}
        with torch_threads(self.numerics.threads):
            blocks = self.work.trainer.updates(
                asked.model, [task for task in tasks.values() if task is not None]
            )
            rows: Updates = torch.empty(0)
            for trained, run in groupby(tasks, key=lambda client: tasks[client] is not None):
                waiting = list(run)
                if not trained:
                    yield waiting, None
                    continue
                while waiting:
                    if len(rows) == 0:
                        rows = next(blocks)
                    yield waiting[: len(rows)], rows[: len(waiting)]
                    waiting, rows = waiting[len(rows) :], rows[len(waiting) :]

    def _task(self, client: int, asked: Asked, order: KeyRing) -> ClientTask | None:
        data, round_ = self.work.source(client), asked.round
        if len(data) == 0:
            return None
        epochs = self.work.settings.epochs
        if self.work.straggler_rate > 0:
            # Path (round, client, 1): dropouts, drawn by the strategy, use 0.
            late = (
                order.numpy_generator(Purpose.DROPOUT, round_, client, 1).random()
                < self.work.straggler_rate
            )
            epochs = 1 if late else epochs
        shuffling = order.torch_generator(Purpose.TRAIN, round_, client)
        return ClientTask(data.x, data.y, shuffling, epochs, asked.plan.trained)
