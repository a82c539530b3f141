"""Layer sizes of the models that are measured."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

KEY = (0x9E3779B9, 0x01234567)


def cnn_layers() -> list[int]:
    """Return the layers of the two-convolution network on 28 x 28 images (26,010 parameters)."""
    return [1040, 8224, 16416, 330]


def resnet_layers(blocks: tuple[int, ...], bottleneck: bool, classes: int) -> list[int]:
    """Module sizes of torchvision's ResNets in order (convolution weight; norm weight and bias;
    linear layer).
    """
    expansion = 4 if bottleneck else 1
    sizes = [3 * 64 * 49, 2 * 64]
    channels = 64
    for stage, count in enumerate(blocks):
        width = 64 * 2**stage
        for block in range(count):
            if bottleneck:
                convolutions = [(channels, width, 1), (width, width, 3), (width, 4 * width, 1)]
            else:
                convolutions = [(channels, width, 3), (width, width, 3)]
            if block == 0 and channels != width * expansion:
                convolutions.append((channels, width * expansion, 1))
            for inputs, outputs, kernel in convolutions:
                sizes += [inputs * outputs * kernel**2, 2 * outputs]
            channels = width * expansion
    return [*sizes, channels * classes + classes]


def models() -> dict[str, list[int]]:
    return {
        "cnn": cnn_layers(),
        "resnet18": resnet_layers((2, 2, 2, 2), False, 10),
        "resnet152": resnet_layers((3, 8, 36, 3), True, 1000),
    }


def offsets_of(sizes: list[int]) -> Tensor:
    return torch.tensor([0, *np.cumsum(sizes)])
