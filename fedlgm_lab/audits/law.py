"""Test whether noise is Gaussian by counting its numbers in a few cells and comparing the counts with the normal law.

The counts are exactly binomial for noise as planned, since its scale is known and not estimated.
"""

from __future__ import annotations

import numpy as np
import scipy.stats

from fedlgm_lab.audits.scores import Array

_WIDTH, _OUTER, _NONE = 0.5, 4.0, 1e-4
_SIDE = np.arange(_WIDTH, _OUTER + _WIDTH, _WIDTH)
_EDGES = np.concatenate([-_SIDE[::-1], [-_NONE, _NONE], _SIDE])
CELLS = len(_EDGES) + 1
"""Cells of half a standard deviation from -4 to 4, one on either side, and one at 0, for numbers without noise."""
_BELOW = scipy.stats.norm.cdf(_EDGES)
PROBABILITIES = np.concatenate([_BELOW[:1], np.diff(_BELOW), _BELOW[:1]])
_TAILS = (4, 3, 2)  # outer cells on either side: beyond 2.5, 3 and 3.5 standard deviations
STATISTICS = CELLS + len(_TAILS)
"""Counts that are tested: those of each cell, and those of the tails of both sides together."""


def _with_tails(values: Array) -> Array:
    return np.concatenate([values, [values[:k].sum() + values[-k:].sum() for k in _TAILS]])


PLANNED = _with_tails(PROBABILITIES)


def counted(noise: Array) -> Array:
    """Numbers in each cell, [CELLS]; NaN is not counted.

    Example:
        >>> counted(np.array([-9.0, 0.1, 0.2, 9.0])).astype(int).tolist()
        [1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 1]
    """
    cells = np.searchsorted(_EDGES, noise[~np.isnan(noise)], side="right")
    return np.bincount(cells, minlength=CELLS).astype(np.float64)


def least_likely(counts: Array) -> tuple[float, int]:
    """(p-value, number) of the statistic with the least likely count, in either direction.

    Args:
        counts: counts of one layer over the rounds, [CELLS].

    Example:
        >>> noise = np.random.default_rng(0)
        >>> least_likely(counted(noise.normal(size=10_000)))[0] > 0.001  # the smallest of 22
        True
        >>> least_likely(counted(noise.uniform(-(3**0.5), 3**0.5, size=10_000)))[0] < 1e-50
        True
    """
    total = counts.sum()
    seen = _with_tails(counts)
    below = scipy.stats.binom.cdf(seen, total, PLANNED)
    above = scipy.stats.binom.sf(seen - 1, total, PLANNED)
    values = np.minimum(1.0, 2 * np.minimum(below, above))
    number = int(np.argmin(values))
    return float(values[number]), number


def described(counts: Array, number: int) -> str:
    """Observed and planned value of a statistic, in words.

    Example:
        >>> described(counted(np.array([-9.0, 0.1, 0.2, 9.0])), 10)
        '50.000% of it lies between 0.0001 and 0.5 standard deviations, planned 19.142%'
    """
    share, planned = _with_tails(counts)[number] / counts.sum(), PLANNED[number]
    if number >= CELLS:
        where = f"beyond {-_EDGES[_TAILS[number - CELLS] - 1]:g}"
    elif number in (0, CELLS - 1):
        where = f"below {-_OUTER:g}" if number == 0 else f"above {_OUTER:g}"
    else:
        where = f"between {_EDGES[number - 1]:g} and {_EDGES[number]:g}"
    return f"{share:.3%} of it lies {where} standard deviations, planned {planned:.3%}"
