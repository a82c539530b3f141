"""The statistics of every comparison, which are intervals and tests of differences that are paired
by seed, and Holm's correction.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedlgm.errors import ConfigError

LEVEL = 0.05
"""Level of every test."""
MOST_SEEDS = 1000
"""Largest number of seeds that `seeds_to_reject` considers."""
_ROUNDING = 1e-12
"""Largest relative difference of two float64 figures that counts as rounding."""


@dataclass(frozen=True)
class Difference:
    """Difference between two methods' figures over the same seeds.

    Attributes:
        mean: mean of the differences.
        low, high: two-sided 95 % Student interval.
        p: two-sided p-value of the hypothesis that there is no difference.
        seeds: number of pairs.

    Example:
        >>> difference([2.0, 3.0, 4.0], [1.0, 1.0, 1.0]).seeds
        3
    """

    mean: float
    low: float
    high: float
    p: float
    seeds: int


def difference(a: Any, b: Any) -> Difference:
    """Compute the mean of the differences a - b, paired by seed, with its 95 % interval and
    p-value.

    Runs of one seed share the initial model and the division of the data, so they are paired.
    The rounds of a run are not independent, so each run counts as one figure, which is the mean
    over its rounds. The test is Student's t over the differences of these figures.

    Args:
        a: figures of one method, [seeds], or [seeds, rounds] of the last rounds.
        b: the other method's figures, in the same order and shape.

    Returns:
        The difference. If all seeds differ by exactly the same amount, the interval has width zero.
        In this case, p is 1 if the differences are zero. Otherwise, p is 0 if there are at least
        five seeds and neither method's figures depend on the seed. Otherwise, p is that of the sign
        test, 2^(1 - seeds), because accuracies on a small test set can agree by chance.

    Raises:
        ConfigError: the shapes differ, there are fewer than two seeds, or a figure is not finite.

    Example:
        >>> found = difference([72.0, 73.0, 75.0], [71.0, 71.0, 72.0])
        >>> [round(value, 3) for value in (found.mean, found.low, found.high, found.p)]
        [2.0, -0.484, 4.484, 0.074]
    """
    try:
        first, second = (np.asarray(values, dtype=np.float64) for values in (a, b))
    except (TypeError, ValueError) as wrong:
        raise ConfigError(f"a difference takes numbers, one per seed: {wrong}") from wrong
    if first.shape != second.shape or first.ndim not in (1, 2):
        raise ConfigError(
            "a difference is paired by seed: both sides must be arrays [seeds] or [seeds, rounds] "
            f"of one shape, got {list(first.shape)} and {list(second.shape)}"
        )
    if len(first) < 2 or first.size == 0:
        raise ConfigError(
            f"a difference needs at least two seeds and one round, got {list(first.shape)}"
        )
    if not (np.isfinite(first).all() and np.isfinite(second).all()):
        raise ConfigError(
            "a difference needs finite figures: leave out, on both sides, the seeds for which one "
            "side has none"
        )
    first, second = (side.reshape(len(side), -1).mean(axis=1) for side in (first, second))
    pairs = first - second
    pairs[np.abs(pairs) <= _ROUNDING * np.maximum(np.abs(first), np.abs(second))] = (
        0.0  # equal up to rounding
    )
    mean = float(pairs.mean())
    if _equal(pairs):
        fixed = len(pairs) > 4 and _equal(first) and _equal(second)
        p = 1.0 if mean == 0 else 0.0 if fixed else 2.0 ** (1 - len(pairs))
        return Difference(mean, mean, mean, p, len(pairs))
    from scipy.stats import ttest_1samp  # imported here, because the import is slow

    tested = ttest_1samp(pairs, 0.0)
    low, high = tested.confidence_interval(0.95)
    return Difference(mean, float(low), float(high), float(tested.pvalue), len(pairs))


def p_at(tested: Difference, value: float) -> float:
    """Compute the two-sided p-value of the hypothesis that a difference is `value`, by Student's t
    test.

    If the difference is the same for all seeds, Student's t is undefined; `difference` states the
    p-values for this case.

    Example:
        >>> tested = difference([72.0, 73.0, 75.0], [71.0, 71.0, 72.0])
        >>> round(p_at(tested, 0.0), 3) == round(tested.p, 3), p_at(tested, 2.0)
        (True, 1.0)
    """
    from scipy.special import stdtr

    if value == 0:
        return tested.p
    if tested.low == tested.high:
        fixed = tested.p == 0 and tested.mean != 0
        return 1.0 if tested.mean == value else 0.0 if fixed else 2.0 ** (1 - tested.seeds)
    statistic = abs(tested.mean - value) / _standard_error(tested)
    return float(2 * stdtr(tested.seeds - 1, -statistic))


def seeds_to_reject(
    tested: Difference, values: Sequence[float], level: float = LEVEL
) -> int | None:
    """Compute the least number of seeds with which a test would reject every value of a list.

    The mean and the standard deviation of the difference are assumed to stay as they are. The
    result is None if more than `MOST_SEEDS` seeds would be needed.

    Args:
        tested: a difference, not NaN.
        values: the values to be rejected.
        level: level of each test.

    Example:
        >>> tested = difference([72.0, 73.0, 75.0], [71.0, 71.0, 72.0])
        >>> seeds_to_reject(tested, [0.0]), seeds_to_reject(tested, [2.0])
        (4, None)
    """
    from scipy.special import stdtr

    counts = np.arange(2, MOST_SEEDS + 1)
    gap = min(abs(tested.mean - value) for value in values)
    if tested.low == tested.high:
        p = 2.0 ** (1.0 - counts) if gap else np.ones(len(counts))
    else:
        error = _standard_error(tested) * math.sqrt(tested.seeds) / np.sqrt(counts)
        p = 2 * stdtr(counts - 1, -gap / error)
    enough = counts[p < level]
    return int(enough[0]) if len(enough) else None


def _standard_error(tested: Difference) -> float:
    """Compute the standard error of a difference's mean from the width of its interval."""
    from scipy.special import stdtrit

    return float((tested.high - tested.low) / 2 / stdtrit(tested.seeds - 1, 0.975))


