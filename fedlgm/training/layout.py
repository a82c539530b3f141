"""Memory layout for training on the CPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

_FEW = 4  # input channels up to which an image's convolution is done as one matrix product
_RUN = 32  # floats that a copy must find side by side to be fast


def prefer_channels_last_(module: nn.Module) -> None:
    """Make a model train faster on the CPU, in place; its parameters and what it computes stay the same.

    * Convolutions hand on channels-last activations: torch's max-pooling and normalisation kernels are vectorised in
      that layout only. Weights keep their layout, so they can stay views of a flat vector.
    * A convolution of the images themselves becomes a matrix product: with one or three input channels oneDNN's
      gradient of the weights runs at a tenth of the machine's speed.
    """
    for child in module.modules():
        if isinstance(child, nn.Conv2d):
            if _reads_images(child):
                child.forward = partial(_by_matrix_product, child)  # type: ignore[method-assign]
            child.register_forward_hook(_channels_last)


def _channels_last(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    return output.contiguous(memory_format=torch.channels_last)


def _reads_images(module: nn.Conv2d) -> bool:
    plain = module.groups == 1 and module.dilation == (1, 1) and module.padding_mode == "zeros"
    return plain and module.in_channels <= _FEW and not isinstance(module.padding, str)


def _by_matrix_product(module: nn.Conv2d, images: Tensor) -> Tensor:
    """The convolution [N, C, H, W] -> [N, O, H', W'] over unfolded images, without a gradient for the images."""
    if images.requires_grad:
        return nn.Conv2d.forward(module, images)
    with torch.no_grad():
        height, width = module.padding  # type: ignore[misc]
        channels_last = nn.functional.pad(images.permute(0, 2, 3, 1), (0, 0, width, width, height, height))
        patches = _unfold(channels_last.contiguous(), module.kernel_size, module.stride)  # type: ignore[arg-type]
    examples, rows, columns, size = patches.shape
    weights = module.weight.permute(0, 2, 3, 1).reshape(module.out_channels, size).t()
    flat = patches.view(-1, size)
    products = flat @ weights if module.bias is None else torch.addmm(module.bias, flat, weights)
    return products.view(examples, rows, columns, module.out_channels).permute(0, 3, 1, 2)


def _unfold(images: Tensor, kernel: tuple[int, int], stride: tuple[int, int]) -> Tensor:
    """Patches [N, H', W', kernel height * kernel width * C] of contiguous images [N, H, W, C]."""
    examples, height, width, channels = images.shape
    rows, columns = (height - kernel[0]) // stride[0] + 1, (width - kernel[1]) // stride[1] + 1
    run = kernel[1] * channels
    per_image, per_row, per_column, _ = images.stride()
    if run >= _RUN:
        view = images.as_strided(
            (examples, rows, columns, kernel[0], run),
            (per_image, stride[0] * per_row, stride[1] * per_column, per_row, 1),
        )
        return view.reshape(examples, rows, columns, kernel[0] * run)
    # Short runs are gathered first, column by column, so that a whole patch lies side by side in the second copy.
    strips = images.as_strided(
        (examples, columns, height, run), (per_image, stride[1] * per_column, per_row, 1)
    ).contiguous()
    view = strips.as_strided(
        (examples, rows, columns, kernel[0] * run), (columns * height * run, stride[0] * run, height * run, 1)
    )
    return view.contiguous()
