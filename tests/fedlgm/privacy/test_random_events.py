"""Attack rates of 350 random events lie between exact or optimistic rates and 1.02 times them."""

from __future__ import annotations

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy.stats import norm

from fedlgm import privacy
from fedlgm.errors import ConfigError
from fedlgm.privacy import attack_rates

SHARES = np.array([0.1, 0.01, 0.001])
EPSILONS = np.arange(0, 20, 0.004)


def optimistic(noise: float, rate: float, steps: int) -> tuple[np.ndarray, float]:
    """Lower bounds on true positives and the advantage, by losses that are rounded down."""
    loss = privacy_loss_distribution.from_gaussian_mechanism(
        noise,
        pessimistic_estimate=False,
        # all steps together lose little by rounding: in epsilon, and relative to the whole loss
        value_discretization_interval=0.01 * min(1 / steps, rate / noise / steps**0.5),
        sampling_prob=rate,
        use_connect_dots=False,
    ).self_compose(steps)
    deltas = np.array(loss.get_delta_for_epsilon(EPSILONS))
    growth = np.exp(EPSILONS)
    rates = [
        min((deltas + growth * share).min(), (1 - (1 - deltas - share) / growth).min())
        for share in SHARES
    ]
    return np.array(rates), float(deltas[0])


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_sampled_releases(part: int) -> None:
    """100 events: a fault that shows in one of thirty is found with probability 0.96."""
    rng = np.random.default_rng(part)
    for _ in range(25):
        noise, rate = np.exp(rng.uniform(np.log(0.6), np.log(3))), rng.uniform(0.02, 0.6)
        steps = int(np.exp(rng.uniform(0, np.log(64))))
        bound = attack_rates(noise, sampling_rate=rate, steps=steps)
        low, advantage = optimistic(noise, rate, steps)
        high = np.array([bound.tpr(share) for share in SHARES])
        event = f"noise {noise}, rate {rate}, steps {steps}: {high / low}"
        assert (high >= low * (1 - 1e-5)).all(), event
        assert (high <= 1.02 * low).all(), event
        assert advantage * (1 - 1e-5) <= bound.advantage <= 1.02 * advantage, event


def test_releases_without_sampling() -> None:
    rng = np.random.default_rng(10)
    for _ in range(250):
        mu, steps = np.exp(rng.uniform(np.log(0.05), np.log(6))), int(rng.integers(1, 300))
        bound = attack_rates(np.sqrt(steps) / mu, steps=steps)
        high = np.array([bound.tpr(share) for share in SHARES])
        exact = norm.cdf(norm.ppf(SHARES) + mu)
        assert (high >= exact * (1 - 1e-9)).all()
        assert (high <= 1.02 * exact).all()
        exact = 2 * norm.cdf(mu / 2) - 1
        assert exact * (1 - 1e-9) <= bound.advantage <= 1.02 * exact


def test_an_event_of_an_unknown_type_is_refused_like_other_arguments():
    for function in (
        privacy.events.encode,
        lambda event: privacy.composed_epsilon([(event, 1)], 1e-5),
    ):
        with pytest.raises(ConfigError, match="an event must be of dp_accounting"):
            function(object())
