"""Sums over millions of rows in which rounding cannot carry one row's share above its bound.

NumPy adds the rows of a table one after another. A row that is added or removed then moves every
later partial sum onto another grid of floating-point numbers, and adversarial rows can add up their
rounding errors in one direction. For three million rows the total error is 2.3e-4 of the bound, far
more than the safety margin (`fedlgm.planning.layers.SAFETY`, 1.5e-5). In this module each value
passes through few additions.

With at most L additions per value, the error of a sum of n values of size C is at most L n C 2^-53,
and the difference of two sums grows by at most L n C 2^-52. This is 0.3e-6 C for three million rows
(L = 512), and below the margin up to 10^8. Adding M clients' sums afterwards adds M to L.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]

_LEAF = 128
_GRAM_LEAF = 1024


def sum_rows(values: Array) -> Array:
    """Sum over the first axis, [n, ...] to [...], in groups of 128, so that a value passes through
    at most 128 additions for each factor of 128 in n.

    Example:
        >>> sum_rows(np.ones((1000, 2))).tolist()
        [1000.0, 1000.0]
    """
    while len(values) > 1:
        end = len(values) - len(values) % _LEAF
        groups = values[:end].reshape(end // _LEAF, _LEAF, *values.shape[1:]).sum(axis=1)
        if end < len(values):
            groups = np.concatenate([groups, values[end:].sum(axis=0)[None]])
        values = groups
    return values[0] if len(values) else np.zeros(values.shape[1:])


def gram(x: Array) -> Array:
    """Compute x^T x, [n, M] to [M, M], by recursive division down to 1024 rows, so that a value
    passes through at most 1024 + log2(n) additions.
    """
    if len(x) <= _GRAM_LEAF:
        return np.asarray(x.T @ x)
    half = 1 << (len(x) - 1).bit_length() - 1
    return gram(x[:half]) + gram(x[half:])
