"""Max-pooling over 2 x 2 windows of channels-last images. On a CPU, this code is several times as
fast as PyTorch's kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fedlgm.training.example_level.rules.rule import chunks
from fedlgm.training.models.built import is_altered
from fedlgm.training.stack.layers import MaxPool, pair, pairs_of


def suits(module: nn.Module) -> bool:
    """Whether a module is an unaltered `nn.MaxPool2d` with 2 x 2 windows, steps of 1 or 2, and no
    other options.
    """
    return type(module) is nn.MaxPool2d and not is_altered(module) and MaxPool.suits(module)


def max_pool(module: nn.MaxPool2d, x: Tensor) -> Tensor:
    """Compute the result of `module(x)`. Of equal values, the first counts as the maximum, as in
    PyTorch.
    """
    if (
        x.dim() != 4
        or x.device.type != "cpu"
        or not x.is_contiguous(memory_format=torch.channels_last)
    ):
        return nn.MaxPool2d.forward(module, x)
    return _MaxPool.apply(x, pair(module.stride)[0])


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, step: int) -> Tensor:  # type: ignore[override]
        images = x.permute(0, 2, 3, 1)
        wide = torch.maximum(*pairs_of(images, 2, step))
        ctx.save_for_backward(images, wide)
        ctx.step = step
        return torch.maximum(*pairs_of(wide, 1, step)).permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        images, wide = ctx.saved_tensors
        gradient, out = gradients[0].permute(0, 2, 3, 1), torch.empty_like(images)
        each = images.shape[1:].numel() * images.element_size()
        for few in chunks(len(images), each, FEW_BYTES):
            routed = _route(gradient[few], wide[few], 1, ctx.step, torch.empty_like(wide[few]))
            _route(routed, images[few], 2, ctx.step, out[few])
        return out.permute(0, 3, 1, 2), None


FEW_BYTES = 1 << 19
"""Size in bytes of the images that are processed together, so that images and results fit into the
cache.
"""


def _route(gradient: Tensor, x: Tensor, axis: int, step: int, routed: Tensor) -> Tensor:
    """Write the gradient of each pair to the position of the pair's greater element, in `routed`,
    which has the shape of `x`.
    """
    first, second = pairs_of(x, axis, step)
    to_first, to_second = pairs_of(routed, axis, step)
    # The kernel of a threshold needs one pass: it keeps the gradient where the second element is
    # greater.
    greater = torch.ops.aten.threshold_backward(gradient, second - first, 0)
    if step == 1 or x.shape[axis] % 2:
        # The last element is not the first of any pair.
        routed.narrow(axis, x.shape[axis] - 1, 1).zero_()
    torch.sub(gradient, greater, out=to_first)
    if step == 1:
        to_second.add_(greater)
    else:
        to_second.copy_(greater)
    return routed
