"""Local optimizers over one flat vector, by torch's functional interface: a third of the cost of an optimizer object."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from fedlgm.training.base import LocalTraining


def stepper(settings: LocalTraining, weights: Tensor, gradient: Tensor) -> Callable[[], None]:
    """A function that makes one step of a fresh optimizer, in place.

    Args:
        settings: which optimizer; as `torch.optim.Adam` or `torch.optim.SGD` with their defaults would step.
        weights: float32 of any shape, changed by each call.
        gradient: of the same shape, read by each call.
    """
    if settings.optimizer == "adam":
        mean, square, steps = (
            torch.zeros_like(weights),
            torch.zeros_like(weights),
            torch.zeros((), device=weights.device),
        )

        def adam_step() -> None:
            adam(
                [weights], [gradient], [mean], [square], [], [steps], fused=True,
                lr=settings.lr, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0, amsgrad=False, maximize=False,
            )  # fmt: skip

        return adam_step
    momenta: list[Tensor | None] = [None]

    def sgd_step() -> None:
        sgd(
            [weights], [gradient], momenta, fused=True,
            lr=settings.lr, momentum=settings.momentum, dampening=0.0, weight_decay=0.0, nesterov=False, maximize=False,
        )  # fmt: skip

    return sgd_step
