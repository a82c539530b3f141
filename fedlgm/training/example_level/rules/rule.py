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
"""A function that computes the factors of the examples in `rows` from the squared norms of their
gradients. It is called as `scale(rows, squares)`, where `squares` has one float64 vector [c] per
parameter. It returns one vector [c] per parameter, with 0 for an example whose gradient is not
finite.
"""


@dataclass
class Use:
    """One call of a layer in the forward pass, with the gradient of the call's output.

    Attributes:
        x: input; the first dimension is the example.
        dy: gradient of the output.
        saved: results of the forward pass that the backward pass needs; the first dimension is the
            example.
        shared: results of computing the parameters' gradients that are also needed for the gradient
            of the input.
        common: results that depend only on `dy`, shared by all uses with the same `dy`.
    """

    x: Tensor
    dy: Tensor
    saved: tuple[Tensor, ...] = ()
    shared: tuple[Tensor, ...] = ()
    common: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, rows: slice | Tensor) -> Use:
        """Restrict the use to some of the examples, without `shared` and `common`."""
        return Use(self.x[rows], self.dy[rows], tuple(value[rows] for value in self.saved))


class Kept(Protocol):
    """Data of one use of a layer, which are kept until the factors are known.

    Attributes:
        squares: squared norm of each example's gradient, float64 [n] per parameter.
    """

    squares: list[Tensor]

    def add(self, sums: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
        """Add sum_i f_i g_i to `sums` ([size] per parameter), omitting examples with factor 0."""


class Rule:
    """Computes the forward pass and the per-example gradients of one module whose first dimension
    is the example.

    The numbers in unfinished sums may have another order than the parameter; `finish` restores
    PyTorch's order.

    Args:
        module: the layer; its parameters are read in place.
        memory: scratch memory that all layers share.
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
        """Whether this rule supports the module's configuration."""
        return True

    @classmethod
    def dimensions(cls, module: Any) -> int:
        """Smallest number of dimensions of an input, including the first dimension, which is the
        example.

        With fewer dimensions, PyTorch treats all rows as one example, for instance as the channels
        of one image.
        """
        return 1

    def shares(self, x: Tensor) -> bool:
        """Whether an input is a single row that all examples of the batch share. If so, the layer
        is called with this row repeated for each example.
        """
        return False

    def join(self, *given: Any) -> Tensor:
        """Join the inputs of a call to one tensor, with the example as the first dimension."""
        (x,) = given
        return x  # type: ignore[no-any-return]

    def outputs(self, out: Tensor) -> Any:
        """Convert the result of `forward` to the module's return value."""
        return out

    def prepare(self, x: Tensor) -> Tensor:
        """Convert the input to the form that `forward` takes. Autograd differentiates this
        conversion.
        """
        return x

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Compute the output for a batch, and the tensors to save, without autograd."""
        raise NotImplementedError

    def numbers_to_keep(self, x: Tensor, out: Tensor) -> int:
        """Number of values per example that the forward pass keeps in addition to input and output,
        for an input `x` and an output `out`.
        """
        return 0

    def input_gradient(self, use: Use) -> Tensor:
        """Compute the gradient of the input."""
        raise NotImplementedError

    def immediately(self, use: Use, sums: Sequence[Tensor], scale: Scale) -> None:
        """Measure, scale and add every example's gradient at once, because the factors depend on
        this layer alone.
        """
        record = self.keep(use)
        record.add(sums, scale(slice(0, len(use)), record.squares))

    def keep(self, use: Use) -> Kept:
        """Measure every example's gradient, and keep the data that are needed for the sum."""
        raise NotImplementedError

    def unite(self, uses: Sequence[Use]) -> Use:
        """Join several uses to one use, whose gradients are the sums of their gradients. Only rules
        with `unites` need this method.
        """
        raise NotImplementedError

    def instantiate(self, use: Use) -> list[Tensor]:
        """Compute every example's gradient [n, size] per parameter, in PyTorch's order."""
        raise NotImplementedError

    def finish(self, sums: Sequence[Tensor]) -> None:
        """Rearrange the finished sums, in place, into the order of the parameters."""

    def bias_of(self) -> Tensor | None:
        """Return the module's bias, detached from autograd; None without a bias."""
        bias = self.module.bias
        return bias.detach() if isinstance(bias, Tensor) else None


class KeptGradients(Kept):
    """Kept data that are the per-example gradients themselves.

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
    """Whether all squares are finite. Only their sum is read from the device."""
    return math.isfinite(float(squares.sum()))


CHUNK_BYTES = 3 << 20
"""Size in bytes of the gradients and operands that are formed at a time, about the size of a core's
cache.
"""


def chunks(examples: int, bytes_each: int, most: int = CHUNK_BYTES) -> Iterator[slice]:
    """Yield consecutive slices of the examples, each of at most `most` bytes or of a single
    example.
    """
    size = max(1, min(examples, most // max(1, bytes_each)))
    for low in range(0, examples, size):
        yield slice(low, min(low + size, examples))


def add_scaled_(total: Tensor, gradients: Tensor, factors: Tensor, finite: bool = True) -> None:
    """Add sum_i f_i g_i for gradients [n, size] to `total` [size]. With `finite=False`, rows with
    factor 0 may contain NaN or infinity.

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
