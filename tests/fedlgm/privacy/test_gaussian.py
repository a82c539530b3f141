"""(epsilon, delta) <-> mu conversions of one Gaussian release."""

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.integrate import quad
from scipy.stats import norm

from fedlgm.errors import ConfigError
from fedlgm.privacy.gaussian import gaussian_delta, gaussian_epsilon, gaussian_mu


@pytest.mark.parametrize(
    ("epsilon", "delta", "mu"),
    [
        (0.5, 1e-6, 0.12410614903),
        (1, 1e-6, 0.23670438),
        (2, 1e-6, 0.44833474),
        (5, 1e-6, 1.02035715),
        (1, 1e-5, 0.26805112),
        (3, 1e-5, 0.71911744),
    ],
)
def test_known_mu(epsilon, delta, mu):
    assert gaussian_mu(epsilon, delta) == pytest.approx(mu, rel=2e-8)


def test_known_noise_multipliers():
    assert 1 / gaussian_mu(1, 1e-5) == pytest.approx(3.73063163, rel=1e-8)
    assert 1 / gaussian_mu(3, 1e-5) == pytest.approx(1.39059346, rel=1e-8)


@pytest.mark.parametrize(("sigma", "steps", "epsilon"), [(5, 10, 2.5943834), (20, 100, 1.9930914)])
def test_known_composed_epsilons(sigma, steps, epsilon):
    assert gaussian_epsilon(math.sqrt(steps) / sigma, 1e-5) == pytest.approx(epsilon, rel=1e-7)


@settings(max_examples=40)
@given(st.floats(0.05, 6), st.floats(0, 8))
def test_delta_is_the_hockey_stick_divergence(mu, epsilon):
    def excess(t):
        return max(0.0, norm.pdf(t - mu) - math.exp(epsilon) * norm.pdf(t))

    start = epsilon / mu + mu / 2  # where the privacy loss exceeds epsilon
    near, far = start + 5 + mu, start + 40
    area = quad(excess, start, near, epsabs=1e-14)[0] + quad(excess, near, far, epsabs=1e-14)[0]
    assert gaussian_delta(mu, epsilon) == pytest.approx(area, rel=1e-6, abs=1e-13)


@given(st.floats(1e-3, 500), st.floats(-300, -0.05))
def test_round_trip(epsilon, log10_delta):
    delta = 10**log10_delta
    mu = gaussian_mu(epsilon, delta)
    assert gaussian_delta(mu, epsilon) == pytest.approx(delta, rel=1e-8)
    assert gaussian_delta(mu, epsilon) <= delta * (1 + 1e-9)  # the private side, up to rounding
    assert gaussian_delta(mu * 1.001, epsilon) > delta
    assert gaussian_epsilon(mu, delta) == pytest.approx(epsilon, rel=1e-7)


@given(st.floats(0.01, 50), st.floats(0.01, 50), st.floats(1e-12, 0.4))
@example(0.01, 0.010000000000000002, 0.0625)
def test_mu_grows_with_both_budgets(first, second, delta):
    """Up to the rounding of a root: those of neighbouring floats may be out of order."""
    low, high = sorted((first, second))
    least = gaussian_mu(low, delta) * (1 - 1e-9)
    assert least <= gaussian_mu(high, delta)
    assert least <= gaussian_mu(low, 2 * delta)


def test_extreme_budgets_stay_finite():
    for epsilon, delta in [
        (700, 1e-12),
        (300, 1e-300),
        (1e-6, 1e-5),
        (50, 1e-320),
        (1, 0.999),
        (1e-9, 0.7),
    ]:
        mu = gaussian_mu(epsilon, delta)
        assert math.isfinite(mu)
        assert mu > 0
        assert math.log(gaussian_delta(mu, epsilon)) == pytest.approx(math.log(delta), rel=1e-6)


def test_limits():
    assert gaussian_delta(0, 1) == 0
    assert gaussian_delta(math.inf, 1) == 1
    assert gaussian_epsilon(0, 1e-5) == 0
    assert gaussian_epsilon(math.inf, 1e-5) == math.inf
    assert gaussian_epsilon(0.01, 0.5) == 0  # total variation distance 0.004
    assert gaussian_delta(1, 0) == pytest.approx(2 * norm.cdf(0.5) - 1)


@pytest.mark.parametrize("epsilon", [0, -1, math.nan, math.inf])
def test_bad_epsilon(epsilon):
    with pytest.raises(ConfigError, match="epsilon must be finite"):
        gaussian_mu(epsilon, 1e-5)


@pytest.mark.parametrize("delta", [0, 1, -0.1, 2, math.nan])
def test_bad_delta(delta):
    with pytest.raises(ConfigError, match="delta must lie in"):
        gaussian_mu(1, delta)
    with pytest.raises(ConfigError, match="delta must lie in"):
        gaussian_epsilon(1, delta)


@pytest.mark.parametrize("mu", [-1, math.nan])
def test_bad_mu(mu):
    with pytest.raises(ConfigError, match="mu must be"):
        gaussian_delta(mu, 1)
    with pytest.raises(ConfigError, match="mu must be"):
        gaussian_epsilon(mu, 1e-5)


def test_delta_takes_epsilon_zero_but_not_less():
    with pytest.raises(ConfigError, match="epsilon must be finite and at least 0"):
        gaussian_delta(1, -0.1)
