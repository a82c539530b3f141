"""The orders of Renyi divergences at which the epsilon of sampled Gaussian releases is least.

`dp_accounting.rdp` adds up the terms of one order at a time. This module sums the terms of all
orders at once and only roughly, to find the few orders whose divergences are worth computing. Every
stated epsilon comes from `dp_accounting`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from scipy.special import gammaln, log_ndtr

_TERMS = (64, 1000, 1100)
"""Numbers of terms to sum. The next number is used where the previous one is too small; the last
suffices for the largest whole order."""
_MOST = 1000
"""Number of terms after which `dp_accounting` gives up a fractional order."""
_SMALL = -30.0
"""A summation ends when the log ratio of the last term to the sum is below this value, as in
`dp_accounting`.
"""
_ROUNDING = 1e-6
"""An upper bound on the change of a sum whose terms are added in another order."""


def best_orders(
    releases: Iterable[tuple[float, float, int]], delta: float, orders: np.ndarray
) -> np.ndarray:
    """A few of the orders, among them the order at which epsilon is least.

    For any choice of orders, epsilon is an upper bound.

    Args:
        releases: triples (rate in (0, 1), noise multiplier, number) of sampled Gaussian releases.
        delta: target delta in (0, 1).
        orders: Renyi orders above 1, [n].

    Example:
        >>> best_orders([(0.1, 1.0, 10)], 1e-5, np.array([2.0, 4.4, 4.5, 4.6, 64.0])).tolist()
        [4.6]
    """
    with np.errstate(all="ignore"):
        spent = sum(count * _rough(rate, z, tuple(orders.tolist())) for rate, z, count in releases)
        epsilons = spent + np.log1p(-1 / orders) - np.log(delta * orders) / (orders - 1)
        least = epsilons.min()
        if np.any(np.expm1(-spent) > -(delta**2) - _ROUNDING) or not math.isfinite(least):
            return orders  # epsilon may be 0
        return orders[~(epsilons > least + _ROUNDING * (1 + abs(least)))]


@lru_cache(maxsize=32)
def _rough(rate: float, multiplier: float, orders: tuple[float, ...]) -> np.ndarray:
    """Divergences with an error of about 1e-13, [n]; infinite where the sum does not converge. Each
    is the sum of the two integrals of section 3.3 of Mironov, Talwar and Zhang 2019 (arXiv
    1908.10530).
    """
    middle = multiplier**2 * math.log(1 / rate - 1) + 0.5
    logs = np.full(len(orders), math.inf)
    for count in _TERMS:
        missing = np.isinf(logs) & ((count <= _MOST) | (np.mod(orders, 1) == 0))
        order, i = np.array(orders)[missing, None], np.arange(count)
        j = order - i
        binomials = gammaln(order + 1) - gammaln(i + 1) - gammaln(j + 1)
        terms = np.array([
            binomials
            + (one * math.log(rate) + other * math.log1p(-rate))
            + (one * one - one) / (2 * multiplier**2)
            + log_ndtr(beyond / multiplier)
            for one, other, beyond in ((i, j, middle - i), (j, i, j - middle))
        ])  # fmt: skip
        total = np.logaddexp.reduce(terms, axis=(0, 2))
        logs[missing] = np.where(terms[..., -1].max(axis=0) < total + _SMALL, total, math.inf)
    return logs / (np.array(orders) - 1)
