"""Noise multipliers of correlated noise with and without secret sampling, and what the models'
errors become.

500 clients, 50 expected a round (q = 0.1), delta = 1e-5, add-or-remove-one. Multipliers are the
standard deviation of z over the bound, for columns of norm 1; errors are relative to independent
noise under Poisson sampling."""

from __future__ import annotations

import math
from collections.abc import Container

import pytest

from fedlgm.noise import correlation
from fedlgm.planning.facts import Sampling
from fedlgm.privacy import calibrate
from fedlgm.privacy.whole_run import WholeRun

# epsilon: one Gaussian release, then for b = 1, 2, 4, 5, 10 groups the multiplier and the relative
# mean, largest error
RUNS_OF_300 = {
    1: (
        3.73063,
        {
            1: (6.585, 1, 1),
            2: (9.272, 1.010, 1.005),
            4: (13.05, 1.040, 1.022),
            5: (14.57, 1.056, 1.031),
            10: (20.434, 1.135, 1.081),
        },
    ),
    3: (
        1.39059,
        {
            1: (2.584, 1, 1),
            2: (3.572, 0.992, 0.986),
            4: (4.963, 1.007, 0.990),
            5: (5.516, 1.019, 0.995),
            10: (7.617, 1.078, 1.027),
        },
    ),
    8: (
        0.60023,
        {
            1: (1.286, 1, 1),
            2: (1.680, 0.937, 0.932),
            4: (2.243, 0.915, 0.899),
            5: (2.466, 0.915, 0.894),
            10: (3.288, 0.935, 0.891),
        },
    ),
    16: (
        0.34418,
        {
            1: (0.877, 1, 1),
            2: (1.078, 0.882, 0.877),
            4: (1.365, 0.817, 0.803),
            5: (1.479, 0.805, 0.786),
            10: (1.885, 0.787, 0.749),
        },
    ),
}
SHORTER = {  # (rounds, epsilon): multiplier for that many groups
    (100, 1): {1: 3.942, 2: 5.504, 5: 8.545, 10: 11.797},
    (100, 8): {1: 0.936, 2: 1.149, 5: 1.553, 10: 1.898},
    (16, 3): {1: 1.052, 2: 1.276, 5: 1.760},
}
BUDGET = {"delta": 1e-5, "accountant": "pld"}


def run(
    rounds: int, groups: int, reduce: str = "mean", scheme: str = "grouped-poisson"
) -> WholeRun:
    noise = correlation.get("banded", rounds, bands=groups, reduce=reduce)
    return WholeRun(noise, Sampling(scheme, 500, 0.1, groups), "add-remove")


def check(
    rounds: int, epsilon: float, groups: int, multiplier: float, mean: float, largest: float
) -> None:
    poisson = calibrate(epsilon, 1e-5, steps=rounds, sampling_rate=0.1)
    independent = correlation.get("identity", rounds)
    for reduce, expected in (("mean", mean), ("max", largest)):
        correlated = run(rounds, groups, reduce)
        found = correlated.calibrate(epsilon, **BUDGET)
        assert found == pytest.approx(multiplier, rel=1e-3)
        error = (
            found
            * correlated.noise.error(reduce=reduce)
            / (poisson * independent.error(reduce=reduce))
        )
        assert error == pytest.approx(expected, abs=1.5e-3)


def cases(
    *epsilons: float, groups: Container[int] = range(99)
) -> list[tuple[float, int, float, float, float]]:
    return [
        (e, b, *RUNS_OF_300[e][1][b]) for e in epsilons for b in RUNS_OF_300[e][1] if b in groups
    ]


@pytest.mark.parametrize(("epsilon", "groups", "multiplier", "mean", "largest"), cases(3))
def test_noise_and_errors(epsilon, groups, multiplier, mean, largest):
    check(300, epsilon, groups, multiplier, mean, largest)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("epsilon", "groups", "multiplier", "mean", "largest"), cases(1, 8, 16, groups=(1, 4, 10))
)
def test_noise_and_errors_at_other_budgets(epsilon, groups, multiplier, mean, largest):
    check(300, epsilon, groups, multiplier, mean, largest)


@pytest.mark.parametrize("epsilon", RUNS_OF_300)
def test_a_cycle_is_one_gaussian_release(epsilon):
    """Groups that take turns, or ten rounds between participations: sqrt(30) times the noise of one
    release."""
    one = calibrate(epsilon, 1e-5, steps=1)
    assert one == pytest.approx(RUNS_OF_300[epsilon][0], rel=1e-3)
    cycle = run(300, 10, scheme="cyclic")
    assert cycle.calibrate(epsilon, **BUDGET) == pytest.approx(one * math.sqrt(30), rel=1e-6)
    assert cycle.calibrate(epsilon, **BUDGET) == pytest.approx(
        RUNS_OF_300[epsilon][1][10][0], rel=1e-3
    )
    apart = WholeRun(cycle.noise, Sampling("min-separation", 500, 0.1, 10), "zero-out")
    assert apart.calibrate(epsilon, **BUDGET) == pytest.approx(
        cycle.calibrate(epsilon, **BUDGET), rel=1e-9
    )


@pytest.mark.slow
@pytest.mark.parametrize(("rounds", "epsilon"), SHORTER)
def test_shorter_runs(rounds, epsilon):
    for groups, multiplier in SHORTER[rounds, epsilon].items():
        assert run(rounds, groups).calibrate(epsilon, **BUDGET) == pytest.approx(
            multiplier, rel=1e-3
        )


@pytest.mark.parametrize(("rounds", "bound"), [(64, 3.679), (16, 1.967)])
def test_the_last_cycle_is_cut_short(rounds, bound):
    """7 cycles of 10 in 64 rounds cost less than 7 whole ones: the last columns of C are
    shorter."""
    found = run(rounds, 10, scheme="cyclic")
    multiplier = found.calibrate(3, **BUDGET)
    assert calibrate(3, 1e-5, steps=-(-rounds // 10)) == pytest.approx(bound, rel=1e-3)
    assert 0.97 * bound < multiplier < bound
    assert multiplier == pytest.approx(
        calibrate(3, 1e-5, steps=1) * found.noise.sensitivity(10), rel=1e-6
    )


def test_columns_of_another_norm_cost_what_they_move():
    """Plain square roots have longer columns (1.34 at 10 bands): leaving that out would be too
    little noise."""
    root = correlation.get("square-root", 300, bands=5)
    plain = correlation.Correlation("own", 300, root.coefficients / root.coefficients[0])
    sampling = Sampling("grouped-poisson", 500, 0.1, 5)
    ratio = plain.amplified_column_norm() / root.amplified_column_norm()
    assert ratio > 1.2
    found = [WholeRun(c, sampling, "add-remove").calibrate(8, **BUDGET) for c in (root, plain)]
    assert found[1] / found[0] == pytest.approx(ratio, rel=1e-6)
