"""Interface of a layer type whose per-example gradients are clipped and summed during the backward
pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor, nn
from typing_extensions import override

from fedlgm.training.stack.tape import Memory

Scale = Callable[[slice, Sequence[Tensor]], list[Tensor]]
"""A function that maps the squared norms of some examples' gradients to the examples' factors, for
each parameter. It is called as `scale(rows, squares)` with squares float64 [c] per parameter. It
returns one vector [c] per parameter, with 0 for an example whose gradient is not finite.
"""


@dataclass
class Use:
    """One call of a layer in the forward pass, with its output's gradient.

    Attributes:
        x: input; the first dimension is the example.
        dy: gradient of the output.
        saved: results of the forward pass for the backward pass; the first dimension is the
            example.
        shared: results from computing the parameters' gradients that are also used for the gradient
            of the input.
        common: results that are the same for all uses with the same `dy`.
    """

    x: Tensor
    dy: Tensor
    saved: tuple[Tensor, ...] = ()
    shared: tuple[Tensor, ...] = ()
    common: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, rows: slice | Tensor) -> Use:
        """The same use of the layer, restricted to some of the examples."""
        return Use(self.x[rows], self.dy[rows], tuple(value[rows] for value in self.saved))


class Kept(Protocol):
    """Data of one use of a layer, kept until the factors are known.

    Attributes:
        squares: squared norm of each example's gradient, float64 [n] per parameter.
    """

    squares: list[Tensor]

    def add(self, sums: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
        """Add sum_i f_i g_i to `sums` ([size] per parameter), omitting examples with factor 0."""


class Rule:
    """Forward pass and gradients of one module whose first dimension is the example.

    Unfinished sums may have a different order from the parameter; `finish` restores torch's order.

    Args:
        module: the layer; its parameters are read in place.
        memory: scratch that all layers share.
        name: name of the layer, also used for the layer's scratch memory.

    Attributes:
        unites: whether several uses can be treated as one use.
    """

    unites = False

    def __init__(self, module: nn.Module, memory: Memory, name: str) -> None:
        self.module: Any = module
        self.memory, self.name = memory, name
        self.parameters = [
            key for key, value in module.named_parameters(recurse=False) if value.requires_grad
        ]

    @classmethod
    def suits(cls, module: nn.Module) -> bool:
        """Whether this rule covers the module as it is configured."""
        return True

    @classmethod
    def dimensions(cls, module: Any) -> int:
        """Least number of dimensions of an input, including the first dimension, which is the
        example.

        With fewer dimensions, torch treats all rows as one example, for instance as the channels of
        one image.
        """
        return 1

    def shares(self, x: Tensor) -> bool:
        """Whether an input is a single row for the whole batch. If so, the layer is called with a
        copy of the row for each example.
        """
        return False

    def join(self, *given: Any) -> Tensor:
        """The inputs of a call as one tensor, with the example as the first dimension."""
        (x,) = given
        return x  # type: ignore[no-any-return]

    def outputs(self, out: Tensor) -> Any:
        """The module's return value, from the result of `forward`."""
        return out

    def prepare(self, x: Tensor) -> Tensor:
        """The input in the form that `forward` takes; part of the differentiated graph."""
        return x

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Output for a batch and the tensors to save, not recorded by autograd."""
        raise NotImplementedError

    def numbers_to_keep(self, x: Tensor, out: Tensor) -> int:
        """Number of values per example that the forward pass keeps in addition to input and output,
        for tensors like these.
        """
        return 0

    def input_gradient(self, use: Use) -> Tensor:
        """Gradient of the input."""
        raise NotImplementedError

    def immediately(self, use: Use, sums: Sequence[Tensor], scale: Scale) -> None:
        """Measure, scale and add every example's gradient, without keeping gradients."""
        record = self.keep(use)
        record.add(sums, scale(slice(0, len(use)), record.squares))

    def keep(self, use: Use) -> Kept:
        """Measure every example's gradient, and keep the data that are needed for the sum."""
        raise NotImplementedError

    def unite(self, uses: Sequence[Use]) -> Use:
        """One use whose gradients are the sums of the gradients of several uses, for a rule that
        `unites`.
        """
        raise NotImplementedError

    def instantiate(self, use: Use) -> list[Tensor]:
        """Every example's gradient [n, size] per parameter, in torch's own order."""
        raise NotImplementedError

    def finish(self, sums: Sequence[Tensor]) -> None:
        """Bring the finished sums into the order of the parameters."""

    def bias_of(self) -> Tensor | None:
        """The module's bias, detached."""
        bias = self.module.bias
        return bias.detach() if isinstance(bias, Tensor) else None


class KeptGradients(Kept):
    """Per-example gradients that are kept as they are.

    Args:
        gradients: [n, size] per parameter.
        squares: squared norms of these gradients, float64 [n] per parameter.
    """

    def __init__(self, gradients: Sequence[Tensor], squares: list[Tensor]) -> None:
        self.squares, self._gradients = squares, gradients

    @override
    def add(self, sums: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
        for total, gradient, factor, square in zip(
            sums, self._gradients, factors, self.squares, strict=True
        ):
            add_scaled_(total, gradient, factor, all_finite(square))


def all_finite(squares: Tensor) -> bool:
    """Whether all squares are finite. Only one number is read instead of all squares."""
    return math.isfinite(float(squares.sum()))


CHUNK_BYTES = 3 << 20
"""Bytes of gradients and their operands that are formed at a time, about the size of a core's
cache."""


def chunks(examples: int, bytes_each: int, most: int = CHUNK_BYTES) -> Iterator[slice]:
    """Consecutive slices of the examples, each of at most `most` bytes (or a single example)."""
    size = max(1, min(examples, most // max(1, bytes_each)))
    for low in range(0, examples, size):
        yield slice(low, min(low + size, examples))


def add_scaled_(total: Tensor, gradients: Tensor, factors: Tensor, finite: bool = True) -> None:
    """Add sum_i f_i g_i for gradients [n, size] to `total` [size]; rows of factor 0 may hold NaN
    unless `finite`.

    Products and sums have the precision of `total`.
    """
    if not finite:
        keep = factors.nonzero()[:, 0]
        gradients, factors = gradients[keep], factors[keep]
    if total.dtype == gradients.dtype:
        total.addmv_(gradients.t(), factors)
        return
    for rows in chunks(len(gradients), gradients.shape[1] * total.element_size()):
        total.addmv_(gradients[rows].to(total.dtype).t(), factors[rows].to(total.dtype))


def add_product_(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add left^T right for left [m, p] and right [m, d] to `total` [p, d], in the precision of
    `total`.
    """
    if total.dtype == left.dtype:
        total.addmm_(left.t(), right)
        return
    for rows in chunks(len(left), (left.shape[1] + right.shape[1]) * total.element_size()):
        total.addmm_(left[rows].to(total.dtype).t(), right[rows].to(total.dtype))
