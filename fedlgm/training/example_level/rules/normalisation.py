"""Rules for normalisation inside an example: LayerNorm and GroupNorm. The gradients of weight and
bias are sums over positions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import override

from fedlgm.training.example_level.rules.products import row_squares
from fedlgm.training.example_level.rules.rule import Kept, KeptGradients, Rule, Use, chunks

aten = torch.ops.aten


class _AffineRule(Rule):
    """Base class of rules for weight * xhat + bias, where xhat is the normalised input. The
    gradients are the sums of dy * xhat and of dy over an example's positions.
    """

    @override
    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        out, mean, scale = self._normalise(x)
        return out, (mean.view(len(x), -1), scale.view(len(x), -1))

    @override
    def keep(self, use: Use) -> Kept:
        gradients = self.instantiate(use)
        return KeptGradients(gradients, [row_squares(gradient) for gradient in gradients])

    def _normalise(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the output, the means and the inverse standard deviations."""
        raise NotImplementedError


class LayerNormRule(_AffineRule):
    """Rule for `nn.LayerNorm` over the last dimensions."""

    module: nn.LayerNorm

    @classmethod
    @override
    def dimensions(cls, module: nn.LayerNorm) -> int:
        return 1 + len(module.normalized_shape)

    @override
    def input_gradient(self, use: Use) -> Tensor:
        shape, weight = list(self.module.normalized_shape), self.module.weight.detach()
        statistics = (
            value.view(*use.x.shape[: -len(shape)], *(1,) * len(shape)) for value in use.saved
        )
        wanted = [True, False, False]
        return aten.native_layer_norm_backward(
            use.dy, use.x, shape, *statistics, weight, self.bias_of(), wanted
        )[0]

    @override
    def instantiate(self, use: Use) -> list[Tensor]:
        x, size, gradients = use.x, self.module.weight.numel(), []
        dy = use.dy.reshape(len(x), -1, size)
        if "weight" in self.parameters:
            gradient = dy.new_empty(len(x), size)
            wide, (mean, scale) = (
                x.reshape(len(x), -1, size),
                (value[..., None] for value in use.saved),
            )
            for rows in chunks(len(x), 2 * dy[0].numel() * dy.element_size()):
                scratch = self.memory.take("normalised", *dy[rows].shape)
                torch.sub(wide[rows], mean[rows], out=scratch).mul_(scale[rows]).mul_(dy[rows])
                torch.sum(scratch, 1, out=gradient[rows])
            gradients.append(gradient)
        if "bias" in self.parameters:
            gradients.append(dy.sum(1))
        return gradients

    def _normalise(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        module = self.module
        return aten.native_layer_norm(
            x, list(module.normalized_shape), module.weight.detach(), self.bias_of(), module.eps
        )


class GroupNormRule(_AffineRule):
    """Rule for `nn.GroupNorm` with inputs [n, C, ...]."""

    module: nn.GroupNorm

    @classmethod
    @override
    def dimensions(cls, module: nn.Module) -> int:
        return 2

    @override
    def input_gradient(self, use: Use) -> Tensor:
        """Compute the gradient of the input by PyTorch's kernel or, where this kernel is slow
        (channels last), by three passes over data in the processor's cache.

        With a = weight * dy and xhat = (x - mean) * scale, the gradient is scale (a - mean(a) -
        xhat mean(a xhat)), where the means are over a group.
        """
        (n, channels), positions = use.x.shape[:2], use.x[0, 0].numel()
        weight, groups = self.module.weight.detach(), self.module.num_groups
        if not use.shared or not use.x.is_contiguous(memory_format=torch.channels_last):
            options = weight, n, channels, positions, groups
            return aten.native_group_norm_backward(
                use.dy, use.x, *use.saved, *options, [True, False, False]
            )[0]
        (mean, scale), size = use.saved, positions * channels // groups
        along, plain = ((weight * value).view(n, groups, -1).sum(2) / size for value in use.shared)
        slope = -(scale.square() * along)  # mean of x after the group's mean is subtracted
        scale, slope, mean = (
            value.repeat_interleave(channels // groups, 1) for value in (scale, slope, mean)
        )
        shift = -(plain * use.saved[1]).repeat_interleave(channels // groups, 1) - slope * mean
        wide, dy = self._by_position(use.x), self._by_position(use.dy)
        out = torch.empty_like(use.x)
        for rows in chunks(n, 3 * dy[0].numel() * dy.element_size()):
            part = self._by_position(out)[rows]
            torch.mul(dy[rows], (scale * weight)[rows, None], out=part)
            part.addcmul_(wide[rows], slope[rows, None]).add_(shift[rows, None])
        return out

    @override
    def instantiate(self, use: Use) -> list[Tensor]:
        """Compute the gradients of weight and bias. The input is centred before the product,
        because a large mean would otherwise cause cancellation.
        """
        n, channels = use.x.shape[:2]
        repeat = channels // self.module.num_groups
        mean, scale = (value.repeat_interleave(repeat, 1) for value in use.saved)
        wide, dy = self._by_position(use.x), self._by_position(use.dy)
        gradient = dy.new_empty(n, channels)
        for rows in chunks(n, 2 * dy[0].numel() * dy.element_size()):
            scratch = self.memory.take("normalised", *dy[rows].shape)
            torch.sub(wide[rows], mean[rows, None], out=scratch).mul_(dy[rows])
            torch.sum(scratch, 1, out=gradient[rows])
        gradient.mul_(scale)
        bias = dy.sum(1)
        use.shared = gradient, bias
        gradients = {"weight": gradient, "bias": bias}
        return [gradients[key] for key in self.parameters]

    def _by_position(self, x: Tensor) -> Tensor:
        """View images [n, C, ...] as [n, positions, C]."""
        return (x[:, :, None] if x.ndim == 2 else x.flatten(2)).transpose(1, 2)

    def _normalise(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        module, (n, channels) = self.module, x.shape[:2]
        weight, positions = module.weight.detach(), x[0, 0].numel()
        return aten.native_group_norm(
            x, weight, self.bias_of(), n, channels, positions, module.num_groups, module.eps
        )
