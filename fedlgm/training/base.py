"""The interface of trainers, which train the global model on a client's data before the update is
bounded.
"""

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
    """What a trainer needs to train one client in a round.

    Attributes:
        x: inputs [n, ...] with n >= 1: one tensor, or a tuple of several tensors.
        y: targets [n, ...] of the run's task.
        order: the client's random generator for the round, which shuffles the examples and seeds
            the model's random numbers.
        epochs: number of passes over the examples; fewer than usual for a straggler.
        trained: 1 for each coordinate that is trained and 0 for each coordinate that keeps the
            model's value, float32 [D]; None trains all coordinates. The vector is the same in all
            tasks of a call of `updates`. A trainer may ignore it, because the plan does not release
            the layers that are not trained.

    Example:
        >>> task = ClientTask(torch.zeros(3, 2), torch.zeros(3), torch.Generator().manual_seed(1), epochs=2)
        >>> task.permutations().sort(dim=1).values.tolist()  # every example occurs once in an epoch
        [[0, 1, 2], [0, 1, 2]]
    """

    x: Inputs
    y: Tensor
    order: torch.Generator
    epochs: int
    trained: Tensor | None = None

    def permutations(self) -> Tensor:
        """Draw the order of the examples in every epoch, int64 [epochs, n]."""
        return torch.stack(
            [torch.randperm(len(self.y), generator=self.order) for _ in range(self.epochs)]
        )

    def seed(self) -> int:
        """Draw the seed of the model's random numbers in training, such as dropout. Call this
        method after `permutations`.
        """
        return int(torch.randint(2**63 - 1, (), generator=self.order))


class Trainer(Protocol):
    """Computes the updates of clients, either raw or with the contribution of every unit of privacy
    bounded (`BoundedUpdates`).

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

        Updates are on the trainer's device. A yielded tensor may be overwritten when the next
        tensor is requested.

        Raises:
            ConfigError: the trainer cannot train this model, or cannot train it on these tasks.
        """
