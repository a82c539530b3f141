"""The laws of integer noise, beside samplers that are slightly wrong."""

from __future__ import annotations

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
from scipy import special, stats

from fedlgm.errors import ConfigError
from fedlgm.noise import integer_noise
from fedlgm.noise.integer_noise import exact, skellam
from fedlgm.noise.integer_noise.exact import happens
from fedlgm.noise.integer_noise.gaussian import discrete_gaussian

VARIANCE, DRAWS = 36, 120_000


def probabilities(law: str, values: np.ndarray, variance: float) -> np.ndarray:
    """Of the law, up to a factor."""
    if law == "skellam":
        return special.ive(np.abs(values), variance)
    return np.exp(-(values**2) / (2 * variance))


def p_value(
    law: str, draws: np.ndarray, variance: float = VARIANCE, deviations: float = 4
) -> float:
    """Of a chi-square test of the whole law, tails pooled beyond so many standard deviations."""
    reach = math.ceil(deviations * variance**0.5)
    wide = np.arange(-40 * reach, 40 * reach + 1)
    weights = probabilities(law, wide, variance)
    weights /= weights.sum()
    bins = np.clip(wide, -reach, reach) + reach
    expected = np.bincount(bins, weights) * len(draws)
    observed = np.bincount(np.clip(draws, -reach, reach) + reach, minlength=2 * reach + 1)
    return float(stats.chisquare(observed, expected).pvalue)


@pytest.fixture(params=list(integer_noise.LAWS))
def law(request):
    return integer_noise.get(request.param)


def test_draws_follow_the_law(law):
    draws = law.draw(VARIANCE, DRAWS, np.random.default_rng(1))
    assert p_value(law.name, draws) > 1e-3
    assert draws.var() == pytest.approx(VARIANCE, rel=5 * math.sqrt(2 / DRAWS))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda law, rng: law.draw(VARIANCE + 2, DRAWS, rng),
        lambda law, rng: (
            np.abs(law.draw(VARIANCE, DRAWS, rng)) * rng.choice([-1, 1], DRAWS, p=[0.48, 0.52])
        ),
        lambda law, rng: np.floor(6 * rng.standard_normal(DRAWS)).astype(np.int64),
        lambda law, rng: np.where(rng.random(DRAWS) < 0.01, 0, law.draw(VARIANCE, DRAWS, rng)),
        lambda law, rng: rng.poisson(18.3, DRAWS) - rng.poisson(17.7, DRAWS),
    ],
    ids=["more variance", "skewed", "rounded down", "more zeros", "unequal halves"],
)
def test_the_test_sees_laws_that_are_slightly_wrong(law, wrong):
    assert p_value(law.name, wrong(law, np.random.default_rng(2))) < 1e-3


def test_the_test_tells_the_laws_apart():
    """At a variance of 4 their kurtosis differs by a quarter."""
    draws = {
        name: one.draw(4, 100_000, np.random.default_rng(2))
        for name, one in integer_noise.LAWS.items()
    }
    for name, found in draws.items():
        assert [p_value(other, found, 4) > 1e-3 for other in draws] == [
            other == name for other in draws
        ]


@pytest.mark.parametrize("variance", [2, 16, 2**44 + 6])
def test_few_and_many_units_of_noise(law, variance):
    draws = law.draw(variance, 40_000, np.random.default_rng(3))
    kurtosis = 1 / variance if law.name == "skellam" else 0.0
    assert draws.var() == pytest.approx(variance, rel=5 * math.sqrt((2 + kurtosis) / 40_000)), (
        variance
    )
    assert abs(draws.mean()) < 5 * math.sqrt(variance / 40_000)
    assert stats.kurtosis(draws) == pytest.approx(kurtosis, abs=0.2)


def test_every_acceptance_may_be_decided_exactly(law, monkeypatch):
    """As if float64 could never tell: all comparisons take the exact path, and the law stays."""
    monkeypatch.setattr(exact, "MARGIN", 2.0)
    monkeypatch.setattr(skellam, "_MARGIN", 2.0)
    assert p_value(law.name, law.draw(VARIANCE, 600, np.random.default_rng(4)), deviations=2) > 1e-3


