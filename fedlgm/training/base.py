"""Local training: what a client does with the global model and its own data before anything is bounded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from fedlgm.contributions import Updates
from fedlgm.facts import LocalTraining
from fedlgm.inputs import Inputs

__all__ = ["ClientTask", "LocalTraining", "Trainer"]


@dataclass(frozen=True)
class ClientTask:
    """One client's share of a round.

    Attributes:
        x: inputs [n, ...] with n >= 1: one array, or a tuple of several.
        y: targets [n, ...] of the run's task.
        order: stream that shuffles the batches.
        epochs: passes to make; fewer than usual for a straggler.
    """

    x: Inputs
    y: Tensor
    order: torch.Generator
    epochs: int

    def permutations(self) -> Tensor:
        """Order of the examples in every epoch, int64 [epochs, n]."""
        return torch.stack([torch.randperm(len(self.y), generator=self.order) for _ in range(self.epochs)])


class Trainer(Protocol):
    """Computes the updates of clients: raw ones, or with every unit's share bounded (`BoundedUpdates`)."""

    def updates(self, model: Tensor, tasks: Iterable[ClientTask]) -> Iterator[Updates]:
        """Yield `local model - model` of the tasks in order, in blocks of consecutive tasks: float32 [b, D], b >= 1.

        Updates lie on the trainer's device. A yielded tensor may be overwritten when the next one is asked for.
        """
        ...
