"""Bounds: equal to jax_privacy's on the same scores, right as often as they say, and near the truth."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlgm.audits import bounds
from fedlgm.audits.bounds import Scores
from fedlgm.errors import ConfigError
from fedlgm.privacy import gaussian_epsilon

DELTA = 1e-5
ANSWERS = json.loads((Path(__file__).parent / "jax_privacy_answers.json").read_text())["cases"]


def normal_scores(mean: float, count: int, seed: int, more: int = 0) -> Scores:
    rng = np.random.default_rng(seed)
    return Scores(rng.normal(mean, size=count), rng.normal(size=count + more))


def all_bounds(scores: Scores, confidence: float, rule: str | float) -> dict[str, float]:
    given_rule = {"rule": rule, "seed": 3}
    return {
        "clopper-pearson": bounds.epsilon_clopper_pearson(scores, DELTA, confidence, **given_rule),
        "clopper-pearson two-sided": bounds.epsilon_clopper_pearson(
            scores, DELTA, confidence, two_sided=True, **given_rule
        ),
        "one-run": bounds.epsilon_one_run(scores, DELTA, confidence, **given_rule),
        "one-run-fdp": bounds.epsilon_one_run_fdp(scores, DELTA, confidence, **given_rule),
    }


@pytest.mark.parametrize("case", ANSWERS, ids=lambda case: f"{case['mean']} {case['significance']}")
def test_known_answers_of_jax_privacy(case):
    scores = normal_scores(case["mean"], case["count"], case["seed"], 5)
    for expected in case["bounds"]:
        found = all_bounds(scores, 1 - case["significance"], expected["rule"])
        assert found == pytest.approx({name: expected[name] for name in found}, abs=1e-6)
    assert scores.auc() == pytest.approx(case["auc"], abs=1e-12)


@pytest.mark.parametrize("mean", [0.0, 0.4, 1.5, 4.0])
def test_equal_to_jax_privacy_on_the_same_scores(mean):
    auditing = pytest.importorskip("jax_privacy.auditing", reason="the test-peers extra is not installed")
    for seed, rounded in ((0, False), (1, True)):
        scores = normal_scores(mean, 400, seed, 7)
        if rounded:  # ties
            scores = Scores(np.round(scores.inside, 1), np.round(scores.outside, 1))
        peer = auditing.CanaryScoreAuditor(scores.inside, scores.outside)
        strategies = {"frontier": auditing.Bonferroni(), "split": auditing.Split(seed=3), 0.8: auditing.Explicit(0.8)}
        for significance in (0.05, 0.001):
            for rule, strategy in strategies.items():
                options = {"threshold_strategy": strategy}
                expected = {
                    "clopper-pearson": peer.epsilon_clopper_pearson(significance, DELTA, **options),
                    "clopper-pearson two-sided": peer.epsilon_clopper_pearson(
                        significance, DELTA, one_sided=False, **options
                    ),
                    "one-run": peer.epsilon_one_run(significance, DELTA, **options),
                    "one-run-fdp": peer.epsilon_one_run_fdp(significance, DELTA, **options),
                }
                assert all_bounds(scores, 1 - significance, rule) == pytest.approx(expected, abs=1e-6)


def test_error_rates_whose_limits_say_nothing_show_nothing():
    """jax_privacy takes the absolute value of mu there: 11.08 for ten canaries in and out whose scores are alike."""
    rng = np.random.default_rng(0)
    assert bounds.epsilon_from_rates(Scores(rng.normal(size=10), rng.normal(size=10)), DELTA, 0.999) == 0
    case = next(case for case in ANSWERS if case["mean"] == 2.5 and case["significance"] == 0.05)
    scores = normal_scores(case["mean"], case["count"], case["seed"], 5)
    assert bounds.epsilon_from_rates(scores, DELTA, 0.95) == pytest.approx(case["gdp"], abs=1e-6)


@pytest.mark.parametrize(("trials", "upper"), [(10_000, 3.6882e-4), (20_000, 1.8443e-4)])
def test_limits_of_a_rate_that_was_never_seen(trials, upper):
    assert bounds.clopper_pearson_upper(0, trials, 0.025) == pytest.approx(upper, rel=1e-4)


def test_what_perfect_separation_shows():
    """6.29 for 2,000 trials each, 7.90 for 10,000: trial-limited."""
    for trials, shown in ((2000, 6.29), (10_000, 7.90)):
        scores = Scores(np.ones(trials), np.zeros(trials))
        assert bounds.epsilon_clopper_pearson(scores, DELTA, 0.95, rule=0.5) == pytest.approx(shown, abs=0.01)


def exceeded(level: float, audits: int) -> int:
    """Fewest exceedances that a bound of this level would show in so many audits less than once in a thousand."""
    return int(scipy.stats.binom.isf(1e-3, audits, level)) + 1


@pytest.mark.parametrize("mu", [0.3, 2.0])
def test_the_noise_ratio_exceeds_the_truth_as_often_as_it_says(mu):
    rng, confidence, audits = np.random.default_rng(0), 0.9, 400
    found = []
    for _ in range(audits):
        planned = mu * rng.integers(0, 2, 60)
        found.append(bounds.noise_ratio(planned + rng.normal(size=60), planned, confidence))
    above = int(np.sum(np.array(found) > 1))
    assert above < exceeded(1 - confidence, audits)
    assert above > audits * (1 - confidence) / 2  # it is exact, not merely safe


@pytest.mark.parametrize("mu", [0.0, 1.0])
def test_the_shift_exceeds_the_truth_as_often_as_it_says(mu):
    rng, confidence, audits = np.random.default_rng(1), 0.9, 400
    found = [
        bounds.gaussian_shift(Scores(3 * rng.normal(mu, size=40) + 5, 3 * rng.normal(size=50) + 5), confidence)
        for _ in range(audits)
    ]
    above = int(np.sum(np.array(found) > mu))
    assert audits * (1 - confidence) / 2 < above < exceeded(1 - confidence, audits)


@pytest.mark.parametrize("name", ["clopper-pearson", "one-run", "one-run-fdp"])
@pytest.mark.slow
def test_no_bound_exceeds_the_truth_more_often_than_it_says(name):
    """Canaries of a Gaussian release in one run are independent, so every bound applies."""
    rng, confidence, audits, mu = np.random.default_rng(2), 0.9, 150, 0.8
    bound = bounds._BOUNDS[name]
    truth = gaussian_epsilon(mu, DELTA)
    scores = [Scores(rng.normal(mu, size=100), rng.normal(size=100)) for _ in range(audits)]
    assert sum(bound(s, DELTA, confidence) > truth for s in scores) < exceeded(1 - confidence, audits)
    # Power: twice as much is found out with a few hundred canaries.
    wide = [Scores(rng.normal(4.0, size=500), rng.normal(size=500)) for _ in range(3)]
    assert min(bound(s, DELTA, confidence) for s in wide) > 2


def test_more_canaries_show_more():
    found = [bounds.noise_ratio(*_aligned(0.5, n), 0.999) for n in (200, 2000, 20_000)]
    assert found[0] < found[1] < found[2] <= 1
    assert found[2] > 0.9


def test_noise_that_is_seen_as_a_whole_makes_the_ratio_tighter_at_the_same_level():
    """Canaries of two layers, of which the smaller has four coordinates; every limit is too high in 10 % of runs."""
    rng, sizes, mu, rounds, canaries = np.random.default_rng(5), np.array([4, 200]), 0.8, 6, 30
    found = {"seen": [], "sums": []}
    for _ in range(600):
        observed, energy, length = [], [], 0.0
        signs = rng.integers(0, 2, (rounds, canaries)) * 2.0 - 1.0
        for t in range(rounds):
            noise = [rng.normal(size=size) for size in sizes]
            units = [(rng.integers(0, 2, (canaries, size)) * 2.0 - 1.0) / math.sqrt(size) for size in sizes]
            observed.append(mu * signs[t] + sum(unit @ z for unit, z in zip(units, noise, strict=True)) / math.sqrt(2))
            energy.append([np.mean(z**2) for z in noise])
            length += mu**2 * sum(float(np.sum((signs[t] @ unit) ** 2)) for unit in units) / 2
        weights = np.full((rounds, 2), math.sqrt(0.5))
        seen = bounds.NoiseSeen.of_layers(np.array(energy), weights, sizes, math.sqrt(length))
        sums = bounds.NoiseSeen(bounds.seen_degrees(np.full(rounds, float(np.sum(0.25 / sizes))), canaries))
        for name, noise_seen in (("seen", seen), ("sums", sums)):
            found[name].append(bounds.noise_ratio(np.concatenate(observed), (mu * signs).ravel(), 0.9, noise_seen))
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
    ratio = bounds.noise_ratio(factor * planned + noise, planned, 0.9)
    assert bounds.noise_ratio(planned + noise / factor, planned, 0.9) == pytest.approx(ratio, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("t", [0.5, 3.0, 30.0])
def test_the_limit_of_a_noncentral_t(t):
    for degrees in (5.0, 400.0, 1e6):
        low = bounds.noncentral_t_lower(t, degrees, 0.99)
        assert scipy.stats.nct.sf(t, degrees, low) == pytest.approx(0.01, rel=2e-2)


def test_no_noise_is_no_privacy():
    planned = np.array([1.0, 0.0, 1.0, 0.0, 1.0])
    assert math.isinf(bounds.noise_ratio(2 * planned, planned, 0.9))
    assert math.isinf(bounds.gaussian_shift(Scores(np.ones(5), np.zeros(5)), 0.9))


def test_two_normal_laws_of_one_variance_are_a_gaussian_release():
    for mu in (0.2, 1.0, 3.0):
        found = bounds.epsilon_two_gaussians(mu * 2, 2.0, 0.0, 2.0, DELTA)
        assert found == pytest.approx(gaussian_epsilon(mu, DELTA), rel=1e-6)


def test_two_normal_laws_by_quadrature():
    x = np.linspace(-60, 60, 2_000_001)
    p, q = scipy.stats.norm.pdf(x, 1.0, 1.5), scipy.stats.norm.pdf(x, 0.0, 1.0)
    epsilon = bounds.epsilon_two_gaussians(1.0, 1.5, 0.0, 1.0, 1e-3)
    sticks = [np.trapezoid(np.maximum(a - math.exp(epsilon) * b, 0), x) for a, b in ((p, q), (q, p))]
    assert max(sticks) == pytest.approx(1e-3, rel=1e-5)


def test_the_one_shot_estimate_of_a_gaussian_run():
    rng = np.random.default_rng(0)
    dimension, mu = 10_000, 1.5
    cosines = (mu + rng.normal(size=2000)) / math.sqrt(dimension)
    truth = gaussian_epsilon(mu, DELTA)
    assert bounds.epsilon_one_shot(cosines, dimension, DELTA) == pytest.approx(truth, rel=0.15)


def test_how_many_canaries_are_needed():
    needed = bounds.canaries_needed("one-run", 1.0, DELTA, 0.999)
    assert bounds.largest_epsilon("one-run", needed, DELTA, 0.999) > 1.0
    assert bounds.largest_epsilon("one-run", needed // 2, DELTA, 0.999) <= 1.0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Scores(np.array([]), np.ones(3)), "non-empty"),
        (lambda: Scores(np.array([math.nan]), np.ones(3)), "numbers"),
        (lambda: bounds.epsilon_one_run(normal_scores(1, 9, 0), 1.0, 0.9), "delta"),
        (lambda: bounds.epsilon_one_run(normal_scores(1, 9, 0), DELTA, 0.4), "confidence"),
        (lambda: bounds.epsilon_one_run(normal_scores(1, 9, 0), DELTA, 0.9, rule="best"), "split, frontier"),
        (lambda: bounds.epsilon_one_run_fdp(normal_scores(1, 9, 0), 0.0, 0.9), "delta = 0"),
        (lambda: bounds.epsilon_clopper_pearson(Scores(np.ones(1), np.ones(1)), DELTA, 0.9), "too few"),
        (lambda: bounds.noise_ratio(np.ones(3), np.zeros(3), 0.9), "too few canaries"),
        (lambda: bounds.noise_ratio(np.ones(3), np.zeros(2), 0.9), "equal length"),
        (lambda: bounds.epsilon_two_gaussians(0, 0, 0, 1, DELTA), "positive"),
        (lambda: bounds.epsilon_one_shot(np.ones(1), 10, DELTA), "at least 2"),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
