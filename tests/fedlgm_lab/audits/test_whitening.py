"""Whitening undoes the correlation of a run's noise, round by round and afterwards alike."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedlgm.noise import correlation
from fedlgm.noise.correlation.stream import CorrelatedStream
from fedlgm_lab.audits.whitening import Whitening, whiten, whitenable

ROUNDS, SIZE = 12, 5
KINDS = {
    "identity": {},
    "banded": {"bands": 4},
    "square-root": {},
    "blt": {"buffers": 2, "min_separation": 3},
}


def noise(name: str) -> tuple[correlation.Correlation, np.ndarray, np.ndarray]:
    """C, z and w of a run."""
    c = correlation.get(name, ROUNDS, **KINDS[name])
    z = np.random.default_rng(0).normal(size=(ROUNDS, SIZE))
    stream = CorrelatedStream(c, SIZE)
    return c, z, np.stack([stream.next(torch.from_numpy(row.copy())).numpy() for row in z])


@pytest.mark.parametrize("name", KINDS)
def test_z_comes_back(name):
    c, z, w = noise(name)
    assert whiten(c, w) == pytest.approx(z, abs=1e-5)
    assert whiten(c, w[:7]) == pytest.approx(z[:7], abs=1e-5)  # of the first rounds alone, too
    whitening = Whitening(c, SIZE)
    seen = []
    for t, row in enumerate(w):
        seen.append(whitening.next(t + 1, row.copy()))
    assert np.stack(seen) == pytest.approx(z, abs=1e-5)


@pytest.mark.parametrize("name", KINDS)
def test_what_was_not_seen_is_not_made_up(name):
    """Round 3 is missing, and one coordinate of round 6: what follows from them is NaN, and nothing
    else is."""
    c, z, w = noise(name)
    reach = 1 if name == "identity" else 4 if name == "banded" else ROUNDS
    w[5, 2] = np.nan
    whitening, found = Whitening(c, SIZE), np.full((ROUNDS, SIZE), np.nan)
    for t in [t for t in range(ROUNDS) if t != 2]:
        found[t] = whitening.next(t + 1, w[t].copy())
    known = np.ones((ROUNDS, SIZE), dtype=bool)
    known[2 : 2 + reach], known[5 : 5 + reach, 2] = False, False
    assert np.array_equal(np.isfinite(found), known)
    assert found[known] == pytest.approx(z[known], abs=1e-5)
    seen = np.arange(ROUNDS) != 2
    assert np.array_equal(whitenable(c, seen), known[:, 0])
