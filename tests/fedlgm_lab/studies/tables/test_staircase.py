"""Staircase noise: the paper's Table II, densities, samplers."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from fedlgm.errors import ConfigError
from fedlgm.mechanisms import inid
from fedlgm.noise.keys import KeyRing, Purpose
from fedlgm_lab.studies.tables.profiles import expected_error
from fedlgm_lab.studies.tables.staircase import Staircase2D

# epsilon, gamma, staircase, i.i.d. Laplace, i.n.i.d. Laplace for the profile (0.85, 0.15)
TABLE_TWO = [
    (0.5, 0.7301, 3.9962, 4, 3.4283),
    (1.0, 0.6671, 1.9862, 2, 1.7141),
    (1.5, 0.6020, 1.3050, 1.3333, 1.1428),
    (2.0, 0.5370, 0.9546, 1, 0.8571),
    (2.5, 0.4743, 0.7366, 0.8, 0.6857),
    (3.0, 0.4154, 0.5856, 0.6667, 0.5714),
]
epsilons = st.floats(0.05, 6)
gammas = st.floats(0, 1)


def rng(*path):
    return KeyRing.from_seed(11).numpy_generator(Purpose.NOISE, *path)


@pytest.mark.parametrize(("epsilon", "gamma", "staircase", "iid", "best"), TABLE_TWO)
def test_table_two(epsilon, gamma, staircase, iid, best):
    noise, profile = Staircase2D.optimal(epsilon), [0.85, 0.15]
    assert noise.gamma == pytest.approx(gamma, abs=5e-5)
    assert noise.expected_l1() == pytest.approx(
        staircase, abs=1e-4
    )  # the paper truncates some last digits
    assert expected_error(
        "laplace", inid.noise_scales("laplace", "iid", profile, epsilon), p=1
    ) == pytest.approx(iid, abs=5e-5)
    ours = expected_error("laplace", inid.laplace_inid(profile, epsilon, p=1), p=1)
    assert ours == pytest.approx(best, abs=1e-4)
    assert ours == pytest.approx((math.sqrt(0.85) + math.sqrt(0.15)) ** 2 / epsilon)


@given(epsilons, gammas)
def test_no_other_gamma_does_better(epsilon, gamma):
    best = Staircase2D.optimal(epsilon).expected_l1()
    assert best <= Staircase2D(epsilon, 1.0, gamma).expected_l1() * (1 + 1e-12)


@pytest.mark.parametrize("epsilon", [1e-8, 1e-3, 0.9999999, 1.0, 50, 700])
def test_best_gamma_at_the_ends_and_the_seam(epsilon):
    gamma = Staircase2D.optimal(epsilon).gamma
    if epsilon < 1e-2:
        assert gamma == pytest.approx(1 - (3 - math.sqrt(3)) / 6, abs=1e-3)
    if abs(epsilon - 1) < 1e-3:
        assert gamma == pytest.approx(0.66708356, abs=1e-7)
    if epsilon > 10:
        assert gamma == pytest.approx((2 * math.exp(-epsilon)) ** (1 / 3), rel=1e-6)


@settings(max_examples=30)
@given(st.floats(0.2, 4), gammas, st.floats(0.2, 5))
def test_density_integrates_to_one_and_gives_the_closed_form_error(epsilon, gamma, sensitivity):
    steps = np.arange(math.ceil(45 / epsilon))
    edges = np.unique(np.concatenate((steps, steps + gamma, [steps[-1] + 1]))) * sensitivity
    low, high = edges[:-1], edges[1:]
    middle = (low + high) / 2
    plane = Staircase2D(epsilon, sensitivity, gamma)
    level = plane.density(np.stack((0.3 * middle, -0.7 * middle), axis=1))
    mass = level * 2 * (high**2 - low**2)
    assert mass.sum() == pytest.approx(1, rel=1e-9)
    radius = level * 4 * (high**3 - low**3) / 3  # the area element of the l1 ball is 4 r dr
    assert radius.sum() == pytest.approx(plane.expected_l1(), rel=1e-9)


@given(epsilons, gammas, st.lists(st.floats(-20, 20), min_size=4, max_size=4))
def test_density_ratio_is_bounded(epsilon, gamma, numbers):
    x, shift = np.array(numbers[:2]), np.array(numbers[2:])
    shift = (
        shift * (1 - 1e-9) / max(1.0, np.abs(shift).sum())
    )  # rounding must not carry it over the sensitivity
    plane = Staircase2D(epsilon, 1.0, gamma)
    assert plane.density(x) <= math.exp(epsilon) * plane.density(x + shift) * (1 + 1e-9)


def test_the_ratio_bound_is_attained_and_fails_beyond_the_sensitivity():
    plane = Staircase2D.optimal(1.0)
    assert plane.density([0.0, 0.0]) / plane.density([0.999, 0.0]) == pytest.approx(math.e)
    assert plane.density([0.0, 0.0]) / plane.density([1.9, 0.0]) > math.e * 1.5


def cumulative(noise, grid):
    """Distribution function of the l1 norm, from the density alone."""
    edges = np.linspace(0, grid, 200_001)
    middle = (edges[1:] + edges[:-1]) / 2
    points = np.stack((middle, np.zeros_like(middle)), axis=1)
    mass = noise.density(points) * np.diff(2 * edges**2)
    return lambda x: np.interp(x, edges, np.concatenate(([0], np.cumsum(mass))))


@pytest.mark.parametrize("epsilon", [0.5, 2.0])
@pytest.mark.parametrize("gamma", [None, 0.2])
def test_samplers_follow_the_density(epsilon, gamma):
    size = 40_000
    noise = Staircase2D.optimal(epsilon, 1.5) if gamma is None else Staircase2D(epsilon, 1.5, gamma)
    norms = np.abs(noise.sample(rng(2), size)).sum(axis=1)
    law = cumulative(noise, 90 / epsilon)
    assert stats.kstest(norms, law).pvalue > 1e-3
    assert stats.kstest(1.03 * norms, law).pvalue < 1e-3  # a 3 % error of scale would be noticed
    spread = norms.std() / math.sqrt(size)
    assert abs(norms.mean() - noise.expected_l1()) < 4.5 * spread


def test_samplers_are_symmetric_and_the_direction_is_uniform():
    points = Staircase2D.optimal(1.0).sample(rng(4), 40_000)
    quadrant = (points[:, 0] > 0) * 2 + (points[:, 1] > 0)
    assert stats.chisquare(np.bincount(quadrant, minlength=4)).pvalue > 1e-3
    share = np.abs(points[:, 0]) / np.abs(points).sum(axis=1)
    assert stats.kstest(share, "uniform").pvalue > 1e-3
    assert stats.kstest(share**1.05, "uniform").pvalue < 1e-3


def test_samples_depend_on_the_stream_only():
    noise = Staircase2D.optimal(1.0)
    assert np.array_equal(noise.sample(rng(5), 10), noise.sample(rng(5), 10))
    assert not np.array_equal(noise.sample(rng(5), 10), noise.sample(rng(6), 10))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 1.0, 0.5), "epsilon"),
        ((701, 1.0, 0.5), "epsilon"),
        ((math.nan, 1.0, 0.5), "epsilon"),
        ((1.0, 0.0, 0.5), "sensitivity"),
        ((1.0, math.inf, 0.5), "sensitivity"),
        ((1.0, 1.0, -0.1), "gamma"),
        ((1.0, 1.0, 1.1), "gamma"),
    ],
    ids=str,
)
def test_bad_parameters(arguments, message):
    with pytest.raises(ConfigError, match=message):
        Staircase2D(*arguments)
    if message != "gamma":
        with pytest.raises(ConfigError, match=message):
            Staircase2D.optimal(*arguments[:2])


def test_bad_points():
    with pytest.raises(ConfigError, match=r"shape \[\.\.\., 2\]"):
        Staircase2D.optimal(1.0).density([1.0, 2.0, 3.0])
