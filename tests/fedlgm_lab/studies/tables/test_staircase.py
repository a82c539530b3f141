"""Staircase noise: the paper's Table II, and the closed form of its error."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlgm.mechanisms import inid
from fedlgm_lab.studies.tables.profiles import expected_error
from fedlgm_lab.studies.tables.staircase import best_gamma, expected_l1

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


@pytest.mark.parametrize(("epsilon", "gamma", "staircase", "iid", "best"), TABLE_TWO)
def test_table_two(epsilon, gamma, staircase, iid, best):
    profile = [0.85, 0.15]
    assert best_gamma(epsilon) == pytest.approx(gamma, abs=5e-5)
    assert expected_l1(epsilon, best_gamma(epsilon)) == pytest.approx(
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
    best = expected_l1(epsilon, best_gamma(epsilon))
    assert best <= expected_l1(epsilon, gamma) * (1 + 1e-12)


@pytest.mark.parametrize("epsilon", [1e-8, 1e-3, 0.9999999, 1.0, 50, 700])
def test_best_gamma_at_the_ends_and_the_seam(epsilon):
    gamma = best_gamma(epsilon)
    if epsilon < 1e-2:
        assert gamma == pytest.approx(1 - (3 - math.sqrt(3)) / 6, abs=1e-3)
    if abs(epsilon - 1) < 1e-3:
        assert gamma == pytest.approx(0.66708356, abs=1e-7)
    if epsilon > 10:
        assert gamma == pytest.approx((2 * math.exp(-epsilon)) ** (1 / 3), rel=1e-6)


@settings(max_examples=30)
@given(st.floats(0.2, 4), gammas)
def test_the_error_is_that_of_a_density_that_falls_once_in_every_step(epsilon, gamma):
    steps = np.arange(math.ceil(45 / epsilon))
    edges = np.unique(np.concatenate((steps, steps + gamma, [steps[-1] + 1])))
    low, high = edges[:-1], edges[1:]
    step = np.floor((low + high) / 2)
    level = np.exp(-epsilon * (step + ((low + high) / 2 - step >= gamma)))
    mass = level * 2 * (high**2 - low**2)
    radius = level * 4 * (high**3 - low**3) / 3  # the area element of the l1 ball is 4 r dr
    assert radius.sum() / mass.sum() == pytest.approx(expected_l1(epsilon, gamma), rel=1e-9)
