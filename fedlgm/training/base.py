"""Local training: what a client does with the global model and its own data before anything is bounded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from fedlgm.errors import ConfigError
from fedlgm.inputs import Inputs


@dataclass(frozen=True)
class LocalTraining:
    """Settings of one client's local training.

    Attributes:
        optimizer: "sgd" (with `momentum`) or "adam"; its state starts afresh in every round.
        lr: learning rate.
        momentum: for "sgd".
        epochs: passes over the client's own data.
        batch_size: examples of a step; the last batch of an epoch may be smaller.
        gradient_clip: l2 norm to which every batch gradient is clipped before the step; None leaves it.
    """

    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: float = 0.1
    momentum: float = 0.0
    epochs: int = 1
    batch_size: int = 32
    gradient_clip: float | None = None

    def __post_init__(self) -> None:
        if self.optimizer not in ("sgd", "adam"):
            raise ConfigError(f"training.optimizer: unknown {self.optimizer!r}; known: sgd, adam")
        if self.optimizer == "adam" and self.momentum:
            raise ConfigError("training.momentum is an option of optimizer 'sgd'; 'adam' has its own")

    def steps(self, examples: int) -> int:
        """Optimizer steps of a client with that many examples."""
        return self.epochs * -(-examples // self.batch_size)


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
    """Computes the updates of clients; knows nothing about privacy."""

    def updates(self, model: Tensor, tasks: Iterable[ClientTask]) -> Iterator[Tensor]:
        """Yield `local model - model` of the tasks in order, in blocks of consecutive tasks: float32 [b, D], b >= 1.

        Updates lie on the trainer's device. A yielded tensor may be overwritten when the next one is asked for.
        """
        ...
