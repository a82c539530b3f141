"""Bounds from scores with Gaussian noise: right as often as they say, near the truth, equal to
quadrature."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from audit_levels import exceeded
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlgm.errors import ConfigError
from fedlgm_lab.audits.gaussian_scores import (
    NoiseSeen,
    gaussian_shift,
    noise_ratio,
    noncentral_t_lower,
    seen_degrees,
)
from fedlgm_lab.audits.scores import Scores

DELTA = 1e-5


@pytest.mark.parametrize("mu", [0.3, 2.0])
def test_the_noise_ratio_exceeds_the_truth_as_often_as_it_says(mu):
    rng, confidence, audits = np.random.default_rng(0), 0.9, 400
    found = []
    for _ in range(audits):
        planned = mu * rng.integers(0, 2, 60)
        found.append(noise_ratio(planned + rng.normal(size=60), planned, confidence))
    above = int(np.sum(np.array(found) > 1))
    assert above < exceeded(1 - confidence, audits)
    assert above > audits * (1 - confidence) / 2  # it is exact, not merely safe


@pytest.mark.parametrize("mu", [0.0, 1.0])
def test_the_shift_exceeds_the_truth_as_often_as_it_says(mu):
    rng, confidence, audits = np.random.default_rng(1), 0.9, 400
    found = [
        gaussian_shift(
            Scores(3 * rng.normal(mu, size=40) + 5, 3 * rng.normal(size=50) + 5), confidence
        )
        for _ in range(audits)
    ]
    above = int(np.sum(np.array(found) > mu))
    assert audits * (1 - confidence) / 2 < above < exceeded(1 - confidence, audits)


def test_more_canaries_show_more():
    found = [noise_ratio(*_aligned(0.5, n), 0.999) for n in (200, 2000, 20_000)]
    assert found[0] < found[1] < found[2] <= 1
    assert found[2] > 0.9


def test_noise_that_is_seen_as_a_whole_makes_the_ratio_tighter_at_the_same_level():
    """Canaries of two layers, of which the smaller has four coordinates; every limit is too high in
    10 % of runs."""
    rng, sizes, mu, rounds, canaries = np.random.default_rng(5), np.array([4, 200]), 0.8, 6, 30
    found = {"seen": [], "sums": []}
    for _ in range(600):
        observed, energy, length = [], [], 0.0
        signs = rng.integers(0, 2, (rounds, canaries)) * 2.0 - 1.0
        for t in range(rounds):
            noise = [rng.normal(size=size) for size in sizes]
            units = [
                (rng.integers(0, 2, (canaries, size)) * 2.0 - 1.0) / math.sqrt(size)
                for size in sizes
            ]
            observed.append(
                mu * signs[t]
                + sum(unit @ z for unit, z in zip(units, noise, strict=True)) / math.sqrt(2)
            )
            energy.append([np.mean(z**2) for z in noise])
            length += mu**2 * sum(float(np.sum((signs[t] @ unit) ** 2)) for unit in units) / 2
        weights = np.full((rounds, 2), math.sqrt(0.5))
        seen = NoiseSeen.of_layers(np.array(energy), weights, sizes, math.sqrt(length))
        sums = NoiseSeen(seen_degrees(np.full(rounds, float(np.sum(0.25 / sizes))), canaries))
        for name, noise_seen in (("seen", seen), ("sums", sums)):
            found[name].append(
                noise_ratio(np.concatenate(observed), (mu * signs).ravel(), 0.9, noise_seen)
            )
    above = int(np.sum(np.array(found["seen"]) > 1))
    assert scipy.stats.binom.ppf(1e-3, 600, 0.1) <= above <= scipy.stats.binom.isf(1e-3, 600, 0.1)
    assert np.mean(found["seen"]) > np.mean(found["sums"]) + 0.01
    assert np.std(found["seen"]) < np.std(found["sums"])


def _aligned(mu: float, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Observations without luck: the sample has exactly the planned signal and variance."""
    planned = mu * (np.arange(count) % 2)
    noise = scipy.stats.norm.ppf((np.arange(count) // 2 + 0.5) / (count // 2))
    return planned + noise / noise.std(), planned


@given(st.floats(0.1, 5), st.floats(0.1, 5), st.integers(0, 1000))
@settings(max_examples=25)
def test_the_noise_ratio_scales_with_the_noise(mu, factor, seed):
    rng = np.random.default_rng(seed)
    planned, noise = mu * rng.integers(0, 2, 50), rng.normal(size=50)
    if not planned.any():
        return
    ratio = noise_ratio(factor * planned + noise, planned, 0.9)
    assert noise_ratio(planned + noise / factor, planned, 0.9) == pytest.approx(
        ratio, rel=1e-6, abs=1e-9
    )


@pytest.mark.parametrize("t", [0.5, 3.0, 30.0])
def test_the_limit_of_a_noncentral_t(t):
    for degrees in (5.0, 400.0, 1e6):
        low = noncentral_t_lower(t, degrees, 0.99)
        assert scipy.stats.nct.sf(t, degrees, low) == pytest.approx(0.01, rel=2e-2)


def test_no_noise_is_no_privacy():
    planned = np.array([1.0, 0.0, 1.0, 0.0, 1.0])
    assert math.isinf(noise_ratio(2 * planned, planned, 0.9))
    assert math.isinf(gaussian_shift(Scores(np.ones(5), np.zeros(5)), 0.9))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: noise_ratio(np.ones(3), np.zeros(3), 0.9), "too few canaries"),
        (lambda: noise_ratio(np.ones(3), np.zeros(2), 0.9), "equal length"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
