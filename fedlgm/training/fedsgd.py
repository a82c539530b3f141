"""FedSGD: each client takes one step per round, on one random batch of its examples (McMahan et al.
2017, arXiv 1602.05629).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedlgm.training import inputs
from fedlgm.training.base import ClientTask, LocalTraining
from fedlgm.training.sequential import SequentialTrainer
from fedlgm.training.vectorized import VectorizedTrainer


class _OneBatch:
    """Trains on one batch of `batch_size` examples instead of on all examples."""

    _settings: LocalTraining

    def updates(self, model: Tensor, tasks: Iterable[ClientTask]) -> Iterator[Tensor]:
        """Yield the updates of the other base class, which trains each client on one batch only."""
        trainer: Any = super()
        updates: Iterator[Tensor] = trainer.updates(model, map(self._batch, tasks))
        return updates

    def _batch(self, task: ClientTask) -> ClientTask:
        rows = torch.randperm(len(task.y), generator=task.order)[: self._settings.batch_size]
        return replace(task, x=inputs.take(task.x, rows), y=task.y[rows], epochs=1)


class FedSGD(_OneBatch, SequentialTrainer):
    """`SequentialTrainer` with one step on one random batch in every round.

    The privacy guarantee is the same as with plain training, because every update is bounded after
    training. With a large `lr`, the norm of every update exceeds the bound, so bounding normalises
    the update.

    Example:
        >>> from fedlgm import LayerTable
        >>> module, settings = torch.nn.Linear(2, 2), LocalTraining(lr=0.1, batch_size=2, epochs=5)
        >>> layers = LayerTable.from_module(module)
        >>> task = ClientTask(torch.eye(2), torch.tensor([0, 1]), torch.Generator(), 5)
        >>> update = next(FedSGD(module, layers, settings).updates(layers.flatten(module), [task]))
        >>> update.shape
        torch.Size([1, 6])
    """


class VectorizedFedSGD(_OneBatch, VectorizedTrainer):
    """`VectorizedTrainer` with one step per round on one random batch; see `FedSGD`."""
