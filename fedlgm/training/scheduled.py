"""Plain training with a learning-rate schedule over a client's local steps."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from fedlgm.training.optimizers import FlatOptimizer
from fedlgm.training.rates import factors
from fedlgm.training.sequential import SequentialTrainer
from fedlgm.wording import prefix_key


class ScheduledTrainer(SequentialTrainer):
    """`SequentialTrainer` with a learning-rate schedule. The learning rate in local step t of n is
    `training.lr` times the schedule's factor for t and n.

    A client's number of steps depends on its data, and is not sent. The client's update is bounded
    like any other update, so a schedule changes no guarantee. For a schedule of the server's step
    over rounds, see `federation.server_schedule`.

    Args:
        arguments: see `SequentialTrainer`.
        schedule: "linear", "cosine", or "package.module:name"; see `fedlgm.training.rates.factors`.
        options: see `SequentialTrainer`.

    Raises:
        ConfigError: the schedule is unknown, or its function is not valid.

    Example:
        >>> import torch
        >>> from fedlgm import LayerTable
        >>> from fedlgm.training import ClientTask, LocalTraining, SequentialTrainer
        >>> module, settings = torch.nn.Linear(2, 2), LocalTraining(lr=0.1, batch_size=1)
        >>> layers, x, y = LayerTable.from_module(module), torch.eye(2), torch.tensor([0, 1])
        >>> model = layers.flatten(module)
        >>> def length(trainer):
        ...     return float(next(trainer.updates(model, [ClientTask(x, y, torch.Generator(), 5)])).norm())
        >>> scheduled, plain = ScheduledTrainer(module, layers, settings), SequentialTrainer(module, layers, settings)
        >>> length(scheduled) < length(plain)
        True
    """

    def __init__(self, *arguments: Any, schedule: str = "cosine", **options: Any) -> None:
        with prefix_key("trainer.schedule"):
            factors(schedule, 1, "step")
        super().__init__(*arguments, **options)
        self._schedule = schedule

    def _optimizer(self, steps: int) -> FlatOptimizer:
        optimizer = _Scheduled.of(self._settings, self._weights)
        optimizer.rates = optimizer.lr * factors(self._schedule, steps, "step")
        return optimizer


class _Scheduled(FlatOptimizer):
    rates: np.ndarray
    taken = 0

    def step(self, gradient: Tensor) -> None:
        self.lr, self.taken = float(self.rates[self.taken]), self.taken + 1
        super().step(gradient)
