from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm
from sklearn.metrics import roc_auc_score

from fedlgm.errors import ConfigError
from fedlgm_lab.attacks.membership import clopper_pearson, evaluate_scores


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(2, 40), st.integers(2, 40))
def test_auc_is_scikit_learns(seed, n, m):
    rng = np.random.default_rng(seed)
    high, low = rng.integers(0, 6, n) + 1.0, rng.integers(0, 6, m) * 1.0
    truth = np.repeat([1, 0], [n, m])
    result = evaluate_scores(high, low)
    assert result.auc == pytest.approx(roc_auc_score(truth, np.concatenate([high, low])))
    assert result.auc_low <= result.auc <= result.auc_high


@settings(max_examples=40)
@given(st.integers(0, 10_000))
def test_at_most_the_asked_share_of_others_is_accused(seed):
    rng = np.random.default_rng(seed)
    high, low = np.round(rng.standard_normal(50) + 1, 1), np.round(rng.standard_normal(80), 1)
    for rate in evaluate_scores(high, low, fprs=(0.01, 0.1, 0.5)).rates:
        # Some threshold reaches this rate of members within the allowed share of others, and no
        # threshold more.
        reached = [
            (high > t).mean() for t in np.unique([*high, *low]) if (low > t).mean() <= rate.fpr
        ]
        assert rate.tpr == max(reached)
        assert rate.low <= rate.tpr <= rate.high


def test_intervals_hold_at_their_confidence():
    rng, shift, trials = np.random.default_rng(0), 0.7, 250
    auc, tpr = norm.cdf(shift / np.sqrt(2)), norm.sf(norm.isf(0.1) - shift)
    inside = np.zeros(2)
    for _ in range(trials):
        result = evaluate_scores(
            rng.standard_normal(150) + shift, rng.standard_normal(4000), fprs=(0.1,)
        )
        inside += [
            result.auc_low <= auc <= result.auc_high,
            result.rates[0].low <= tpr <= result.rates[0].high,
        ]
    # 95 % intervals, less four standard errors; the threshold of the second is estimated, from many
    # non-members.
    assert (inside / trials > 0.95 - 4 * np.sqrt(0.95 * 0.05 / trials)).all()
    assert inside[0] / trials < 0.999  # and the intervals are not so wide that they say nothing


def test_perfect_separation_is_not_certain():
    result = evaluate_scores(np.arange(30.0) + 100, np.arange(20.0))
    assert (result.auc, result.auc_high, result.accuracy) == (1.0, 1.0, 1.0)
    assert 0.8 < result.auc_low < 0.9


def test_few_others_resolve_no_small_rate():
    rate = evaluate_scores(np.ones(100), np.zeros(100), fprs=(0.001,)).rates[0]
    assert rate.tpr == 1.0
    assert rate.fpr_high > 0.03


def test_clopper_pearson_known_answers():
    # Figures of the audit literature: upper limits for no success in 10,000 and 20,000 trials.
    assert clopper_pearson(0, 10_000)[1] == pytest.approx(3.6882e-4, rel=1e-4)
    assert clopper_pearson(0, 20_000)[1] == pytest.approx(1.8443e-4, rel=1e-4)
    assert clopper_pearson(7, 7) == (pytest.approx(0.5904, abs=1e-4), 1.0)


@pytest.mark.parametrize(
    ("members", "others", "options", "message"),
    [
        ([1.0], [0.0, 1.0], {}, "at least 2"),
        ([1.0, np.nan], [0.0, 1.0], {}, "NaN"),
        ([1.0, 2.0], [0.0, 1.0], {"fprs": (0.0,)}, "(0, 1)"),
    ],
)
def test_refuses(members, others, options, message):
    with pytest.raises(ConfigError) as caught:
        evaluate_scores(np.array(members), np.array(others), **options)
    assert message in str(caught.value)