def test_ties_take_more_digits():
    """A number that agrees with exp(-1) in its first 53 bits is decided by further ones, evenly as
    they fall."""
    leading = int(Decimal(-1).exp() * 2**53)

    class Rng:
        def __init__(self, word: int) -> None:
            self.word = word

        def integers(self, *_: int, dtype: type) -> int:
            return self.word

    assert exact.is_below_exp(leading, lambda _: Fraction(1), Rng(0)) is True
    assert exact.is_below_exp(leading, lambda _: Fraction(1), Rng(2**64 - 1)) is False
    assert exact.is_below_exp(0, lambda _: Fraction(10**6), Rng(2**64 - 1)) is False


def test_events_have_their_probability():
    for exponent in (Fraction(0), Fraction(1, 10**9), Fraction(3, 2)):
        share = happens(
            np.full(100_000, float(exponent)), lambda *_, e=exponent: e, np.random.default_rng(5)
        ).mean()
        chance = math.exp(-exponent)
        assert abs(share - chance) <= 5 * math.sqrt(chance * (1 - chance) / 100_000) + 1e-8


@pytest.mark.parametrize("mean", [1, 8, 18, 5000, 2**20, 2**42, 2**61])
def test_poisson_acceptances_are_probabilities_and_float64_errs_less_than_the_margin(mean):
    scale = math.isqrt(mean) + 1
    x = np.unique(
        np.concatenate(
            [np.arange(-300, 300), np.linspace(-38 * scale, 40 * scale, 41).astype(np.int64)]
        )
    )
    x = x[x >= -mean]
    above = mean / (2 * scale**2) + 1 / (2 * scale) + mean / (4 * scale**3) + 1 / (8 * mean)
    fast = skellam._log_ratios(mean, x) - np.abs(x) / scale + above
    assert fast.min() >= 0
    for value, g in list(zip(x, fast, strict=True))[::23]:
        exactly = float(skellam._log_ratio(mean, int(value), 30)) - abs(value) / scale + above
        assert abs(math.exp(-exactly) - math.exp(-g)) < skellam._MARGIN / 64


def test_a_stream_gives_the_same_draws_again(law):
    one, other = (law.draw(50, 1000, np.random.default_rng(7)) for _ in range(2))
    assert (one == other).all()


@pytest.mark.parametrize("wanted", [16.0, 1e3 + 0.5, 2.0**45])
@pytest.mark.parametrize("parties", [1, 7, 1000])
def test_shares_add_up_to_what_costs_no_more_than_gaussian_noise(law, wanted, parties):
    total = parties * law.variance(wanted, parties)
    assert wanted <= total <= wanted + 4 + 2 * parties
    if law.name == "skellam":
        orders, l2 = (
            np.arange(2.0, 300.0),
            1.0,
        )  # of all integer vectors the shortest has the most l1 for its l2
        found = law.divergences(
            orders, deviation=total**0.5, parties=parties, l2=l2, l1=l2**2, dimension=1
        )
        assert (found <= orders * l2**2 / (2 * wanted)).all()


def test_variances_that_cannot_be_drawn_and_unknown_laws_are_refused(law):
    with pytest.raises(ConfigError, match=r"must (lie|be an even number) in"):
        law.draw(0, 3, np.random.default_rng(1))
    with pytest.raises(ConfigError, match="even number"):
        skellam.skellam(7, 3, np.random.default_rng(1))
    with pytest.raises(
        ConfigError, match="unknown noise 'laplace'; known: discrete-gaussian, skellam"
    ):
        integer_noise.get("laplace")


def test_the_discrete_gaussians_draws_stay():
    """Noise of earlier runs can be drawn again."""
    assert discrete_gaussian(10**9, 4, np.random.default_rng(1)).tolist() == [
        -47808,
        1102,
        36181,
        -7881,
    ]
