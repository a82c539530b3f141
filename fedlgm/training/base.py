"""Local training: what a client does with the global model and its own data before anything is bounded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from fedlgm.contributions import Updates
from fedlgm.errors import ConfigError
from fedlgm.facts import LocalTraining

__all__ = ["ClientTask", "LocalTraining", "Trainer", "require_stateless"]


def require_stateless(module: nn.Module) -> None:
    """Refuse a module with buffers: what clients keep in them is neither bounded nor noised, and never aggregated.

    Raises:
        ConfigError: the module has buffers; the message names the first.
    """
    name = next((name for name, _ in module.named_buffers()), None)
    if name is not None:
        raise ConfigError(
            f"the model's buffer {name!r} would follow private data unbounded: use layers without state, for example "
            "GroupNorm in place of BatchNorm"
        )


@dataclass(frozen=True)
class ClientTask:
    """One client's share of a round.

    Attributes:
        x: inputs [n, ...] with n >= 1.
        y: integer targets [n].
        order: stream that shuffles the batches.
        epochs: passes to make; fewer than usual for a straggler.
    """

    x: Tensor
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
