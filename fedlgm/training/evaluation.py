"""Loss and accuracy of a classifier on labelled data."""

from __future__ import annotations

from torch import Tensor, nn

from fedlgm import tasks


def evaluate(module: nn.Module, x: Tensor, y: Tensor, batch_size: int = 1000) -> tuple[float, float]:
    """Mean cross-entropy and accuracy of `module` on inputs `x` [n, ...] and targets `y` [n]."""
    metrics = tasks.evaluate(tasks.Classification(), module, x, y, batch_size)
    return metrics["loss"], metrics["accuracy"]
