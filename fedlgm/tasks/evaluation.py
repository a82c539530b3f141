"""Metrics of a model on data."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedlgm import inputs
from fedlgm.inputs import Inputs
from fedlgm.tasks.base import Task, measured


@torch.no_grad()
def evaluate(task: Task, module: nn.Module, x: Inputs, y: Tensor, batch_size: int = 1000) -> dict[str, float]:
    """The task's metrics of `module` on inputs `x` [n, ...] and targets `y` [n, ...], n >= 1; "loss" is among them.

    The module is left in evaluation mode.
    """
    module.eval()
    batches = zip(inputs.split(x, batch_size), y.split(batch_size), strict=True)
    return measured(task, ((inputs.call(module, batch), targets) for batch, targets in batches))
