"""The law of discrete Gaussian draws, beside samplers that are slightly wrong."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from scipy import stats

from fedlgm import integer_noise
from fedlgm.errors import ConfigError
from fedlgm.integer_noise import discrete_gaussian, happens

VARIANCE, DRAWS = 36, 300_000


def p_value(draws: np.ndarray, variance: float = VARIANCE) -> float:
    """Of a chi-square test of the whole law, tails pooled."""
    reach = math.ceil(4 * variance**0.5)
    wide = np.arange(-20 * reach, 20 * reach + 1)
    weights = np.exp(-(wide**2) / (2 * variance))
    weights /= weights.sum()
    bins = np.clip(wide, -reach, reach) + reach
    expected = np.bincount(bins, weights) * len(draws)
    observed = np.bincount(np.clip(draws, -reach, reach) + reach, minlength=2 * reach + 1)
    return float(stats.chisquare(observed, expected).pvalue)


def test_the_law_is_the_discrete_gaussians():
    draws = discrete_gaussian(VARIANCE, DRAWS, np.random.default_rng(1))
    assert p_value(draws) > 1e-3
    assert draws.var() == pytest.approx(VARIANCE, rel=5 * math.sqrt(2 / DRAWS))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda rng: discrete_gaussian(VARIANCE + 1, DRAWS, rng),
        lambda rng: np.abs(discrete_gaussian(VARIANCE, DRAWS, rng)) * rng.choice([-1, 1], DRAWS, p=[0.49, 0.51]),
        lambda rng: np.floor(6 * rng.standard_normal(DRAWS)).astype(np.int64),
        lambda rng: np.where(rng.random(DRAWS) < 0.01, 0, discrete_gaussian(VARIANCE, DRAWS, rng)),
    ],
    ids=["more variance", "skewed", "rounded down", "more zeros"],
)
def test_the_test_sees_laws_that_are_slightly_wrong(wrong):
    assert p_value(wrong(np.random.default_rng(2))) < 1e-3


def test_few_and_many_units_of_noise():
    for variance in (1, 16, 2**44 + 5):
        draws = discrete_gaussian(variance, 40_000, np.random.default_rng(3))
        assert draws.var() == pytest.approx(variance, rel=5 * math.sqrt(2 / 40_000)), variance
        assert abs(draws.mean()) < 5 * math.sqrt(variance / 40_000)
        assert stats.kurtosis(draws) == pytest.approx(0.0, abs=0.15)


def test_every_acceptance_may_be_decided_exactly(monkeypatch):
    """As if float64 could never tell: all comparisons take the exact path, and the law stays."""
    monkeypatch.setattr(integer_noise, "_MARGIN", 2.0)
    exact = discrete_gaussian(VARIANCE, 1500, np.random.default_rng(4))
    assert p_value(exact) > 1e-3


def test_ties_take_more_digits():
    """A number that agrees with exp(-1) in its first 53 bits is decided by further ones, evenly as they fall."""
    leading = int(Decimal(-1).exp() * 2**53)

    class Rng:
        def __init__(self, word: int) -> None:
            self.word = word

        def integers(self, *_: int, dtype: type) -> int:
            return self.word

    assert integer_noise._decided(leading, Fraction(1), Rng(0)) is True
    assert integer_noise._decided(leading, Fraction(1), Rng(2**64 - 1)) is False
    assert integer_noise._decided(0, Fraction(10**6), Rng(2**64 - 1)) is False


def test_events_have_their_probability():
    for exponent in (Fraction(0), Fraction(1, 10**9), Fraction(3, 2)):
        share = happens(np.full(100_000, float(exponent)), lambda _, e=exponent: e, np.random.default_rng(5)).mean()
        chance = math.exp(-exponent)
        assert abs(share - chance) <= 5 * math.sqrt(chance * (1 - chance) / 100_000) + 1e-8


def test_a_stream_gives_the_same_draws_again():
    one, other = (discrete_gaussian(50, 1000, np.random.default_rng(7)) for _ in range(2))
    assert (one == other).all()


def test_a_variance_that_cannot_be_drawn_is_refused():
    with pytest.raises(ConfigError, match="must lie in"):
        discrete_gaussian(0, 3, np.random.default_rng(1))
