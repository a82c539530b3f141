"""Loss and accuracy of a model on labelled data."""

from __future__ import annotations

import torch
from torch import Tensor, nn


@torch.no_grad()
def evaluate(module: nn.Module, x: Tensor, y: Tensor, batch_size: int = 1000) -> tuple[float, float]:
    """Mean cross-entropy and accuracy of `module` on inputs `x` [n, ...] and targets `y` [n]."""
    module.eval()
    loss, correct = 0.0, 0
    for inputs, targets in zip(x.split(batch_size), y.split(batch_size), strict=True):
        logits = module(inputs)
        loss += float(nn.functional.cross_entropy(logits, targets, reduction="sum"))
        correct += int((logits.argmax(dim=1) == targets).sum())
    return loss / len(y), correct / len(y)
