"""Convolutions of one and two dimensions, in channels-last layout.

The gradient of the weight is the product of the transposed gradient of the output [T, out] and the
patches [T, kernel * in], where T is the number of positions. In channels-last layout, a patch
consists of `kernel height` runs of `kernel width * in` adjacent numbers, so patches are strided
copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

from fedlgm.training.example_level.rules.products import ProductRule
from fedlgm.training.example_level.rules.rule import Use, add_product_, chunks

aten = torch.ops.aten

FEW_CHANNELS = 4
FEW_POSITIONS, MANY_CHANNELS = 16, 256
PIXELS_PAY = 0.7
"""Largest ratio T (p + d) / (p d) for which Gram matrices of pixels take less time than per-example
gradients, as measured on CPUs. T is the number of positions, and the weight has p outputs of d
numbers.
"""
WIDE_PRODUCT = 4096
"""Smallest ratio p d / T for which a product of patches takes less time than oneDNN's gradient of
the weight.
"""


def pair(value: Any) -> tuple[int, int]:
    """Convert a layer's setting to (height, width). One-dimensional layers have height 1."""
    values = tuple(value)
    return (values[0], values[1]) if len(values) == 2 else (1, values[0])


class ConvolutionRule(ProductRule):
    """Rule for `nn.Conv2d` and `nn.Conv1d` with one group and any stride, padding and dilation."""

    module: nn.Conv2d | nn.Conv1d

    @classmethod
    @override
    def suits(cls, module: nn.Module) -> bool:
        """Whether the module is a convolution with one group; grouped convolutions use the generic
        method.
        """
        return isinstance(module, nn.Conv1d | nn.Conv2d) and module.groups == 1

    @classmethod
    @override
    def dimensions(cls, module: nn.Conv2d | nn.Conv1d) -> int:
        return 2 + len(module.kernel_size)

    def __init__(self, module: nn.Conv2d | nn.Conv1d, *args: Any) -> None:
        super().__init__(module, *args)
        self._flat = isinstance(module, nn.Conv1d)
        self._kernel, self._stride = pair(module.kernel_size), pair(module.stride)
        self._dilation = pair(module.dilation)
        # Other kinds of padding are added in `prepare`, where autograd differentiates them.
        self._before = module.padding_mode != "zeros" or isinstance(module.padding, str)
        self._padding = (0, 0) if self._before else pair(module.padding)
        if self._flat and not self._before:
            self._padding = (0, self._padding[1])
        self._options = (self._stride, self._padding, self._dilation, False, (0, 0), 1)

    @override
    def prepare(self, x: Tensor) -> Tensor:
        if self._before and any(self.module._reversed_padding_repeated_twice):
            mode = "constant" if self.module.padding_mode == "zeros" else self.module.padding_mode
            x = functional.pad(x, self.module._reversed_padding_repeated_twice, mode=mode)
        if self._flat:
            x = x.unsqueeze(2)
        return x.contiguous(memory_format=self._layout(x))

    @override
    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute the output, by a product of patches or by oneDNN. Patches are returned to be
        saved.
        """
        if not self._by_product(x):
            out = aten.convolution(x, self._weight(), self.bias_of(), *self._options)
            return (out.squeeze(2) if self._flat else out), ()
        patches, (rows, columns) = self._patches(x, x.new_empty)
        weight = self._weight().permute(0, 2, 3, 1).reshape(self.extent())
        bias = self.bias_of()
        flat = patches.flatten(0, 1)
        out = torch.mm(flat, weight.t()) if bias is None else torch.addmm(bias, flat, weight.t())
        out = out.view(len(x), rows, columns, -1).permute(0, 3, 1, 2)
        return (out.squeeze(2) if self._flat else out), (patches,)

    @override
    def numbers_to_keep(self, x: Tensor, out: Tensor) -> int:
        """Number of values in an example's patches if `forward` saves them, and otherwise 0."""
        return out[0, 0].numel() * self.extent()[1] if self._by_product(self._wide(x)) else 0

    @override
    def input_gradient(self, use: Use) -> Tensor:
        dy = self._images(use.dy)
        return aten.convolution_backward(
            dy, use.x, self._weight(), None, *self._options, [True, False, False]
        )[0]

    @override
    def positions(self, use: Use) -> int:
        return use.dy[0, 0].numel()

    @override
    def extent(self) -> tuple[int, int]:
        weight = self.module.weight
        return len(weight), weight[0].numel()

    @override
    def columns(self, dy: Tensor) -> Tensor:
        return self._images(dy).permute(0, 2, 3, 1).reshape(len(dy), -1, dy.shape[1])

    @override
    def operand(self, use: Use) -> Tensor:
        """Return the patches, which the forward pass has saved or which are now formed in scratch
        memory.
        """
        return use.saved[0] if use.saved else self._patches(use.x)[0]

    @override
    def products(self, use: Use, rows: slice, out: Tensor) -> Tensor:
        """Compute the products. With a vertical stride of 1, strips replace the patches; for a
        kernel of size 3, they need only a third of the copying.
        """
        y = self.columns(use.dy[rows]).transpose(1, 2)
        if use.saved or not self._by_strips():
            return torch.bmm(y, self.operand(use[rows]), out=out)
        strips, columns = self._strips(use.x[rows])
        # The gradient of line i of the kernel is the output's gradient times the strips that begin
        # i lines lower.
        each, positions = out.view(*out.shape[:2], self._kernel[0], -1), y.shape[2]
        for i in range(self._kernel[0]):
            low = i * self._dilation[0] * columns
            torch.bmm(y, strips[:, low : low + positions], out=each[:, :, i])
        return out

    @override
    def operand_bytes(self, use: Use) -> int:
        return self._patch_bytes(use) // (self._kernel[0] if self._by_strips() else 1)

    def _patch_bytes(self, use: Use) -> int:
        """Bytes of scratch memory per example that the patches take."""
        return 0 if use.saved else self.positions(use) * self.extent()[1] * use.x.element_size()

    @override
    def ghost_pays(self, positions: int) -> bool:
        """Whether Gram matrices take less time than per-example gradients. With stride and dilation
        1, Gram matrices of pixels are used, which are cheaper than those of patches.
        """
        outputs, inputs = self.extent()
        if self._stride == self._dilation == (1, 1) and self._kernel != (1, 1):
            return positions * (outputs + inputs) <= PIXELS_PAY * outputs * inputs
        return super().ghost_pays(positions)

    @override
    def grams(self, use: Use, rows: slice) -> Tensor:
        """Compute the Gram matrices of the patches. With stride and dilation 1, they are sums of
        shifted Gram matrices of the pixels.
        """
        if use.saved or self._stride != (1, 1) or self._dilation != (1, 1):
            patches = self.operand(use[rows])
            gram = self.memory.take(
                "gram of inputs", len(patches), patches.shape[1], patches.shape[1]
            )
            return torch.bmm(patches, patches.transpose(1, 2), out=gram)
        pixels = self._pad(use.x[rows])
        n, height, width, _ = pixels.shape
        (down, right), flat = self._kernel, pixels.flatten(1, 2)
        high, wide = height - down + 1, width - right + 1
        gram = self.memory.take("gram of pixels", n, height * width, height * width)
        gram = torch.bmm(flat, flat.transpose(1, 2), out=gram).view(n, height, width, height, width)
        # Patches at (i, j) and (k, l) have the product sum_{p, q} <x[i+p, j+q], x[k+p, l+q]>: entries of
        # the pixels' Gram matrix on one diagonal, summed over q here and over p below.
        across = self.memory.take("gram of strips", n, height, wide, height, wide).copy_(
            gram[:, :, :wide, :, :wide]
        )
        for q in range(1, right):
            across.add_(gram[:, :, q : q + wide, :, q : q + wide])
        patches = self.memory.take("gram of inputs", n, high, wide, high, wide).copy_(
            across[:, :high, :, :high]
        )
        for q in range(1, down):
            patches.add_(across[:, q : q + high, :, q : q + high])
        return patches.view(n, high * wide, high * wide)

    @override
    def add_product(self, total: Tensor, use: Use, factors: Tensor) -> None:
        if len(use) == 0:
            return
        p, d = self.extent()
        # For a large weight, the sum is one matrix product over patches; otherwise oneDNN computes
        # it from the scaled batch.
        if use.saved or p * d >= WIDE_PRODUCT * self.positions(use) or total.dtype != use.x.dtype:
            scaled, total = self._scale(self.columns(use.dy), factors), total.view(p, d)
            for rows in chunks(len(use), self._patch_bytes(use)):
                add_product_(
                    total, scaled[rows].flatten(0, 1), self.operand(use[rows]).flatten(0, 1)
                )
            return
        x, dy = use.x, self._images(use.dy)
        if dy.is_contiguous(memory_format=torch.channels_last):
            scaled = self.memory.take("scaled", len(dy), *dy.shape[2:], dy.shape[1]).permute(
                0, 3, 1, 2
            )
        else:
            scaled = self.memory.take("scaled", *dy.shape)
        torch.mul(dy, factors[:, None, None, None], out=scaled)
        gradient = aten.convolution_backward(
            scaled, x, self._weight(), None, *self._options, [False, True, False]
        )[1]
        total.view(len(gradient), *gradient.shape[2:], gradient.shape[1]).add_(
            gradient.permute(0, 2, 3, 1)
        )

    @override
    def in_order(self, gradients: Tensor) -> Tensor:
        channels = self.module.weight.shape[1]
        return gradients.unflatten(-1, (*self._kernel, channels)).movedim(-1, -3)

    @override
    def finish(self, sums: Sequence[Tensor]) -> None:
        if "weight" in self.parameters and not self.arranged:
            each = sums[0].view(self.extent())
            for rows in chunks(len(each), each[0].numel() * each.element_size()):
                each[rows] = self.in_order(each[rows]).reshape(-1, each.shape[1])
        self.arranged = True

    def _weight(self) -> Tensor:
        weight = self.module.weight.detach()
        return weight.unsqueeze(2) if self._flat else weight

    def _images(self, dy: Tensor) -> Tensor:
        """Return the output's gradient as images in the chosen layout."""
        dy = self._wide(dy)
        return dy.contiguous(memory_format=self._layout(dy))

    def _wide(self, dy: Tensor) -> Tensor:
        return dy.unsqueeze(2) if self._flat and dy.dim() == 3 else dy

    def _layout(self, images: Tensor) -> torch.memory_format:
        """Choose channels last, except for images of few positions with many output channels, for
        which oneDNN is 1.8 times as fast in the other layout.
        """
        few = images.shape[2] * images.shape[3] <= FEW_POSITIONS * self._stride[0] * self._stride[1]
        return (
            torch.contiguous_format
            if few and self.extent()[0] >= MANY_CHANNELS
            else torch.channels_last
        )

    def _pad(self, x: Tensor) -> Tensor:
        """Copy images to [c, H, W, C] with a border of zeros. The border is never overwritten, so
        all layers of the same shape share it.
        """
        x = x.permute(0, 2, 3, 1)
        (high, wide), (n, height, width, channels) = self._padding, x.shape
        if (high, wide) == (0, 0):
            return x.contiguous()
        size = height + 2 * high, width + 2 * wide, channels
        padded = self.memory.take(f"padded {(high, wide)} to {size}", n, *size)
        padded[:, high : high + height, wide : wide + width].copy_(x)
        return padded

    def _by_product(self, x: Tensor) -> bool:
        """Whether a matrix product over patches is faster than oneDNN, which is so for few channels
        and for patches that overlap little.
        """
        if self._dilation != (1, 1) or x.device.type != "cpu":
            return False
        kernels = zip(self._kernel, self._stride, strict=True)
        return x.shape[1] <= FEW_CHANNELS or (
            self._kernel != (1, 1)
            and all(kernel in (stride, 2 * stride) for kernel, stride in kernels)
        )

    def _by_strips(self) -> bool:
        return self._stride[0] == 1 and self._kernel[0] > 1

    def _strips(self, x: Tensor) -> tuple[Tensor, int]:
        """Copy strips, which are the lines of all patches, to scratch memory [c, H * W', kernel
        width * in]. Return the strips and W', the number of columns of patches; H is the padded
        height.

        A patch consists of `kernel height` strips of one column. With a vertical stride of 1, the
        strips under the i-th line of the kernel are adjacent.
        """
        strips, (_, columns) = self._unfold(x, 1, 1, partial(self.memory.take, "strips"))
        return strips, columns

    def _patches(
        self, x: Tensor, take: Callable[..., Tensor] | None = None
    ) -> tuple[Tensor, tuple[int, int]]:
        """Copy the patches [c, T, kernel height * kernel width * in] to scratch memory, or to
        memory from `take(*shape)`. Return the patches and the output's size (H', W').
        """
        take = take or partial(self.memory.take, "patches")
        return self._unfold(x, self._kernel[0], self._stride[0], take)

    def _unfold(
        self, x: Tensor, high: int, down: int, take: Callable[..., Tensor]
    ) -> tuple[Tensor, tuple[int, int]]:
        """Copy the patches of `high` lines that begin at every `down`-th line. Return the patches,
        and the numbers of rows and columns of patches.
        """
        pixels, wide, right = self._pad(x), self._kernel[1], self._stride[1]
        tall, broad = self._dilation
        n, height, width, channels = pixels.shape
        rows = (height - tall * (high - 1) - 1) // down + 1
        columns = (width - broad * (wide - 1) - 1) // right + 1
        example, row, column, _ = pixels.stride()
        size = n, rows * columns, high * wide * channels
        patches = take(*size)
        shape: tuple[int, ...] = (n, rows, columns, high, wide, channels)
        strides: tuple[int, ...] = (
            example,
            down * row,
            right * column,
            tall * row,
            broad * column,
            1,
        )
        if broad == 1 and column == channels:
            shape, strides = (*shape[:4], wide * channels), (*strides[:4], 1)
        patches.view(shape).copy_(pixels.as_strided(shape, strides, pixels.storage_offset()))
        return patches, (rows, columns)
