"""Bounds by counting: equal to jax_privacy's on the same scores, right as often as they say, and
near the truth."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
from audit_levels import exceeded

from fedlgm.errors import ConfigError
from fedlgm.privacy import gaussian_epsilon
from fedlgm_lab.audits import bounds
from fedlgm_lab.audits.scores import Scores

DELTA = 1e-5
ANSWERS = json.loads((Path(__file__).parent / "jax_privacy_answers.json").read_text())["cases"]


def normal_scores(mean: float, count: int, seed: int, more: int = 0) -> Scores:
    rng = np.random.default_rng(seed)
    return Scores(rng.normal(mean, size=count), rng.normal(size=count + more))


def all_bounds(scores: Scores, confidence: float, rule: str | float) -> dict[str, float]:
    given_rule = {"threshold": None if rule == "split" else rule, "seed": 3}
    return {
        "clopper-pearson two-sided": bounds.epsilon_clopper_pearson(
            scores, DELTA, confidence, **given_rule
        ),
        "one-run": bounds.epsilon_one_run(scores, DELTA, confidence, **given_rule),
    }


@pytest.mark.parametrize("case", ANSWERS, ids=lambda case: f"{case['mean']} {case['significance']}")
def test_known_answers_of_jax_privacy(case):
    scores = normal_scores(case["mean"], case["count"], case["seed"], 5)
    for expected in (bound for bound in case["bounds"] if bound["rule"] != "frontier"):
        found = all_bounds(scores, 1 - case["significance"], expected["rule"])
        assert found == pytest.approx({name: expected[name] for name in found}, abs=1e-6)


@pytest.mark.parametrize("mean", [0.0, 0.4, 1.5, 4.0])
def test_equal_to_jax_privacy_on_the_same_scores(mean):
    auditing = pytest.importorskip(
        "jax_privacy.auditing", reason="the test-peers extra is not installed"
    )
    for seed, rounded in ((0, False), (1, True)):
        scores = normal_scores(mean, 400, seed, 7)
        if rounded:  # ties
            scores = Scores(np.round(scores.inside, 1), np.round(scores.outside, 1))
        peer = auditing.CanaryScoreAuditor(scores.inside, scores.outside)
        strategies = {"split": auditing.Split(seed=3), 0.8: auditing.Explicit(0.8)}
        for significance in (0.05, 0.001):
            for rule, strategy in strategies.items():
                options = {"threshold_strategy": strategy}
                expected = {
                    "clopper-pearson two-sided": peer.epsilon_clopper_pearson(
                        significance, DELTA, one_sided=False, **options
                    ),
                    "one-run": peer.epsilon_one_run(significance, DELTA, **options),
                }
                assert all_bounds(scores, 1 - significance, rule) == pytest.approx(
                    expected, abs=1e-6
                )


@pytest.mark.parametrize(("trials", "upper"), [(10_000, 3.6882e-4), (20_000, 1.8443e-4)])
def test_limits_of_a_rate_that_was_never_seen(trials, upper):
    assert bounds.clopper_pearson_upper(0, trials, 0.025) == pytest.approx(upper, rel=1e-4)


def test_what_perfect_separation_shows():
    """6.29 for 2,000 trials each, 7.90 for 10,000: trial-limited."""
    for trials, shown in ((2000, 6.29), (10_000, 7.90)):
        scores = Scores(np.ones(trials), np.zeros(trials))
        assert bounds.epsilon_clopper_pearson(scores, DELTA, 0.95, threshold=0.5) == pytest.approx(
            shown, abs=0.01
        )


@pytest.mark.parametrize("name", ["clopper-pearson", "one-run"])
@pytest.mark.slow
def test_no_bound_exceeds_the_truth_more_often_than_it_says(name):
    """Canaries of a Gaussian release in one run are independent, so every bound applies."""
    rng, confidence, audits, mu = np.random.default_rng(2), 0.9, 150, 0.8
    bound = bounds._BOUNDS[name]
    truth = gaussian_epsilon(mu, DELTA)
    scores = [Scores(rng.normal(mu, size=100), rng.normal(size=100)) for _ in range(audits)]
    assert sum(bound(s, DELTA, confidence) > truth for s in scores) < exceeded(
        1 - confidence, audits
    )
    # Power: twice as much is found out with a few hundred canaries.
    wide = [Scores(rng.normal(4.0, size=500), rng.normal(size=500)) for _ in range(3)]
    assert min(bound(s, DELTA, confidence) for s in wide) > 2


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
        (
            lambda: bounds.epsilon_clopper_pearson(Scores(np.ones(1), np.ones(1)), DELTA, 0.9),
            "too few",
        ),
    ],
)
def test_wrong_arguments_are_refused(call, message):
    with pytest.raises(ConfigError, match=message):
        call()
