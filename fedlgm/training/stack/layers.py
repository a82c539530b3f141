"""Layers that record the operations of their forward and backward pass on a tape.

All images are channels-last [N, H, W, C], because pooling and activations are vectorised only in
this layout.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor, nn
from typing_extensions import override

from fedlgm.training.stack.tape import Tape

aten = torch.ops.aten


class Layer(Protocol):
    """One layer of a `Stack`. For each tape, `backward` is called after `forward`."""

    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        """Record the computation of the output for a batch `x`, possibly in place. Return the
        output's tensor.
        """

    def backward(self, tape: Tape, gradient: Tensor, wanted: bool) -> Tensor | None:
        """Record the computation of the gradients of the parameters and, if `wanted` is set, of the
        input. Return the tensor of the input's gradient, if the layer computes it.

        `gradient`, the output's gradient, may be overwritten.
        """


class Parametric(Layer):
    """Base class of layers with a weight, an optional bias and tensors for their gradients.

    Args:
        name: name of the layer, also used for its memory.
        module: module whose parameters are read in place.
        weight: tensor for the gradient of the weight, in the weight's shape.
        bias: tensor for the gradient of the bias; None without a bias.
    """

    def __init__(
        self, name: str, module: nn.Linear | nn.Conv2d, weight: Tensor, bias: Tensor | None = None
    ) -> None:
        self._name = name
        self._weight, self._bias = (
            module.weight.detach(),
            None if module.bias is None else module.bias.detach(),
        )
        self._of_weight, self._of_bias = weight, bias

    def product(self, tape: Tape, x: Tensor, weight: Tensor) -> Tensor:
        """Record the product [N, out] of `x` [N, in] and the transposed `weight` [out, in], plus
        the bias.
        """
        out = tape.memory.take(f"{self._name} output", len(x), len(weight))
        return tape.multiply(x, weight.t(), self._bias, out=out)

    def sum_bias(self, tape: Tape, gradient: Tensor) -> None:
        """Record the gradient of the bias, as a sum of the gradient of the output [N, out]."""
        if self._of_bias is not None:
            tape.do(torch.sum, gradient, 0, out=self._of_bias)


class Linear(Parametric):
    """Fully connected layer, from [N, in] to [N, out]."""

    @override
    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        self._x = x
        return self.product(tape, x, self._weight)

    @override
    def backward(self, tape: Tape, gradient: Tensor, wanted: bool) -> Tensor | None:
        tape.multiply(gradient.t(), self._x, out=self._of_weight)
        self.sum_bias(tape, gradient)
        if not wanted:
            return None
        of_input = tape.memory.take(f"{self._name} gradient", *self._x.shape)
        return tape.multiply(gradient, self._weight, out=of_input)


_threshold_backward = partial(aten.threshold_backward.grad_input, threshold=0)


class Activation(Layer):
    """Sigmoid, tanh or ReLU, computed in place, so no other layer may need the activation's input
    afterwards.
    """

    KINDS: ClassVar[dict[type[nn.Module], tuple[Callable[..., Any], Callable[..., Any]]]] = {
        nn.Sigmoid: (torch.sigmoid, aten.sigmoid_backward.grad_input),
        nn.Tanh: (torch.tanh, aten.tanh_backward.grad_input),
        nn.ReLU: (partial(torch.clamp, min=0), _threshold_backward),
    }

    def __init__(self, module: nn.Module) -> None:
        self._value, self._derivative = self.KINDS[type(module)]

    @override
    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        self._y = x
        return tape.do(self._value, x, out=x)

    @override
    def backward(self, tape: Tape, gradient: Tensor, wanted: bool) -> Tensor | None:
        tape.apply(partial(self._derivative, grad_input=gradient), gradient, self._y)
        return gradient


class MaxPool(Layer):
    """Max-pooling over windows of 2 x 2 with steps of 1 or 2, computed along one axis after the
    other: from [N, H, W, C] to [N, H', W', C].

    Of equal values, the first counts as the maximum, as in PyTorch.
    """

    @staticmethod
    def suits(module: nn.MaxPool2d) -> bool:
        """Whether the pooling has 2 x 2 windows and steps of 1 or 2, without padding, dilation,
        ceil mode or indices.
        """
        plain = (
            pair(module.padding) == (0, 0)
            and pair(module.dilation) == (1, 1)
            and not (module.ceil_mode or module.return_indices)
        )
        return (
            plain and pair(module.kernel_size) == (2, 2) and pair(module.stride) in ((1, 1), (2, 2))
        )

    def __init__(self, name: str, module: nn.MaxPool2d) -> None:
        self._name, self._stride = name, pair(module.stride)[0]

    @override
    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        self._x = x
        self._wide = self._maximum(tape, x, 2)
        return self._maximum(tape, self._wide, 1)

    @override
    def backward(self, tape: Tape, gradient: Tensor, wanted: bool) -> Tensor | None:
        return self._route(tape, self._route(tape, gradient, self._wide, 1), self._x, 2)

    def _maximum(self, tape: Tape, x: Tensor, axis: int) -> Tensor:
        first, second = pairs_of(x, axis, self._stride)
        return tape.do(
            torch.maximum,
            first,
            second,
            out=tape.memory.take(f"{self._name} maxima {axis}", *first.shape),
        )

    def _route(self, tape: Tape, gradient: Tensor, x: Tensor, axis: int) -> Tensor:
        """Record that the gradient of each pair is written to the position of the pair's greater
        element.
        """
        first, second = pairs_of(x, axis, self._stride)
        routed = tape.memory.take(f"{self._name} gradient {axis}", *x.shape)
        to_first, to_second = pairs_of(routed, axis, self._stride)
        greater = tape.memory.take(f"{self._name} greater {axis}", *gradient.shape)
        tape.do(torch.sub, second, first, out=greater)
        tape.apply(partial(_threshold_backward, grad_input=greater), gradient, greater)
        if self._stride == 1 or x.shape[axis] % 2:
            tape.apply(
                routed.narrow(axis, x.shape[axis] - 1, 1).zero_
            )  # it is the first of no pair
        tape.do(torch.sub, gradient, greater, out=to_first)
        tape.apply(to_second.add_ if self._stride == 1 else to_second.copy_, greater)
        return routed


def pairs_of(x: Tensor, axis: int, step: int) -> tuple[Tensor, Tensor]:
    """Return the first and the second elements of the pairs of neighbours along an axis, where
    pairs begin at every `step`-th element.
    """
    count = (x.shape[axis] - 2) // step + 1
    seconds = x.narrow(axis, 1, x.shape[axis] - 1)
    every = [slice(None)] * axis + [slice(0, (count - 1) * step + 1, step)]
    return x[tuple(every)], seconds[tuple(every)]


class AveragePool(Layer):
    """Any average pooling, from [N, H, W, C] to [N, H', W', C]."""

    def __init__(self, name: str, module: nn.AvgPool2d) -> None:
        windows = [list(pair(size)) for size in (module.kernel_size, module.stride, module.padding)]
        self._options = (
            *windows,
            module.ceil_mode,
            module.count_include_pad,
            module.divisor_override,
        )
        self._name = name

    @override
    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        self._images = x.permute(0, 3, 1, 2)
        shape = aten.avg_pool2d(self._images, *self._options).permute(0, 2, 3, 1).shape
        out = tape.memory.take(f"{self._name} output", *shape)
        tape.do(aten.avg_pool2d.out, self._images, *self._options, out=out.permute(0, 3, 1, 2))
        return out

    @override
    def backward(self, tape: Tape, gradient: Tensor, wanted: bool) -> Tensor | None:
        out = tape.memory.take(f"{self._name} gradient", *self._images.permute(0, 2, 3, 1).shape)
        pool = partial(aten.avg_pool2d_backward.grad_input, grad_input=out.permute(0, 3, 1, 2))
        tape.apply(pool, gradient.permute(0, 3, 1, 2), self._images, *self._options)
        return out


class Flatten(Layer):
    """Flattening of images [N, H, W, C] to vectors [N, C * H * W] in PyTorch's order."""

    def __init__(self, name: str) -> None:
        self._name = name

    @override
    def forward(self, tape: Tape, x: Tensor) -> Tensor:
        self._shape = x.shape
        if x.ndim == 4:
            x = tape.copy(f"{self._name} output", x.permute(0, 3, 1, 2))
        return x.flatten(1)

    @override
    def backward(self, tape: Tape, gradient: Tensor, wanted: bool) -> Tensor | None:
        if len(self._shape) != 4:
            return gradient.view(self._shape)
        examples, rows, columns, channels = self._shape
        images = gradient.view(examples, channels, rows, columns).permute(0, 2, 3, 1)
        return tape.copy(f"{self._name} gradient", images)


def pair(size: Any) -> tuple[int, int]:
    """Convert a size of a PyTorch module, which is one number or a pair, to a pair."""
    return (size, size) if isinstance(size, int) else cast(tuple[int, int], tuple(size))
