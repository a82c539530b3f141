"""Renyi divergences of one sampled Gaussian release at many orders.

The values equal those of `dp_accounting.rdp`, bit for bit. Only the search for a noise multiplier
uses them; every stated figure comes from that package, which adds up one term after another, with a
call for every logarithm. This module computes the terms of an order together. It adds them one
after another only up to the term at which the sum is known, because the rounding of a sum depends
on the order of its terms.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy as np
from scipy import special

_FIRST = 64
"""Number of terms of a fractional order that are tried before all of `_MOST`."""
_MOST = 1000
"""Number of terms after which a fractional order is given up, as in `dp_accounting`."""
_SMALL = -30.0
"""Logarithm of a last term over its sum."""
_ROUNDING = 1e-6
"""More than by which sums in another order differ."""
Release = tuple[float, float, int]
"""Rate, noise multiplier and number of sampled Gaussian releases."""


def best_orders(releases: Iterable[Release], delta: float, orders: np.ndarray) -> np.ndarray:
    """The orders among which that of the least epsilon is.

    The divergences are summed in another order here, which finds nearly all of the other orders in
    a thirtieth of the time. Epsilon is an upper bound whatever orders are left.

    Args:
        releases: all releases.
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
    """Divergences to about 1e-13, infinite where the sum does not converge, [n]."""
    logs = np.full(len(orders), math.nan)
    whole = np.array([order.is_integer() for order in orders])
    for place in np.flatnonzero(whole):
        logs[place] = np.logaddexp.reduce(_whole_terms(rate, multiplier, orders[place]))
    for count in (_FIRST, _MOST):
        missing = np.flatnonzero(np.isnan(logs))
        if len(missing):
            columns = np.array(orders)[missing, None]
            terms = np.array(_parts(rate, multiplier, columns, count))
            total = np.logaddexp.reduce(terms, axis=(0, 2))
            small = terms[..., -1].max(axis=0) < total + _SMALL
            logs[missing] = np.where(small, total, math.nan)
    return np.where(np.isnan(logs), math.inf, logs) / (np.array(orders) - 1)


@lru_cache(maxsize=32)
def divergences(rate: float, multiplier: float, orders: tuple[float, ...]) -> np.ndarray:
    """Renyi divergences at all orders, infinite where the sum does not converge.

    Args:
        rate: Poisson rate in (0, 1).
        multiplier: noise std over the bound, positive.
        orders: Renyi orders above 1.

    Example:
        >>> divergences(0.1, 2.0, (1.5, 8.0)).round(6).tolist()
        [0.002727, 0.013725]
    """
    if multiplier**2 == 0:
        return np.full(len(orders), math.inf)
    with np.errstate(all="ignore"):
        logs = [
            (_integer if order.is_integer() else _fractional)(rate, multiplier, order)
            for order in orders
        ]
    return np.array([log / (order - 1) for log, order in zip(logs, orders, strict=True)])


@lru_cache(maxsize=1024)
def _binomials(order: float, count: int) -> np.ndarray:
    return _logs_of_binomials(order, count)


def _logs_of_binomials(order: Any, count: int) -> np.ndarray:
    """Logarithms of the first binomial coefficients, [count], or [n, count] of orders [n, 1]."""
    i = np.arange(count)
    gamma = special.gammaln
    logs: np.ndarray = gamma(order + 1) - gamma(i + 1) - gamma(order - i + 1)
    return logs


def _integer(rate: float, multiplier: float, order: float) -> float:
    total = -math.inf
    for term in _whole_terms(rate, multiplier, order).tolist():
        total = _add(total, term)
    return total


def _whole_terms(rate: float, multiplier: float, order: float) -> np.ndarray:
    """Logarithms of the terms of a whole order, [order + 1]."""
    i = np.arange(int(order) + 1)
    terms = _binomials(order, len(i)) + i * math.log(rate) + (order - i) * math.log1p(-rate)
    result: np.ndarray = terms + (i * i - i) / (2 * multiplier**2)
    return result


def _fractional(rate: float, multiplier: float, order: float) -> float:
    """Section 3.3 of Mironov, Talwar and Zhang 2019 (arXiv 1908.10530)."""
    for count in (_FIRST, _MOST):
        below, above = _parts(rate, multiplier, order, count)
        largest = np.maximum(below, above)
        falling = np.zeros(count, dtype=bool)
        falling[1:] = (np.diff(below) < 0) & (np.diff(above) < 0)
        sums = np.logaddexp.accumulate(np.logaddexp(below, above))
        last = np.flatnonzero(falling & (largest < sums + (_SMALL + _ROUNDING)))
        if len(last):
            ends = set(last.tolist())
            low = high = -math.inf
            for number, (one, other) in enumerate(zip(below.tolist(), above.tolist(), strict=True)):
                low, high = _add(low, one), _add(high, other)
                if number in ends and max(one, other) < (total := _add(low, high)) + _SMALL:
                    return total
    return math.inf


def _parts(rate: float, multiplier: float, order: Any, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Logarithms of the terms of both integrals, below and above the middle, [count] each, or
    [n, count] of orders [n, 1].
    """
    middle = multiplier**2 * math.log(1 / rate - 1) + 0.5
    kept = _binomials if isinstance(order, float) else _logs_of_binomials
    binomials, i = kept(order, count), np.arange(count)
    j = order - i
    log_rate, log_rest = math.log(rate), math.log1p(-rate)

    def part(one: Any, other: Any, beyond: Any) -> np.ndarray:
        tail = math.log(0.5) + (math.log(2) + special.log_ndtr(-beyond * 2**0.5))
        terms = binomials + one * log_rate + other * log_rest
        result: np.ndarray = terms + (one * one - one) / (2 * multiplier**2) + tail
        return result

    width = math.sqrt(2) * multiplier
    return part(i, j, (i - middle) / width), part(j, i, (middle - j) / width)


def _add(one: float, other: float) -> float:
    """log(exp(one) + exp(other))."""
    low, high = (other, one) if other < one else (one, other)
    return high if low == -math.inf else math.log1p(math.exp(low - high)) + high
