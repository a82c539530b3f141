"""Norms in which examples' gradients are bounded: l2 for Gaussian noise, and l1 for Laplace noise.

A layer's norm is computed from the sum of amounts over the layer's parameters; the amounts are
squares for l2 and absolute values for l1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedlgm.extension.loader import is_bundled
from fedlgm.training.example_level.rules.products import row_squares


class L2:
    """The Euclidean norm.

    Attributes:
        order: order of the norm, 1 or 2.
        fused: whether the layers' rules can compute the amounts without forming every example's
            gradient.

    Example:
        >>> L2().of(L2().amounts(torch.tensor([[3.0, -4.0]]))).tolist()
        [5.0]
    """

    order, fused = 2, True

    def amounts(self, gradients: Tensor) -> Tensor:
        """Compute the amount of each row of gradients [n, size], float64 [n]."""
        return row_squares(gradients)

    def of(self, amounts: Tensor) -> Tensor:
        """Compute norms from sums of amounts."""
        return amounts.sqrt()


class L1:
    """The sum of absolute values.

    Example:
        >>> L1().of(L1().amounts(torch.tensor([[3.0, -4.0]]))).tolist()
        [7.0]
    """

    order, fused = 1, False

    def amounts(self, gradients: Tensor) -> Tensor:
        """Compute the amount of each row of gradients [n, size], float64 [n]."""
        return gradients.abs().sum(dim=1, dtype=torch.float64)

    def of(self, amounts: Tensor) -> Tensor:
        """Compute norms from sums of amounts."""
        return amounts


Norm = L1 | L2

_OF_ORDER: dict[int, Norm] = {1: L1(), 2: L2()}


def norm_of(scaling: Any) -> Norm:
    """Return the norm that a scaling bounds: the scaling's attribute `norm`, or l2 if it has none.
    A user's norm is replaced by the bundled norm of the same order.
    """
    norm: Norm | None = getattr(scaling, "norm", None)
    if norm is None:
        return _OF_ORDER[2]
    return norm if is_bundled(norm) else _OF_ORDER[norm.order]
