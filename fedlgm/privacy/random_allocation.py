"""Privacy loss distribution of one participation in one of several rounds, which is drawn secretly.

A unit takes part in one of n rounds, which is drawn uniformly and stays secret; every round
releases a sum with Gaussian noise. If the noise is z times the bound, everything that the n rounds
release is a function of n numbers. If the unit is present, the numbers follow N(e_i, z^2 I) for the
drawn round i; if it is absent, they follow N(0, z^2 I). This also holds for adaptive rounds
(Feldman and Shenfeld 2025, arXiv 2502.08202, section 3). The likelihood ratio of the two laws
(distributions) is A = (W_1 + ... + W_n) / n, and under the second law the W_i are independent, with
W = exp(g / z - 1 / (2 z^2)) for a standard Gaussian g. Hence the profiles of removing and adding
the unit are

    E max(A - e^epsilon, 0)    and    E max(1 - e^epsilon A, 0),

and both are expectations of convex functions of A. This module computes a law of A that is larger
in convex order: the mass of every value of a W or of a partial sum is divided between the value's
two neighbours on a geometric grid so that the mean stays the same. So both profiles are upper
bounds at every epsilon. The error is quadratic in the grid's step; the authors' code (arXiv
2602.17284, package `PLD_accounting`) rounds in one direction, and its error is linear in the step.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from dp_accounting.pld.pld_pmf import DensePLDPmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from scipy.special import ndtr

_REACH = 8.8
"""Number of standard deviations at which a Gaussian number is cut off; the mass beyond is 7e-19."""
_CUT = 1e-18
"""Mass that is cut off at each end of a sum."""
_STEP = 0.02
"""Largest step of the grid of log(W), in units of the standard deviation of log(W) if that exceeds
1.
"""
LEAST_MULTIPLIER = 0.1
"""Least noise multiplier for which this module has grids. With less noise, the secrecy of the round
hardly matters."""
_FINE = 0.015
"""Step of the grid of log(A), in standard deviations of A."""
_ROUNDED = 1e-11
"""Relative margin on masses and losses. It is far larger than the rounding error of all sums."""


class _Law(NamedTuple):
    """The distribution of a random variable whose values are 0 or lie on a geometric grid.

    Attributes:
        step: step h of the grid of exp(h j).
        first: j of the first value.
        masses: probability of each value, [m].
        zero: probability of zero.
        beyond: part of the expectation that was cut off above the last value.
    """

    step: float
    first: int
    masses: np.ndarray
    zero: float
    beyond: float

    @property
    def logs(self) -> np.ndarray:
        """Logarithms of the values, [m]."""
        return self.step * np.arange(self.first, self.first + len(self.masses))

    def refine(self, step: float) -> _Law:
        """The same law on a grid of the given step, which is the present step divided by a power of
        two.
        """
        stride = round(self.step / step)
        masses = np.zeros((len(self.masses) - 1) * stride + 1)
        masses[::stride] = self.masses
        return self._replace(step=step, first=self.first * stride, masses=masses)

    def cut(self, mean: float) -> _Law:
        """A law that is larger in convex order and has no values of negligible mass at its ends.

        Args:
            mean: expectation of the law.
        """
        masses, values = self.masses, np.exp(self.logs)
        below = np.cumsum(masses)
        above = np.cumsum((masses * values)[::-1])[::-1]
        low = int(np.searchsorted(below, _CUT, side="right"))
        high = len(masses) - int(np.searchsorted(above[::-1], _CUT * mean, side="right"))
        rest = masses[low:high].copy()
        # The mass of smaller values is divided between zero and the first value, which keeps the
        # mean.
        lifted = masses[:low] * np.exp(self.logs[:low] - self.logs[low])
        rest[0] += lifted.sum()
        zero = self.zero + float((masses[:low] - lifted).sum())
        # Larger values become the last value, and the lost expectation is counted as `beyond`.
        rest[-1] += masses[high:].sum()
        beyond = self.beyond + (float(above[high]) if high < len(masses) else 0.0)
        total = float(rest.sum()) + zero  # 1, up to rounding
        return _Law(self.step, self.first + low, rest / total, zero / total, beyond)


def one_of_rounds(multiplier: float, rounds: int, interval: float) -> PrivacyLossDistribution:
    """Privacy loss distribution that bounds the loss of one participation in one of `rounds` rounds
    from above.

    The neighbouring relations are add-or-remove-one and zero-out.

    Args:
        multiplier: noise std of every round divided by the unit's bound, at least 0.1.
        rounds: number n of rounds. One of them is drawn uniformly and secretly.
        interval: distance between neighbouring losses on the accountant's grid.

    Example:
        >>> once = one_of_rounds(1.0, 10, 1e-3)
        >>> round(float(once.get_epsilon_for_delta(1e-5)), 2)
        2.19
    """
    coarser = max(1.0, (interval / 1e-4) ** (1 / 3))
    law = _sum_of(rounds, 1.0 / multiplier, coarser)
    losses = law.logs - math.log(rounds)
    # Removing: the loss is log A under the first law, whose density is A times the second.
    removed = _on_grid(losses, law.masses * np.exp(losses), law.beyond / rounds, interval)
    # Adding: the loss is -log A under the second law. A = 0 is an infinite loss.
    added = _on_grid(-losses[::-1], law.masses[::-1], law.zero, interval)
    return PrivacyLossDistribution(removed, added)


def _on_grid(losses: np.ndarray, masses: np.ndarray, infinite: float, interval: float) -> Any:
    """The distribution of the losses on the accountant's grid. The mass of each loss is divided
    between its two neighbours so that the masses under both laws stay the same (Doroshenko et al.
    2022, arXiv 2207.04380).
    """
    # Losses and masses are increased, so that rounding cannot make the bound too small.
    losses = losses + _ROUNDED * (1 + np.abs(losses))
    places = np.floor(losses / interval).astype(np.int64)
    # The division keeps sum p and sum p exp(-loss), so the share (exp(l_k - l) - 1) /
    # (exp(-interval) - 1) goes to the upper neighbour.
    above = np.clip(np.expm1(places * interval - losses) / math.expm1(-interval), 0.0, 1.0)
    first, size = int(places[0]), int(places[-1] - places[0]) + 2
    lower = np.bincount(places - first, masses * (1 - above), size)
    probs = (lower + np.bincount(places - first + 1, masses * above, size)) * (1 + _ROUNDED)
    return DensePLDPmf(interval, first, probs, infinite * (1 + _ROUNDED) + _CUT, True)


@lru_cache(maxsize=16)
def _sum_of(count: int, shift: float, coarser: float = 1.0) -> _Law:
    """The law of W_1 + ... + W_n, computed from the laws of both halves of the sum."""
    spread = math.sqrt(math.expm1(shift**2) / count)  # standard deviation of A
    coarsest = _STEP * max(1.0, shift) * coarser
    last = min(coarsest, _FINE * spread * coarser)
    most = math.floor(math.log2(coarsest / last))
    laws: dict[tuple[int, int], _Law] = {}

    def law_of(terms: int, depth: int) -> _Law:
        """The law of a sum of `terms` terms. The errors of the n / terms sums average out, so their
        grid is coarser by the square root of their number.
        """
        if (terms, depth) not in laws:
            step = last * 2 ** min(depth // 2, most)
            if terms == 1:
                laws[terms, depth] = _one_ratio(shift, step)
            else:
                halves = (law_of(terms // 2, depth + 1), law_of(terms - terms // 2, depth + 1))
                one, other = (half.refine(step) for half in halves)
                laws[terms, depth] = _add(one, one if terms % 2 == 0 else other).cut(terms)
        return laws[terms, depth]

    return law_of(count, 0)


def _one_ratio(shift: float, step: float) -> _Law:
    """The law of W = exp(shift g - shift^2 / 2) on a grid. The mass between two values of the grid
    is divided between them.
    """
    first = math.floor((-_REACH * shift - shift**2 / 2) / step)
    last = math.ceil((_REACH * shift + shift**2 / 2) / step)
    logs = step * np.arange(first, last + 1)
    # log W = s g - s^2 / 2 at the Gaussian number g = log W / s + s / 2.
    points = logs / shift + shift / 2
    # P(W in a cell), and E[W; cell] divided by the cell's lower end; exp(s g - s^2 / 2) tilts the
    # law of g by s.
    mass, moment = _between(points), _between(points - shift) * np.exp(-logs[:-1])
    # Two points, 1 at the lower end and exp(step) at the upper end, get the cell's mass and mean.
    right = np.clip((moment - mass) / math.expm1(step), 0.0, mass)
    masses = np.zeros(len(logs))
    masses[:-1] += mass - right
    masses[1:] += right
    # The mass of the lower tail is divided between zero and the first value, which keeps the mean.
    lifted = min(float(ndtr(points[0])), float(ndtr(points[0] - shift) * np.exp(-logs[0])))
    masses[0] += lifted
    masses[-1] += ndtr(-points[-1])
    zero = float(ndtr(points[0])) - lifted
    return _Law(step, first, masses, zero, float(ndtr(shift - points[-1])))


def _between(points: np.ndarray) -> np.ndarray:
    """Gaussian probability of each interval, [m - 1], computed accurately from the nearer tail."""
    upper = points[:-1] > 0
    tail = ndtr(np.where(upper, -points[:-1], points[1:]))
    return tail - ndtr(np.where(upper, -points[1:], points[:-1]))


def _add(one: _Law, other: _Law) -> _Law:
    """Law of the sum of two independent variables on one grid. The mass of each value of the sum is
    divided between its neighbours on the grid.

    The distance of a sum from its larger term depends only on the number of steps between the two
    terms: log(x + y) = log y + log(1 + x / y).
    """
    step, sizes = one.step, (len(one.masses), len(other.masses))
    first = min(one.first, other.first)
    size = max(one.first + sizes[0], other.first + sizes[1]) - first
    a, b = np.zeros(size), np.zeros(size)
    a[one.first - first :][: sizes[0]] = one.masses
    b[other.first - first :][: sizes[1]] = other.masses
    # log(1 + exp(-step j)) for two terms that lie j steps apart.
    grown = np.log1p(np.exp(-step * np.arange(size)))
    places = np.floor(grown / step).astype(np.int64)
    above = np.clip(np.expm1(grown - places * step) / math.expm1(step), 0.0, 1.0)
    total = np.zeros(size + int(places[0]) + 2)
    for apart in range(size):
        if apart == 0:
            pairs = a * b
        elif one is other:
            pairs = 2 * a[:-apart] * a[apart:]
        else:
            pairs = a[:-apart] * b[apart:] + a[apart:] * b[:-apart]
        start = apart + int(places[apart])
        upper = pairs * above[apart]
        total[start + 1 :][: len(pairs)] += upper
        total[start:][: len(pairs)] += pairs - upper
    total[:size] += a * other.zero + b * one.zero
    return _Law(step, first, total, one.zero * other.zero, one.beyond + other.beyond)