def _equal(values: np.ndarray) -> bool:
    """Tell whether all figures are equal, up to rounding."""
    return bool(np.ptp(values) <= _ROUNDING * np.abs(values).max())


def over_cells(figures: Iterable[tuple[Any, float, float]]) -> Difference:
    """Compute the difference between two sides' means over the cells of a grid, for the seeds with
    the largest number of cells.

    Args:
        figures: (seed, figure of one side, figure of the other) of every cell and seed that both
            sides have.

    Returns:
        The difference; NaN if there are fewer than two such seeds.

    Example:
        >>> over_cells([(0, 1.0, 0.0), (1, 2.0, 0.0), (1, 4.0, 2.0), (2, 1.0, 0.0), (2, 3.0, 0.0)]).mean
        2.0
        >>> over_cells([(0, 1.0, 0.0), (1, 2.0, 0.0), (1, 4.0, 2.0)])
        Difference(mean=nan, low=nan, high=nan, p=nan, seeds=1)
    """
    by_seed: dict[Any, list[tuple[float, float]]] = {}
    for seed, *sides in figures:
        by_seed.setdefault(seed, []).append((sides[0], sides[1]))
    most = max(map(len, by_seed.values()), default=0)
    means = [
        np.mean(by_seed[seed], axis=0) for seed in sorted(by_seed) if len(by_seed[seed]) == most
    ]
    return (
        difference(*np.array(means).T)
        if len(means) > 1
        else Difference(*(math.nan,) * 4, len(means))
    )


def interval(values: Any) -> tuple[float, float]:
    """Compute the two-sided 95 % Student interval of the mean of figures, one per seed. It is (nan,
    nan) if there are fewer than two figures, or if a figure is not finite.

    Args:
        values: the figures, [seeds].

    Example:
        >>> [round(bound, 2) for bound in interval([2.0, 3.0, 4.0])]
        [0.52, 5.48]
    """
    figures = np.asarray(values, dtype=np.float64)
    if len(figures) < 2 or not np.isfinite(figures).all():
        return float("nan"), float("nan")
    result = difference(figures, np.zeros(len(figures)))
    return result.low, result.high


def holm(p: Sequence[float]) -> list[float]:
    """Adjust the p-values of a family of tests by Holm's step-down procedure.

    If every hypothesis with an adjusted value below 0.05 is rejected, the probability of any false
    rejection is at most 0.05, under any dependence between the tests (Holm 1979).

    Args:
        p: p-values of the family's tests.

    Example:
        >>> [round(value, 3) for value in holm([0.01, 0.04, 0.03])]
        [0.03, 0.06, 0.06]
    """
    adjusted, least = [1.0] * len(p), 0.0
    for rank, index in enumerate(sorted(range(len(p)), key=lambda index: p[index])):
        least = max(least, min(1.0, (len(p) - rank) * p[index]))
        adjusted[index] = least
    return adjusted
