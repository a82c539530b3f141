"""AUC and its interval: known answers, and how often the interval covers the truth."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats
from sklearn.metrics import roc_auc_score

from fedlgm.errors import DataError
from fedlgm.training import tasks


def test_the_value_is_scikit_learns_with_ties():
    random = np.random.default_rng(0)
    scores, targets = random.integers(0, 9, 80).astype(float), random.integers(0, 2, 80)
    found = tasks.auc(scores, targets)
    assert found.value == pytest.approx(roc_auc_score(targets, scores), abs=1e-12)
    assert 0 < found.low < found.value < found.high < 1


@pytest.mark.parametrize("shift", [1.0, 2.5])
def test_the_interval_covers_the_truth(shift):
    random, truth, hits, narrow = np.random.default_rng(1), stats.norm.cdf(shift / np.sqrt(2)), 0, 0
    targets = np.arange(120) % 3 == 0
    for _ in range(500):
        found = tasks.auc(random.standard_normal(120) + shift * targets, targets.astype(int))
        hits += found.low <= truth <= found.high
        half = (found.high - found.low) / 4  # an interval of half the width is caught
        narrow += found.value - half <= truth <= found.value + half
    assert 0.92 <= hits / 500 <= 0.98
    assert narrow / 500 < 0.85


def test_with_few_rows_of_a_class_the_interval_is_a_little_too_narrow():
    random, truth, targets = np.random.default_rng(2), 0.97, np.arange(120) < 20
    shift = np.sqrt(2) * stats.norm.ppf(truth)
    found = [
        tasks.auc(random.standard_normal(120) + shift * targets, targets.astype(int))
        for _ in range(1000)
    ]
    assert (
        0.89 < np.mean([one.low <= truth <= one.high for one in found]) < 0.95
    )  # the page says 92 %


def test_one_class_has_no_auc_and_separated_classes_have_an_interval():
    assert np.isnan(tasks.auc(np.arange(4.0), np.zeros(4))).all()
    assert tasks.auc(np.arange(40.0), np.arange(40) >= 20) == (1.0, 1 - 3 / 20, 1.0)


def test_several_labels_are_refused():
    with pytest.raises(
        DataError, match=r"one label per example, but the training targets have shape \(4, 2\)"
    ):
        tasks.get("ranked").targets(np.ones((4, 2)), "training")
