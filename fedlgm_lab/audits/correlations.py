"""Significance of the correlations of a run's noise with earlier rounds and among its layers."""

from __future__ import annotations

import math

import numpy as np
import scipy.special

from fedlgm_lab.audits.scores import Array

_FEWEST = 8  # coordinates of which a correlation says something


def correlations(layers: int, kept: int = 1) -> int:
    """Largest number of correlations examined in a round with this many layers and `kept` earlier vectors."""
    return 2 * kept + max(0, 2 * layers - 3)


class Correlations:
    """The most significant correlation of each round's noise.

    The comparison covers each of the vectors that earlier rounds left behind, in this round and in all rounds so far
    together, and for each layer the noise of its neighbour and of the first layer. For independent Gaussian noise
    every cosine has exactly a t law, whose normal quantiles z are summed over the rounds.
    """

    def __init__(self) -> None:
        self._sums = np.zeros((3, 0))  # by place in the past: sum of z, rounds, coordinates

    def of(self, noise: Array, past: list[Array], parts: list[Array]) -> Array:
        """(|z|, correlation) of the most significant one; (0, 0) if there is nothing to compare.

        Args:
            noise: the round's noise, NaN where not known.
            past: vectors of the same size of which the noise should be independent, the latest last.
            parts: its layers.
        """
        pairs: list[tuple[Array, Array]] = [(noise, vector) for vector in reversed(past)]
        for other in range(1, len(parts)):
            for one in {0, other - 1}:
                shorter = min(len(parts[one]), len(parts[other]))
                pairs.append((parts[one][:shorter], parts[other][:shorter]))
        if not pairs:
            return np.zeros(2)
        values, sizes = np.array([_cosine(a, b) for a, b in pairs]).T
        z = normal_quantile(values, sizes)
        if len(past) > self._sums.shape[1]:
            self._sums = np.pad(self._sums, ((0, 0), (0, len(past) - self._sums.shape[1])))
        sums = self._sums[:, : len(past)]
        sums += np.stack([z[: len(past)], sizes[: len(past)] > 0, sizes[: len(past)]])
        times = np.maximum(sums[1], 1)
        together = sums[0] / np.sqrt(times), sums[0] / np.sqrt(times * np.maximum(sums[2], 1))
        found = np.array([np.abs([*z, *together[0]]), [*values, *together[1]]])
        return found[:, int(np.argmax(found[0]))]


def _cosine(a: Array, b: Array) -> tuple[float, int]:
    """Cosine of two vectors where both are known, and its number of coordinates; zeros for too few."""
    product = float(a @ b)
    if math.isnan(product):  # layers that were not released
        both = np.isfinite(a) & np.isfinite(b)
        a, b = a[both], b[both]
        product = float(a @ b)
    lengths = math.sqrt(float(a @ a) * float(b @ b))
    return (0.0, 0) if len(a) < _FEWEST or lengths == 0 else (product / lengths, len(a))


def normal_quantile(cosines: Array, sizes: Array) -> Array:
    """Normal quantiles z of the p-values of cosines of independent Gaussian vectors; 0 for vectors of size 0.

    Args:
        cosines: in [-1, 1], [n].
        sizes: coordinates of each, [n].

    Example:
        >>> np.round(normal_quantile(np.array([0.1, -0.1, 0.0]), np.array([100, 10_000, 0])), 2)
        array([  0.99, -10.02,   0.  ])
    """
    value = np.clip(np.abs(cosines), 0.0, 1 - 1e-15)
    freedom = np.maximum(sizes - 1.0, 1.0)
    tail = scipy.special.stdtr(freedom, -value * np.sqrt(freedom / (1 - value**2)))
    with np.errstate(divide="ignore"):
        z = np.where(tail > 1e-300, -scipy.special.ndtri(tail), np.arctanh(value) * np.sqrt(sizes))
    return np.where(sizes > 0, np.copysign(z, cosines), 0.0)
