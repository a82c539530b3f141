"""Local training of the global model on a client's data, before bounding."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedlgm.aggregation.contributions import Updates
from fedlgm.planning.facts import LocalTraining
from fedlgm.training.inputs import Inputs

__all__ = ["ClientTask", "LocalTraining", "Trainer"]


@dataclass(frozen=True)
class ClientTask:
    """One client's share of a round.

    Attributes:
        x: inputs [n, ...] with n >= 1: one array, or a tuple of several arrays.
        y: targets [n, ...] of the run's task.
        order: the client's random stream of the round, which shuffles the batches and seeds the
            model's random numbers.
        epochs: number of passes; fewer than usual for a straggler.
        trained: 1 for each coordinate that is trained and 0 for each coordinate that keeps the
            model's value, float32 [D]; None trains all coordinates. It is equal in all tasks of a
            call. A trainer may ignore it, because the plan drops layers that it does not release.

    Example:
        >>> task = ClientTask(torch.zeros(3, 2), torch.zeros(3), torch.Generator().manual_seed(1), epochs=2)
        >>> task.permutations().sort(dim=1).values.tolist()  # every example once in an epoch
        [[0, 1, 2], [0, 1, 2]]
    """

    x: Inputs
    y: Tensor
    order: torch.Generator
    epochs: int
    trained: Tensor | None = None

    def permutations(self) -> Tensor:
        """Order of the examples in every epoch, int64 [epochs, n]."""
        return torch.stack(
            [torch.randperm(len(self.y), generator=self.order) for _ in range(self.epochs)]
        )

    def seed(self) -> int:
        """Seed of the model's random numbers in training, such as dropout; requested after
        `permutations`.
        """
        return int(torch.randint(2**63 - 1, (), generator=self.order))


class Trainer(Protocol):
    """Computes the updates of clients, either raw or with every unit's share bounded
    (`BoundedUpdates`).

    Example:
        >>> class Towards:
        ...     def updates(self, model, tasks):
        ...         for task in tasks:
        ...             yield (task.y.mean() - model)[None]
        >>> trainer: Trainer = Towards()
        >>> task = ClientTask(torch.zeros(2, 1), torch.tensor([1.0, 3.0]), torch.Generator(), epochs=1)
        >>> next(trainer.updates(torch.tensor([0.5]), [task])).tolist()
        [[1.5]]
    """

    def updates(self, model: Tensor, tasks: Iterable[ClientTask]) -> Iterator[Updates]:
        """Yield the updates `local model - model` in the order of the tasks, in blocks of
        consecutive tasks: float32 [b, D], b >= 1.

        Updates lie on the trainer's device. A yielded tensor may be overwritten when the next
        tensor is requested.

        Raises:
            ConfigError: the trainer cannot train this model or these tasks.
        """
