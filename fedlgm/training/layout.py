"""Memory layout for training with autograd on the CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def prefer_channels_last_(module: nn.Module) -> None:
    """Make a model's convolutions hand on channels-last activations, in place.

    torch's max-pooling and normalisation kernels are vectorised in that layout only. Weights keep their layout, so they
    can stay views of a flat vector, and what the model computes stays the same.
    """
    for child in module.modules():
        if isinstance(child, nn.Conv2d):
            child.register_forward_hook(_channels_last)


def _channels_last(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.contiguous(memory_format=torch.channels_last)
