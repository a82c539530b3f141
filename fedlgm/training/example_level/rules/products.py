"""Per-example gradients that are products of two matrices: dY_i^T X_i for T rows per example.

There are three ways to compute the norms and the scaled sum. The shapes determine which is used:

* One row per example (T = 1): ||g_i|| = ||dy_i|| ||x_i||, and the sum is one product of scaled
  rows.
* Instantiate: the gradients of a chunk of examples that fits into the cache are formed, measured,
  scaled, added and dropped. If the factors are not known yet, all gradients are kept instead.
* Ghost: the norms follow from Gram matrices, and the sum is one product of scaled rows (Li et al.,
  ICLR 2022).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from fedlgm.training.example_level.rules.rule import (
    Kept,
    KeptGradients,
    Rule,
    Scale,
    Use,
    add_product_,
    add_scaled_,
    all_finite,
    chunks,
)

GHOST_TRUST = 2.0**-4
"""Smallest ratio of a squared norm to the product of the norms of its Gram matrices at which the
norm is trusted. At this ratio, the rounding of the Gram matrices changes the norm by 4e-6.
"""
# smallest trusted sum of squares, per term: terms that underflow (below 2^-126) are at most 2^-22
# of the sum
_VANISHED = 2.0**-104
# smallest trusted entry of a Gram matrix, by the same rule, for products of rows of up to 2^24
# numbers
_LEAST_GRAM = 2.0**-80
_RUN = 256  # number of float32 squares that a vectorised sum adds with a relative error below 2^-20


def row_squares(rows: Tensor) -> Tensor:
    """Compute the squared norm of each row of [n, size], float64 [n]. For float32 rows of any
    length, the relative error is at most 2^-20.

    Squares below 2^-126 underflow in float32. A row for which this may matter is squared in
    float64, because even a tiny norm matters if it is later multiplied by a large one. A square
    that overflows gives `inf`, and the example of this row counts as zero.
    """
    size = rows.shape[1]
    if rows.dtype == torch.float64:
        return torch.linalg.vector_norm(rows, dim=1).square()
    if size <= _RUN:
        total = torch.linalg.vector_norm(rows, dim=1).double().square()
    else:
        split = size - size % _RUN
        total = (
            torch.linalg.vector_norm(rows[:, :split].unflatten(1, (-1, _RUN)), dim=2)
            .double()
            .square()
            .sum(1)
        )
        if split < size:
            total += torch.linalg.vector_norm(rows[:, split:], dim=1).double().square()
    tiny = (total < size * _VANISHED).nonzero()[:, 0]
    if len(tiny):
        total[tiny] = torch.linalg.vector_norm(rows[tiny].double(), dim=1).square()
    return total


def squares_of_rows(many: Sequence[Tensor]) -> np.ndarray:
    """Compute the `row_squares` of several tensors on the CPU that have n rows each, float64
    [len(many), n].
    """
    longest = max(rows.shape[1] for rows in many)
    if longest <= _RUN and all(rows.dtype == torch.float32 for rows in many):
        squares = np.empty((len(many), many[0].shape[0]))
        for norms, rows in zip(squares, many, strict=True):
            norms[:] = torch.linalg.vector_norm(rows, dim=1).numpy()
        squares *= squares
        if squares.min() >= longest * _VANISHED:
            return squares
    return np.stack([row_squares(rows).numpy() for rows in many])


def ghost_squares(gram_x: Tensor, gram_y: Tensor) -> tuple[Tensor, Tensor]:
    """Compute squared norms, which are never too small, from Gram matrices [c, T, T]. Also return
    the indices of examples whose norms are too inexact.

    The squared norm is the sum of the products of the entries of two Gram matrices A and B. If an
    example's positions cancel, this sum is a small difference of large numbers, and its rounding
    error is proportional to ||A||_F ||B||_F. A bound on this error is added to the sum. The norm is
    too inexact if the bound is not small relative to the sum, or if products inside a Gram matrix,
    or products of two entries of Gram matrices, may have underflowed.
    """
    sums = torch.linalg.vecdot(gram_x.flatten(1), gram_y.flatten(1)).double()
    of_x, of_y = (torch.linalg.vector_norm(gram, dim=(1, 2)).double() for gram in (gram_x, gram_y))
    scale, entries = of_x * of_y, gram_x.shape[1] * gram_x.shape[2]
    vanished = (torch.minimum(of_x, of_y) < entries * _LEAST_GRAM) | (scale < entries * _VANISHED)
    doubtful = (sums < GHOST_TRUST * scale) | ~torch.isfinite(sums) | vanished
    return sums + 4 * torch.finfo(gram_x.dtype).eps * scale, doubtful.nonzero()[:, 0]


class ProductRule(Rule):
    """Base class of rules for layers whose weight has the gradient dY_i^T X_i. The gradient of a
    bias is the column sums of dY_i.

    A subclass defines how the two matrices follow from a layer's input and output gradient. The
    numbers in sums and gradients of the weight have the order [p, d] of the product.

    Attributes:
        arranged: whether the sums already have the order of the parameter. This is so before the
            first addition, and if only gradients from `instantiate` are added.
    """

    arranged = True

    def positions(self, use: Use) -> int:
        """T, the number of rows per example."""
        raise NotImplementedError

    def extent(self) -> tuple[int, int]:
        """(p, d), the size of the product."""
        raise NotImplementedError

    def columns(self, dy: Tensor) -> Tensor:
        """Return the rows dY_i as [n, T, p]."""
        raise NotImplementedError

    def operand(self, use: Use) -> Tensor:
        """Return the rows X_i as [n, T, d]."""
        raise NotImplementedError

    def products(self, use: Use, rows: slice, out: Tensor) -> Tensor:
        """Write the products dY_i^T X_i of the examples in `rows` to `out` [c, p, d]."""
        raise NotImplementedError

    def operand_bytes(self, use: Use) -> int:
        """Bytes of scratch memory per example that `products` writes besides its result."""
        return 0

    def grams(self, use: Use, rows: slice) -> Tensor:
        """Compute the Gram matrices X_i X_i^T of the examples in `rows`, [c, T, T]. The next call
        overwrites them.
        """
        raise NotImplementedError

    def grams_of_outputs(self, use: Use, rows: slice) -> Tensor:
        """Compute the Gram matrices dY_i dY_i^T of the examples in `rows`. The next call may
        overwrite them.
        """
        y = self.columns(use.dy[rows])
        gram = self.memory.take("gram of outputs", len(y), y.shape[1], y.shape[1])
        return torch.bmm(y, y.transpose(1, 2), out=gram)

    def add_product(self, total: Tensor, use: Use, factors: Tensor) -> None:
        """Add sum_i f_i dY_i^T X_i to `total` [p * d]."""
        raise NotImplementedError

    @override
    def immediately(self, use: Use, sums: Sequence[Tensor], scale: Scale) -> None:
        self.arranged = False
        if "weight" in self.parameters and self.positions(use) == 1:
            return self._add_single_rows(use, sums, scale)
        if "weight" not in self.parameters or not self._instantiates(use):
            return super().immediately(use, sums, scale)
        biases, of_bias = self.biases(use)
        p, d = self.extent()
        for rows in chunks(len(use), self._bytes(use)):
            count = rows.stop - rows.start
            block = self.products(use, rows, self.memory.take("gradients", count, p, d)).view(
                count, -1
            )
            squares = row_squares(block)
            factors = scale(rows, [squares, *(square[rows] for square in of_bias)])
            if not all_finite(squares):
                block[factors[0] == 0] = 0
            add_scaled_(sums[0], block, factors[0])
            for total, bias in zip(sums[1:], biases, strict=True):
                KeptGradients([bias[rows]], [of_bias[0][rows]]).add([total], factors[1:])
        return None

    def _add_single_rows(self, use: Use, sums: Sequence[Tensor], scale: Scale) -> None:
        """Add the gradients of examples with one row each, in one product of scaled rows."""
        biases, of_bias = self.biases(use)
        x = self.operand(use).flatten(1)
        of_dy = of_bias[0] if biases else row_squares(use.dy.reshape(len(use), -1))
        squares = row_squares(x) * of_dy
        factors = scale(slice(0, len(use)), [squares, *of_bias])
        if any(factor is not factors[0] for factor in factors) or not all_finite(squares):
            _KeptRows(self, use, biases, of_bias).add(sums, factors)
            return
        scaled = self._scale(use.dy.reshape(len(use), -1), factors[0])
        add_product_(sums[0].view(self.extent()), scaled, x)
        for total in sums[1:]:
            total.add_(scaled.sum(0, dtype=total.dtype))

    @override
    def keep(self, use: Use) -> Kept:
        self.arranged = False
        biases, of_bias = self.biases(use)
        if "weight" not in self.parameters:
            return KeptGradients(biases, of_bias)
        if self._instantiates(use):
            gradients = self._instantiate_into(
                use, self.memory.take(f"{self.name} kept", len(use), *self.extent())
            )
            flat = gradients.view(len(use), -1)
            return KeptGradients([flat, *biases], [row_squares(flat), *of_bias])
        return _KeptRows(self, use, biases, of_bias)

    @override
    def instantiate(self, use: Use) -> list[Tensor]:
        biases, _ = self.biases(use)
        if "weight" not in self.parameters:
            return biases
        gradients = self._instantiate_into(use, use.dy.new_empty(len(use), *self.extent()))
        return [self.in_order(gradients).reshape(len(use), -1), *biases]

    def in_order(self, gradients: Tensor) -> Tensor:
        """Rearrange gradients [..., p, d] into the order of the parameter."""
        return gradients

    def squares(self, use: Use) -> tuple[Tensor, Tensor]:
        """Compute the squared norms of the weight's gradients, float64 [n], without forming the
        gradients.

        The method also returns the indices of examples with unreliable norms. The gradients of
        these examples must be instantiated.
        """
        if self.positions(use) == 1:
            product = row_squares(self.operand(use).flatten(1)) * row_squares(
                use.dy.reshape(len(use), -1)
            )
            return product, torch.empty(0, dtype=torch.long, device=use.x.device)
        squares, doubtful = [], []
        positions = self.positions(use)
        each = 3 * positions * positions * use.x.element_size() + self.operand_bytes(use)
        for rows in chunks(len(use), each):
            gram_x = self.grams(use, rows)
            values, apart = ghost_squares(gram_x, self.grams_of_outputs(use, rows))
            squares.append(values)
            doubtful.append(apart + rows.start)
        return torch.cat(squares), torch.cat(doubtful)

    def _instantiates(self, use: Use) -> bool:
        positions = self.positions(use)
        return positions > 1 and not self.ghost_pays(positions)

    def ghost_pays(self, positions: int) -> bool:
        """Whether Gram matrices take less time than per-example gradients. As measured on CPUs,
        this is so for T (p + d) <= p d / 2.
        """
        outputs, inputs = self.extent()
        return 2 * positions * (outputs + inputs) <= outputs * inputs

    def _bytes(self, use: Use) -> int:
        p, d = self.extent()
        return p * d * use.x.element_size() + self.operand_bytes(use)

    def _instantiate_into(self, use: Use, out: Tensor) -> Tensor:
        for rows in chunks(len(use), self._bytes(use)):
            self.products(use, rows, out[rows])
        return out

    def _scale(self, dy: Tensor, factors: Tensor) -> Tensor:
        """Multiply every example's output gradient by the example's factor, in scratch memory."""
        along = factors.view(-1, *(1,) * (dy.dim() - 1))
        return torch.mul(dy, along, out=self.memory.take("scaled", *dy.shape))

    def biases(self, use: Use) -> tuple[list[Tensor], list[Tensor]]:
        """Compute every example's gradient of the bias, and the squared norms of these gradients.
        Both lists are empty without a trained bias.
        """
        if "bias" not in self.parameters:
            return [], []
        is_single = self.positions(use) == 1
        bias = use.dy.reshape(len(use), -1) if is_single else self.columns(use.dy).sum(1)
        return [bias], [row_squares(bias)]


class _KeptRows(Kept):
    """Inputs and output gradients of a use, kept for one product of scaled rows.

    The gradients of examples with unreliable ghost norms are instantiated, measured and added
    separately, so that exactly the measured gradients are added.
    """

    def __init__(
        self, rule: ProductRule, use: Use, biases: list[Tensor], of_bias: list[Tensor]
    ) -> None:
        self._rule, self._use, self._biases, self._of_bias = rule, use, biases, of_bias
        squares, self._apart = rule.squares(use)
        self._gradients = None
        if len(self._apart):
            gradients = rule._instantiate_into(
                use[self._apart], use.dy.new_empty(len(self._apart), *rule.extent())
            )
            self._gradients = gradients.flatten(1)
            squares[self._apart] = row_squares(self._gradients)
        self.squares = [squares, *of_bias]

    @override
    def add(self, sums: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
        use, weight = self._use, factors[0]
        if self._gradients is not None:
            KeptGradients([self._gradients], [self.squares[0][self._apart]]).add(
                [sums[0]], [weight[self._apart]]
            )
            weight = weight.index_fill(0, self._apart, 0.0)
        if not all_finite(self.squares[0]):
            # 0 times an infinite number would spread over the whole product
            counted = weight.nonzero()[:, 0]
            use, weight = use[counted], weight[counted]
        if len(use):
            self._rule.add_product(sums[0], use, weight)
        for total, bias, square, factor in zip(
            sums[1:], self._biases, self._of_bias, factors[1:], strict=True
        ):
            KeptGradients([bias], [square]).add([total], [factor])
