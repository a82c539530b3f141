"""The largest shift of C x by one client's contributions, for all participation patterns that a
schema allows.

A schema allows at most k participations, and any two of them are at least b rounds apart (b = 1: no
restriction). One participation contributes a vector of norm at most 1. With X = C^T C, sens(C)^2 is
therefore at most the largest sum of |X_ij| over i and j in one pattern. This bound is the exact
value if X >= 0 (Choquette-Choo et al. 2023, arXiv 2211.06530). C is lower triangular and Toeplitz
with the coefficients c, and its last columns are cut short. In this module, `coefficients` is c,
`rounds` is T, `separation` is b and `most` is k.
"""

from __future__ import annotations

import math

import numpy as np


def participations(rounds: int, separation: int, limit: int | None = None) -> int:
    """Largest number of participations in `rounds` rounds, k = min(limit, ceil(T / b)).

    Example:
        >>> participations(10, 4), participations(10, 4, limit=2)
        (3, 2)
    """
    most = -(-rounds // separation)
    return most if limit is None else min(most, limit)


def best(values: np.ndarray, separation: int, most: int) -> np.ndarray:
    """Largest sum of at most `most` entries, any two at least `separation` apart, along the last
    axis.

    Args:
        values: non-negative numbers [..., T].
        separation: smallest distance b >= 1 of two entries.
        most: largest number k >= 0 of entries.

    Returns:
        The sums, [...]. Dynamic programming takes O(T) time if k does not limit a sum, otherwise
        O(T k).

    Example:
        >>> float(best(np.array([3.0, 4.0, 2.0, 5.0]), separation=2, most=2))
        9.0
    """
    rounds = values.shape[-1]
    rest = np.zeros((*values.shape[:-1], rounds + separation))  # rest[i]: best sum from i on
    if most >= participations(rounds, separation):
        # A block of b rounds contains at most one participation, so either take round i and
        # continue at i + b, or skip round i.
        for stop in range(rounds, 0, -separation):
            start = max(0, stop - separation)
            rest[..., start:stop] = (
                values[..., start:stop] + rest[..., start + separation : stop + separation]
            )
            rest[..., start : stop + 1] = _best_from_here(rest[..., start : stop + 1])
        return rest[..., 0]
    for _ in range(most):
        # One more participation is in round i, and the best sum so far continues from round i + b
        # on.
        longer = np.zeros_like(rest)
        longer[..., :rounds] = values + rest[..., separation:]
        rest = _best_from_here(longer)
    return rest[..., 0]


def _best_from_here(values: np.ndarray) -> np.ndarray:
    return np.maximum.accumulate(values[..., ::-1], axis=-1)[..., ::-1]


def squared_column_norms(coefficients: np.ndarray, rounds: int) -> np.ndarray:
    """Squared l2 norm of each column of C, [T].

    Example:
        >>> squared_column_norms(np.array([1.0, 0.5]), 3).tolist()
        [1.25, 1.25, 1.0]
    """
    within = np.cumsum(coefficients**2)
    return within[np.minimum(rounds - 1 - np.arange(rounds), coefficients.size - 1)]


def is_decreasing(coefficients: np.ndarray) -> bool:
    """Whether c_0 >= c_1 >= ... >= 0, with no tolerance.

    Example:
        >>> is_decreasing(np.array([1.0, 0.5, 0.5])), is_decreasing(np.array([1.0, 0.5, -0.1]))
        (True, False)
    """
    return bool(coefficients[-1] >= 0 and np.all(np.diff(coefficients) <= 0))


def earliest_pattern(
    coefficients: np.ndarray, rounds: int, separation: int, most: int
) -> np.ndarray:
    """Sum of the columns 0, b, 2b, ... of C, at most k of them, [T].

    For decreasing coefficients this pattern has the largest norm (Kalinin and Lampert 2024, arXiv
    2405.13763, Theorem 2), also in every leading block of C.

    Example:
        >>> earliest_pattern(np.array([1.0, 0.5]), rounds=5, separation=3, most=2).tolist()
        [1.0, 0.5, 0.0, 1.0, 0.5]
    """
    total = np.zeros(rounds)
    for start in range(0, min(rounds, most * separation), separation):
        end = min(rounds, start + coefficients.size)
        total[start:end] += coefficients[: end - start]
    return total


def squared_sensitivity(coefficients: np.ndarray, rounds: int, separation: int, most: int) -> float:
    """Squared sensitivity sens(C)^2 if an exact formula applies, otherwise an upper bound on it.

    The formula is exact for decreasing coefficients, for at most `separation` coefficients (columns
    of different participations are then orthogonal for any signs), and for one participation. The
    upper bound is the row-wise bound of Choquette-Choo et al. 2023 (arXiv 2306.08153, Algorithm 4).

    Example:
        >>> squared_sensitivity(np.array([1.0, 0.5]), rounds=5, separation=3, most=2)  # two columns that do not overlap
        2.5
    """
    if is_decreasing(coefficients):
        pattern = earliest_pattern(coefficients, rounds, separation, most)
        return float(pattern @ pattern)
    if coefficients.size <= separation or most == 1:
        return float(best(squared_column_norms(coefficients, rounds), separation, most))
    rows = best(magnitudes(coefficients, rounds), separation, most)
    return float(best(rows, separation, most))


def magnitudes(coefficients: np.ndarray, rounds: int) -> np.ndarray:
    """Magnitudes of the entries of C^T C, [T, T]. None is rounded below its true value.

    Example:
        >>> magnitudes(np.array([1.0, 0.5]), rounds=2).round(12).tolist()
        [[1.25, 0.5], [0.5, 1.0]]
    """
    products = np.zeros((rounds, rounds))
    c = coefficients[:rounds]
    for lag in range(c.size):
        # (C^T C)_{t, t + lag} = sum_s c_s c_{s + lag}, cut off where the columns end.
        signed, positive = (np.cumsum(x[lag:] * x[: x.size - lag]) for x in (c, np.abs(c)))
        # Add a bound on the rounding of a sum of up to T products.
        summed = np.abs(signed) + positive * (rounds * 2.0**-52)
        index = np.minimum(rounds - 1 - lag - np.arange(rounds - lag), summed.size - 1)
        diagonal = np.arange(rounds - lag)
        products[diagonal, diagonal + lag] = products[diagonal + lag, diagonal] = summed[index]
    return products


def rounded_up(squared: float, rounds: int) -> float:
    """Square root of a computed sum of non-negative terms, never below the square root of the exact
    sum.

    The margin covers 4 (T + 2) relative rounding errors of doubles.

    Example:
        >>> 2.0 < rounded_up(4.0, rounds=100) < 2.0 + 1e-12
        True
    """
    return math.sqrt(squared) * (1 + 4 * (rounds + 2) * 2.0**-53)
