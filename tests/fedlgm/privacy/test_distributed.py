"""Integer noise in shares: known answers, the exact law beside its bound, and refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import special

from fedlgm.errors import ConfigError
from fedlgm.noise import integer_noise
from fedlgm.privacy import (
    composed_epsilon,
    discrete_gaussian_tau,
    distributed_epsilon,
    gaussian_epsilon,
)
from fedlgm.privacy.events import WholeOrdersDpEvent

SETTING = {"parties": 100, "sensitivity": 60.0, "dimension": 26_010, "delta": 1e-5}


@pytest.mark.parametrize(
    ("deviation", "tau"), [(0.5, 9.701158), (1, 5.477887e-4), (2, 7.157180e-17), (3, 2.649521e-38)]
)
def test_distance_of_a_sum_from_one_discrete_gaussian(deviation, tau):
    assert discrete_gaussian_tau(deviation, 100) == pytest.approx(tau, rel=1e-6)


@pytest.mark.parametrize(
    ("deviation", "parties", "exact"),
    [(0.5, 4, 0.22416), (0.7, 10, 4.5636e-3), (1.0, 100, 1.0624e-6)],
)
def test_the_exact_log_ratio_lies_below_the_distance(deviation, parties, exact):
    reach = int(np.ceil(12 * deviation * np.sqrt(parties)))
    grid = np.arange(-reach, reach + 1)

    def law(variance: float, support: np.ndarray) -> np.ndarray:
        weights = np.exp(-(support**2) / (2 * variance))
        return weights / weights.sum()

    size = 2 * reach + 1
    own = law(deviation**2, grid)
    total = own
    for _ in range(parties - 1):
        total = np.convolve(total, own)
        middle = len(total) // 2
        total = total[middle - reach : middle + reach + 1]
    assert len(total) == size
    near = np.abs(grid) <= 4 * deviation * np.sqrt(parties)
    ratio = np.abs(np.log(total[near] / law(parties * deviation**2, grid)[near])).max()
    assert ratio == pytest.approx(exact, rel=1e-3)
    assert ratio < discrete_gaussian_tau(deviation, parties)


@pytest.mark.parametrize(
    ("noise", "deviation", "rounds", "epsilon"),
    [
        ("discrete-gaussian", 6, 1, 4.7285),
        ("discrete-gaussian", 6, 100, 96.1163),
        ("discrete-gaussian", 3, 1, 10.7255),
        ("discrete-gaussian", 3, 100, 294.8613),
        ("skellam", 60, 1, 4.7538),
        ("skellam", 60, 100, 110.1891),
        ("skellam", 30, 1, 10.8139),
        ("skellam", 30, 100, 411.1266),
    ],
)
def test_epsilon_against_the_server(noise, deviation, rounds, epsilon):
    found = distributed_epsilon(noise, deviation=deviation, rounds=rounds, **SETTING)
    assert found == pytest.approx(epsilon, abs=5e-5)
    each = deviation if noise == "discrete-gaussian" else deviation / 10
    assert found > gaussian_epsilon(10 * each / 60 / rounds**0.5, 1e-5)


@pytest.mark.parametrize("variance", [4, 64, 2048])
def test_skellam_divergences_lie_below_the_bound(variance):
    """Exact divergences of one coordinate are summed here. The corollary is proven for whole
    orders, so a fractional order has the bound of the next whole order."""
    orders = np.array([1.1, 1.5, 2.0, 2.5, 3.3, 5.5, 8.7])
    for moved in {1, 2, 5, math.isqrt(variance), 2 * math.isqrt(variance)}:
        x = np.arange(-45 * math.isqrt(variance) - 400, 45 * math.isqrt(variance) + 400)
        with np.errstate(divide="ignore"):
            one, other = (np.log(special.ive(np.abs(x - shift), variance)) for shift in (moved, 0))
        seen = np.isfinite(one) & np.isfinite(other)
        terms = orders[:, None] * one[seen] + (1 - orders)[:, None] * other[seen]
        exact = special.logsumexp(terms, axis=1) / (orders - 1)
        law = {
            "deviation": math.sqrt(variance),
            "parties": 1,
            "l2": moved,
            "l1": moved,
            "dimension": 1,
        }
        bound = integer_noise.get("skellam").divergences(orders, **law)
        whole = integer_noise.get("skellam").divergences(np.ceil(orders), **law)
        assert (bound == whole).all()
        assert (exact <= bound).all()
        assert exact[2] > bound[2] * (1 - 4 / math.sqrt(variance)), (
            "the bound is near enough to be tested"
        )


@pytest.mark.parametrize(("rounds", "epsilon"), [(1, 4.7285), (100, 96.1163)])
def test_on_a_fine_grid_both_laws_cost_the_same_at_whole_orders(rounds, epsilon):
    fine = SETTING | {"sensitivity": 2000.0, "rounds": rounds}
    gaussian = distributed_epsilon("discrete-gaussian", deviation=200, **fine)
    assert gaussian == pytest.approx(epsilon, abs=5e-5)
    skellam = distributed_epsilon("skellam", deviation=2000, **fine)
    whole = composed_epsilon([(WholeOrdersDpEvent(0.5), rounds)], 1e-5, "rdp")
    assert skellam == pytest.approx(whole, rel=1e-6)
    assert skellam > gaussian


def test_more_noise_and_more_honest_parties_cost_less():
    costs = [
        distributed_epsilon("discrete-gaussian", deviation=d, rounds=10, **SETTING)
        for d in (3, 4, 6)
    ]
    assert costs == sorted(costs, reverse=True)
    fewer = distributed_epsilon(
        "discrete-gaussian", deviation=6, rounds=10, **SETTING | {"parties": 50}
    )
    assert fewer > costs[-1]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"noise": "laplace"}, "unknown noise 'laplace'; known: discrete-gaussian, skellam"),
        ({"deviation": 0.0}, "deviation must be finite and positive"),
        ({"parties": 0}, "parties must be a whole number of at least 1"),
        ({"sensitivity": -1.0}, "sensitivity must be finite and positive"),
        ({"dimension": 2.5}, "dimension must be a whole number"),
        ({"rounds": 0}, "rounds must be a whole number"),
        ({"delta": 1.0}, "delta must lie in"),
    ],
)
def test_arguments_outside_their_range_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        distributed_epsilon(**{"noise": "skellam", "deviation": 6.0, "rounds": 1} | SETTING | wrong)
