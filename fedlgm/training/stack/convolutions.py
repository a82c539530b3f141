"""Convolutions of a stack, computed by a matrix product where this is faster, else by oneDNN."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from typing_extensions import override

from fedlgm.training.stack.layers import Parametric, pair
from fedlgm.training.stack.tape import Tape

aten = torch.ops.aten

# largest number of input channels for which oneDNN computes the weight's gradient at only a tenth
# of the machine's speed
_FEW = 4
_RUN = 32  # number of adjacent floats that a copy needs to be fast


class ProductConvolution(Parametric):
    """A convolution that is computed as a matrix product over unfolded images: from [N, H, W, C] to
    [N, H', W', out].
    """

    @staticmethod
    def suits(module: nn.Conv2d, first: bool) -> bool:
        """Whether the product is faster than oneDNN. If `first` is set, the layer's input needs no
        gradient.

        The product is faster for a first layer with few input channels, and for a kernel that is as
        large as one or two strides. In the second case, an unfolded batch is at most four times as
        large as the images, and folding its gradient back takes at most four sums.
        """
        if module.groups != 1 or module.dilation != (1, 1):
            return False
        if first and module.in_channels <= _FEW:
            return True
        return all(
            kernel in (stride, 2 * stride)
            for kernel, stride in zip(module.kernel_size, module.stride, strict=True)
        )

    def __init__(
        self, name: str, module: nn.Conv2d, weight: Tensor, bias: Tensor | None = None
    ) -> None:
        super().__init__(name, module, weight, bias)
        self._kernel, self._stride = pair(module.kernel_size), pair(module.stride)
        self._padding = pair(module.padding)

    @override
    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        out_channels = len(self._weight)
        self._padded = self._pad(tape, x)
        patches = self._unfold(tape, self._padded)
        examples, rows, columns, size = patches.shape
        self._patches = patches.view(-1, size)
        self._packed = tape.copy(f"{self._name} weight", self._weight.permute(0, 2, 3, 1))
        out = self.product(tape, self._patches, self._packed.view(out_channels, size))
        return out.view(examples, rows, columns, out_channels)

    @override
    def backward(self, tape: Tape, gradient: Tensor, wanted: bool) -> Tensor | None:
        flat = gradient.view(-1, gradient.shape[-1])
        packed = tape.memory.take(f"{self._name} weight gradient", *self._packed.shape)
        tape.multiply(flat.t(), self._patches, out=packed.view(len(packed), -1))
        tape.apply(self._of_weight.copy_, packed.permute(0, 3, 1, 2))
        self.sum_bias(tape, flat)
        return self._fold(tape, gradient) if wanted else None

    def _pad(self, tape: Tape, x: Tensor) -> Tensor:
        """Copy images to padded images [N, H + 2 padding, W + 2 padding, C]. The border is never
        overwritten, so it stays zero.
        """
        (height, width), (examples, rows, columns, channels) = self._padding, x.shape
        if height == width == 0 and x.is_contiguous():
            return x
        shape = (examples, rows + 2 * height, columns + 2 * width, channels)
        padded = tape.memory.take(f"{self._name} padded", *shape)
        tape.apply(padded[:, height : height + rows, width : width + columns].copy_, x)
        return padded

    def _unfold(self, tape: Tape, images: Tensor) -> Tensor:
        """Copy the patches [N, H', W', kernel height * kernel width * C] of contiguous images."""
        (high, wide), (down, right), (examples, height, width, channels) = (
            self._kernel,
            self._stride,
            images.shape,
        )
        rows, columns, run = (
            (height - high) // down + 1,
            (width - wide) // right + 1,
            wide * channels,
        )
        per_image, per_row, per_column, _ = images.stride()
        name = f"{self._name} patches"
        if run >= _RUN:
            strides = (per_image, down * per_row, right * per_column, per_row, 1)
            patches = images.as_strided((examples, rows, columns, high, run), strides)
            return tape.copy(name, patches).flatten(3)
        # Short runs are first gathered column by column, so that the numbers of a patch are
        # adjacent for the second copy.
        strips = tape.copy(
            f"{self._name} strips",
            images.as_strided(
                (examples, columns, height, run), (per_image, right * per_column, per_row, 1)
            ),
        )
        per_patch = (columns * height * run, down * run, height * run, 1)
        return tape.copy(name, strips.as_strided((examples, rows, columns, high * run), per_patch))

    def _fold(self, tape: Tape, gradient: Tensor) -> Tensor:
        """Compute the gradient of the images. The gradient of each cell of stride x stride pixels
        is a sum over the patches that contain the cell.

        The patches' gradient overwrites the patches, which are no longer needed.
        """
        examples, rows, columns, out_channels = gradient.shape
        (high, wide), (down, right), channels = self._kernel, self._stride, self._packed.shape[3]
        images = tape.memory.take(f"{self._name} gradient", *self._padded.shape)
        tape.apply(images.zero_)
        used = images[:, : (rows - 1) * down + high, : (columns - 1) * right + wide]
        cells = used.unflatten(1, (-1, down)).unflatten(3, (-1, right))
        patches, weight = self._patches, self._packed.view(out_channels, -1)
        tape.multiply(gradient.view(-1, out_channels), weight, out=patches)
        addends = patches.view(
            examples, rows, columns, high // down, down, wide // right, right, channels
        )
        for row in range(high // down):
            for column in range(wide // right):
                addend = addends[:, :, :, row, :, column].transpose(2, 3)
                tape.apply(cells[:, row : row + rows, :, column : column + columns].add_, addend)
        (top, left), (_, height, width, _) = self._padding, images.shape
        inner = images[:, top : height - top, left : width - left]
        if inner.is_contiguous():
            return inner
        return tape.copy(f"{self._name} gradient without border", inner)


class Convolution(Parametric):
    """Any other convolution, computed by oneDNN: from [N, H, W, C] to [N, H', W', out]."""

    def __init__(
        self, name: str, module: nn.Conv2d, weight: Tensor, bias: Tensor | None = None
    ) -> None:
        super().__init__(name, module, weight, bias)
        self._options = (
            module.stride,
            module.padding,
            module.dilation,
            False,
            [0, 0],
            module.groups,
        )

    @override
    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        self._x = x
        shape = self._convolve(x).shape
        return tape.do(self._convolve, x, out=tape.memory.take(f"{self._name} output", *shape))

    @override
    def backward(self, tape: Tape, gradient: Tensor, wanted: bool) -> Tensor | None:
        of_input = tape.memory.take(f"{self._name} gradient", *self._x.shape) if wanted else None
        tape.apply(self._differentiate, self._x, gradient, of_input)
        return of_input

    def _convolve(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        images = aten.convolution(
            x.permute(0, 3, 1, 2), self._weight, self._bias, *self._options
        ).permute(0, 2, 3, 1)
        return images if out is None else out.copy_(images)

    def _differentiate(self, x: Tensor, gradient: Tensor, of_input: Tensor | None) -> None:
        images, outputs = x.permute(0, 3, 1, 2), gradient.permute(0, 3, 1, 2)
        bias = None if self._bias is None else [len(self._bias)]
        wanted = [of_input is not None, True, bias is not None]
        got = aten.convolution_backward(outputs, images, self._weight, bias, *self._options, wanted)
        self._of_weight.copy_(got[1])
        if of_input is not None:
            of_input.copy_(got[0].permute(0, 2, 3, 1))
        if self._of_bias is not None:
            self._of_bias.copy_(got[2])
