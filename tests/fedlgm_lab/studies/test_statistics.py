"""The paired test of comparisons: known answers, level, coverage and power by simulation,
refusals."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

import simulations
from fedlgm.errors import ConfigError
from fedlgm_lab.studies.statistics import holm
from fedlgm_lab.studies.tables import false_alarms
from fedlgm_lab.studies.tables.false_alarms import runs
from simulations import difference


def test_known_answer() -> None:
    found = difference(
        [2.0, 3.0, 4.0], [1.0, 1.0, 1.0]
    )  # t = 2 / (1 / sqrt(3)), 2 degrees of freedom
    assert (found.mean, found.seeds) == (2.0, 3)
    assert found.p == pytest.approx(0.07417990, rel=1e-6)
    assert (found.low, found.high) == pytest.approx(
        (2 - 4.302653 / 3**0.5, 2 + 4.302653 / 3**0.5), rel=1e-6
    )
    assert simulations.difference is difference


@given(st.lists(st.tuples(*[st.floats(-100, 100)] * 2), min_size=2, max_size=12))
def test_it_is_students_paired_test(pairs: list[tuple[float, float]]) -> None:
    a, b = np.array(pairs).T
    if np.ptp(a - b) < 1e-6:
        return
    found, test = difference(a, b), stats.ttest_rel(a, b)
    interval = test.confidence_interval(0.95)
    assert (found.p, found.low, found.high) == pytest.approx(
        (test.pvalue, interval.low, interval.high), rel=1e-6
    )


def test_rounds_of_a_run_count_as_their_mean() -> None:
    draw = np.random.default_rng(1)
    a, b = draw.normal(size=(2, 4, 5))
    whole, means = difference(a, b), difference(a.mean(axis=1), b.mean(axis=1))
    assert (whole.mean, whole.low, whole.high, whole.p) == pytest.approx(
        (means.mean, means.low, means.high, means.p)
    )
    repeated = difference(np.repeat(a, 100, axis=1), np.repeat(b, 100, axis=1))
    assert repeated.p == pytest.approx(difference(a, b).p)


KEPT = {
    (row["seeds"], row["within"]): row
    for row in false_alarms.MAKER.open(Path(__file__).parents[3] / "docs" / "results").rows
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seeds", "within"), itertools.product(false_alarms.SEEDS, false_alarms.WITHIN)
)
def test_the_kept_rates_are_measured_again(seeds: int, within: float) -> None:
    kept = KEPT[seeds, within]
    again = false_alarms.rates(seeds, within)
    assert again == pytest.approx({key: kept[key] for key in again}, abs=1e-3)


def test_level_and_coverage() -> None:
    assert len(KEPT) == 9
    for row in KEPT.values():
        assert row["trials"] == 5000
        assert row["alarms"] <= 0.06
        assert 0.94 <= row["coverage"] <= 0.96
        assert row["family_alarms"] <= 0.07  # of 1,250 families: a standard error of 0.006
    again = false_alarms.rates(3, 0.9, trials=400)  # the test itself, on some of the pairs
    assert again["alarms"] <= 0.09


def test_the_test_that_takes_rounds_for_repetitions_fails_that_check() -> None:
    """Power: what comparisons printed before has false alarms at any number of seeds."""
    draw = np.random.default_rng(2)
    for seeds in (3, 10):
        pairs = [runs(draw, seeds, 0.9) for _ in range(300)]
        alarms = [stats.mannwhitneyu(np.ravel(a), np.ravel(b)).pvalue < 0.05 for a, b in pairs]
        assert np.mean(alarms) > 0.15


def test_a_true_difference_is_found() -> None:
    draw = np.random.default_rng(3)
    found = [difference(a + 1.5, b) for a, b in (runs(draw, 10, 0.5) for _ in range(200))]
    assert np.mean([each.p < 0.05 and each.mean > 0 for each in found]) > 0.9


def test_seeds_that_agree_exactly() -> None:
    same = difference([1.0, 2.0], [1.0, 2.0])
    assert (same.mean, same.low, same.high, same.p) == (0.0, 0.0, 0.0, 1.0)
    rounded = difference([0.1 + 0.2, 3.0], [0.3, 3.0])
    assert (rounded.mean, rounded.p) == (0.0, 1.0)
    shifted = difference([1.1, 2.1], [1.0, 2.0])
    assert (shifted.low, shifted.p) == (pytest.approx(0.1), 0.5)


def test_accuracies_that_agree_by_chance_claim_nothing() -> None:
    """Of a test set of 114 examples equal methods often differ by the same step for every seed."""
    draw, alarms = np.random.default_rng(4), 0
    for _ in range(100):
        figures = np.round(draw.normal(0.9, 0.007, size=(2, 20, 3)) * 114) / 114
        alarms += min(holm([difference(a, b).p for a, b in zip(*figures, strict=True)])) < 0.05
    # Of 5 expected at most, at level 0.002; with p = 0 for agreement it is 40.
    assert alarms <= 12


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ([1.0], [2.0], "at least two seeds"),
        ([], [], "at least two seeds"),
        ([1.0, 2.0], [1.0], r"paired by seed.*\[2\] and \[1\]"),
        ([[1.0, 2.0]] * 2, [1.0, 2.0], "paired by seed"),
        (1.0, 2.0, "paired by seed"),
        ([1.0, np.nan], [1.0, 2.0], "finite figures"),
        ([1.0, np.inf], [1.0, 2.0], "finite figures"),
    ],
)
def test_what_cannot_be_paired_is_refused(a, b, message) -> None:
    with pytest.raises(ConfigError, match=message):
        difference(a, b)
