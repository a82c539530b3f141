"""Faults of noise whose law is stated: another law or scale, numbers without noise, noise that
comes back."""

from __future__ import annotations

import itertools

import numpy as np
from scipy import stats
from scipy.fft import next_fast_len

from tests.support.noise_plans import LAWS

LEVEL = 1e-6  # of each test for law and scale
STEP = 2**-10  # of the grid, at most, in units of the scale


def faults(noise: list[list[np.ndarray]], family: str = "gaussian") -> set[str]:
    """Names of the faults of independent releases' noise: law, scale, bare, repeated, permuted.

    Args:
        noise: the noise of each layer in units of its scale, for each of at least three releases.
        family: its stated law.
    """
    law, found = LAWS[family], set()
    for layer in zip(*noise, strict=True):
        values = np.concatenate(layer)
        beyond = int((np.abs(values) > law.isf(0.0025)).sum())
        if (
            min(
                stats.kstest(values, law.cdf).pvalue,
                stats.binomtest(beyond, len(values), 0.005).pvalue,
            )
            < LEVEL
        ):
            found.add("law")
        size, freedom = (
            (values**2, stats.chi2) if family == "gaussian" else (np.abs(values), stats.gamma)
        )
        if not LEVEL < freedom(len(values)).cdf(size.sum()) < 1 - LEVEL:
            found.add("scale")
        if (np.abs(np.stack(layer)) < STEP).all(axis=0).any():
            found.add("bare")
    parts = [part for release in noise for part in release if len(part) >= 8]
    if any(_correlated(one, other) for one, other in itertools.combinations(parts, 2)):
        found.add("repeated")
    parts += [np.concatenate(release) for release in noise if len(release) > 1]
    if any(_same_magnitudes(one, other) for one, other in itertools.combinations(parts, 2)):
        found.add("permuted")
    return found


def _correlated(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether the two are correlated wherever one begins in the other, by 7 standard errors."""
    one, other = (np.clip(part, -3, 3) for part in (one, other))
    size = next_fast_len(len(one) + len(other), real=True)
    products = np.fft.irfft(np.fft.rfft(one, size) * np.fft.rfft(other, size).conj(), size)
    shorter = min(len(one), len(other))
    return bool(np.abs(products).max() > 7 * np.sqrt(shorter) * one.std() * other.std())


def _same_magnitudes(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether they hold the same numbers in some order and with some signs."""
    return len(one) == len(other) and bool(
        np.abs(np.sort(np.abs(one)) - np.sort(np.abs(other))).max() < 4 * STEP
    )
