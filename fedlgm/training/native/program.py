"""Translation of a model to a program for the kernel, with one row of integers for every layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fedlgm.errors import ConfigError
from fedlgm.planning.layers import LayerTable
from fedlgm.training.stack.layers import pair
from fedlgm.training.stack.model import is_plain_stack
from fedlgm.training.tasks import Binary, Classification, Ranked, Regression, Task

_MOST = 64  # largest number of layers, as in kernel.cpp
_LARGEST = 2**31  # limit for the number of values in an example's activations of a layer


class _Kind(IntEnum):
    CONVOLUTION, MAXIMUM, AVERAGE, SIGMOID, TANH, RELU = range(6)


_LOSSES: tuple[tuple[Task, ...], ...] = (
    (Classification(),),
    (Regression("squared"),),
    (Binary(), Ranked()),
)
"""Tasks that use each `Loss` in kernel.cpp."""
_ACTIVATIONS = {nn.Sigmoid: _Kind.SIGMOID, nn.Tanh: _Kind.TANH, nn.ReLU: _Kind.RELU}


@dataclass(frozen=True, eq=False)
class Program:
    """The kernel's program of a stack of layers, for inputs of one shape. `Program.of` creates it.

    Attributes:
        ops: the fields of `Op` in kernel.cpp, int64 [layers, 15].
        shape: shape of one input.
        outputs: number of outputs per example.
        loss: number of the loss in kernel.cpp.
        parameters: number of the model's parameters.
    """

    ops: Tensor
    shape: tuple[int, ...]
    outputs: int
    loss: int
    parameters: int

    @classmethod
    def of(
        cls, module: nn.Module, layers: LayerTable, shape: tuple[int, ...], task: Task
    ) -> Program:
        """Translate a module to a program.

        Args:
            module: a plain `nn.Sequential` of Conv2d, MaxPool2d, AvgPool2d, AdaptiveAvgPool2d(1),
                Linear, Flatten, Sigmoid, Tanh and ReLU.
            layers: the module's layer table.
            shape: shape of one input, [C, H, W] or [features].
            task: classification, regression with squared loss, or binary labels.

        Raises:
            ConfigError: the kernel does not support the module or the task; the message names what
                is unsupported.

        Example:
            >>> module = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
            >>> Program.of(module, LayerTable.from_module(module), (4,), Classification()).outputs
            2
        """
        try:
            ops = _Walk(module, layers, shape).ops
            loss = _loss(task)
        except _UnknownError as unknown:
            raise ConfigError(
                f"training.kernel = 'native' does not know {unknown}: use training.kernel = 'torch'"
            ) from None
        return cls(torch.tensor(ops, dtype=torch.int64), shape, ops[-1][4], loss, int(layers.size))


class _UnknownError(Exception):
    """Raised for a model or task that the kernel does not support; the message names what is
    unsupported.
    """


def _loss(task: Task) -> int:
    for code, tasks in enumerate(_LOSSES):
        if task in tasks:
            return code
    raise _UnknownError(f"the loss of task {task!r}")


class _Walk:
    """Visits the layers in order, collects their ops and keeps track of the activations' shape.

    When images are flattened, the recorded shape stays that of the images. The next linear layer is
    treated as a convolution with a kernel as large as the image, so nothing is copied.
    """

    def __init__(self, module: nn.Module, layers: LayerTable, shape: tuple[int, ...]) -> None:
        if not is_plain_stack(module):
            raise _UnknownError(
                "models that are not plain sequences of layers, or that have hooks or frozen or "
                "shared parameters"
            )
        places = {slot.name: slot.offset for slot in layers.slots()}
        shapes = {slot.name: tuple(slot.shape) for slot in layers.slots()}
        if shapes != {name: tuple(p.shape) for name, p in module.named_parameters()}:
            raise _UnknownError("models with other parameters than the layer table")
        if any(p.dtype != torch.float32 for p in module.parameters()):
            raise _UnknownError("parameters other than float32")
        if not all(isinstance(size, int) for size in shape):
            raise _UnknownError("several inputs")
        self._places, self.ops = places, list[list[int]]()
        children = list(module.named_children())
        spatial = (nn.Conv2d, nn.MaxPool2d, nn.AvgPool2d, nn.AdaptiveAvgPool2d)
        first = next(
            (
                child
                for _, child in children
                if isinstance(child, (*spatial, nn.Linear, nn.Flatten))
            ),
            None,
        )
        # Flattened inputs keep PyTorch's order; the kernel converts images to channels-last order.
        self._flat = not isinstance(first, spatial)
        if len(shape) == 3 and not self._flat:
            self._shape: tuple[int, ...] = shape
        elif len(shape) == 1 or isinstance(first, nn.Flatten):
            self._shape = (math.prod(shape), 1, 1)
        else:
            raise _UnknownError(f"inputs of shape {shape} of its first layer")
        for name, child in children:
            self._add(name, child)
        self._order_activations()
        if not any(op[0] == _Kind.CONVOLUTION for op in self.ops) or len(self.ops) > _MOST:
            raise _UnknownError(
                f"models without a layer that has parameters, or with more than {_MOST} layers"
            )
        if not self._flat or self._shape[1:] != (1, 1):
            raise _UnknownError("models whose outputs are images")
        if max(
            math.prod(op[i : i + 3]) for op in self.ops for i in (1, 4)
        ) >= _LARGEST or not math.prod(shape):
            raise _UnknownError(f"inputs of shape {shape}")

    def _add(self, name: str, module: Any) -> None:
        kind, adders = type(module), self._ADDERS
        if kind in _ACTIVATIONS:
            self._append(_ACTIVATIONS[kind], self._shape)
        elif kind is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
            self._flat = True
        elif kind is nn.Linear:
            size = math.prod(self._shape)
            if not self._flat or size != module.in_features:
                raise _UnknownError(f"layer {name!r}, {module}, for inputs of shape {self._shape}")
            self._append(
                _Kind.CONVOLUTION,
                (module.out_features, 1, 1),
                self._shape[1:],
                (1, 1),
                (0, 0),
                self._own(name, module),
            )
        elif kind in adders and not self._flat:
            adders[kind](self, name, module)
        else:
            raise _UnknownError(f"layer {name!r}, {module}")

    def _convolution(self, name: str, module: nn.Conv2d) -> None:
        odd = module.groups != 1 or module.dilation != (1, 1) or module.padding_mode != "zeros"
        if odd or isinstance(module.padding, str) or module.in_channels != self._shape[0]:
            raise _UnknownError(f"layer {name!r}, {module}")
        kernel, stride, padding = (
            pair(module.kernel_size),
            pair(module.stride),
            pair(module.padding),
        )
        sizes = zip(self._shape[1:], kernel, stride, padding, strict=True)
        out = (module.out_channels, *((size + 2 * p - k) // s + 1 for size, k, s, p in sizes))
        self._append(_Kind.CONVOLUTION, out, kernel, stride, padding, self._own(name, module))

    def _pool(self, name: str, module: nn.MaxPool2d | nn.AvgPool2d) -> None:
        kernel, stride = pair(module.kernel_size), pair(module.stride)
        if isinstance(module, nn.MaxPool2d):
            odd = pair(module.dilation) != (1, 1) or module.return_indices
        else:
            odd = module.divisor_override is not None
        if odd or pair(module.padding) != (0, 0):
            raise _UnknownError(f"layer {name!r}, {module}")
        sizes = [
            _windows(size, k, s, module.ceil_mode)
            for size, k, s in zip(self._shape[1:], kernel, stride, strict=True)
        ]
        kind = _Kind.MAXIMUM if isinstance(module, nn.MaxPool2d) else _Kind.AVERAGE
        self._append(kind, (self._shape[0], *sizes), kernel, stride)

    def _mean(self, name: str, module: nn.AdaptiveAvgPool2d) -> None:
        if module.output_size not in (1, (1, 1)):
            raise _UnknownError(f"layer {name!r}, {module}")
        self._append(_Kind.AVERAGE, (self._shape[0], 1, 1), self._shape[1:])

    _ADDERS: dict[type[nn.Module], Callable[[_Walk, str, Any], None]] = {  # noqa: RUF012
        nn.Conv2d: _convolution,
        nn.MaxPool2d: _pool,
        nn.AvgPool2d: _pool,
        nn.AdaptiveAvgPool2d: _mean,
    }

    def _own(self, name: str, module: nn.Module) -> tuple[int, int]:
        """Return the positions of weight and bias in the flat vector; the position of a missing
        bias is -1.
        """
        return self._places[f"{name}.weight"], self._places.get(f"{name}.bias", -1)

    def _append(
        self,
        kind: _Kind,
        out: tuple[int, ...],
        kernel: tuple[int, ...] = (1, 1),
        stride: tuple[int, ...] = (1, 1),
        padding: tuple[int, ...] = (0, 0),
        places: tuple[int, int] = (0, -1),
    ) -> None:
        if min(out) < 1:
            raise _UnknownError(f"inputs that leave nothing after layer {len(self.ops) + 1}")
        self.ops.append([int(kind), *self._shape, *out, *kernel, *stride, *padding, *places])
        self._shape = out

    def _order_activations(self) -> None:
        """Move max-pooling before the activation that precedes it. Activations are monotone, so the
        result is the same, and fewer values need the activation. Refuse two activations in a row.
        """
        ops = self.ops
        for i in range(1, len(ops)):
            at = i
            while at > 0 and ops[at][0] == _Kind.MAXIMUM and ops[at - 1][0] >= _Kind.SIGMOID:
                ops[at - 1], ops[at] = (
                    ops[at],
                    [ops[at - 1][0], *ops[at][4:7], *ops[at][4:7], *ops[at - 1][7:]],
                )
                at -= 1
        if any(a[0] >= _Kind.SIGMOID and b[0] >= _Kind.SIGMOID for a, b in pairwise(ops)):
            raise _UnknownError("two activations in a row")  # activations are computed in place


def _windows(size: int, kernel: int, stride: int, ceil: bool) -> int:
    """Compute the number of positions of a pooling window, as PyTorch counts them. With `ceil`, the
    last window may extend over the edge.
    """
    if not ceil:
        return (size - kernel) // stride + 1
    count = -(-(size - kernel) // stride) + 1
    return count - 1 if (count - 1) * stride >= size else count
