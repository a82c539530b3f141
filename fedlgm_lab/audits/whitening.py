"""Whitening of noise that is correlated over rounds: the independent noise z = C w, computed round
by round or for a whole run.

Under the plan the noise of round t is sigma_j w_t with C w = z and z independent N(0, 1).
Multiplication of the releases by C gives releases with independent noise, to which a client that
takes part in the rounds pi contributes C 1_pi times its bound (`privacy.whole_run`). C is lower
triangular, so the first rounds can be whitened without the later rounds.
"""

from __future__ import annotations

from collections import deque

import numpy as np
from scipy.signal import lfilter

from fedlgm.noise.correlation import Correlation
from fedlgm_lab.audits.scores import Array, Flags


def whiten(correlation: Correlation, rows: Array) -> Array:
    """Multiply rows 0, 1, ... of a run by C, [T, ...].

    Example:
        >>> from fedlgm import correlation
        >>> c = correlation.get("square-root", 3, bands=2)
        >>> np.allclose(whiten(c, c.inverse()), np.eye(3))
        True
    """
    return lfilter(correlation.coefficients[: len(rows)], [1.0], rows, axis=0)


def whitenable(correlation: Correlation, seen: Flags) -> Flags:
    """Mark the rounds whose whitened row depends only on observed rounds, bool [T]."""
    reach = np.ones(len(correlation.coefficients[: len(seen)]))
    return np.convolve(~seen, reach)[: len(seen)] == 0


class Whitening:
    """Computes C w round by round, from the earlier vectors w, or from a few buffers if the form of
    C permits this.

    Args:
        correlation: the correlation of the noise, with its matrix C.
        size: number n of values per round.
    """

    def __init__(self, correlation: Correlation, size: int) -> None:
        self._correlation, self._size = correlation, size
        self._done = 0
        self._past: deque[Array] = deque(maxlen=len(correlation.coefficients) - 1)
        self._buffers = np.zeros((len(correlation.decays), size))

    def next(self, round: int, w: Array) -> Array:
        """Whiten the noise of the next observed round.

        Args:
            round: number of the round, from 1; skipped rounds count as not observed.
            w: the round's noise, [n]; NaN where it was not observed. Whitened values that depend on
                unobserved noise are also NaN.
        """
        for _ in range(min(round - 1 - self._done, len(self._correlation.coefficients))):
            self._step(np.full(self._size, np.nan))
        self._done = round
        return self._step(w)

    def _step(self, w: Array) -> Array:
        c = self._correlation
        if c.decays:
            z = w + np.array(c.scales) @ self._buffers
            self._buffers = np.array(c.decays)[:, None] * self._buffers + w
            return z
        z = c.coefficients[0] * w
        for coefficient, past in zip(c.coefficients[1:], reversed(self._past), strict=False):
            z += coefficient * past
        self._past.append(w)
        return z
