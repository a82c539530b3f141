"""Grids made at once, remembered moments and terms computed together change no bit of what
dp_accounting computes."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from dp_accounting.pld.common import compute_self_convolve_bounds
from dp_accounting.pld.pld_pmf import SparsePLDPmf
from dp_accounting.pld.privacy_loss_distribution import (
    PrivacyLossDistribution,
    from_gaussian_mechanism,
    from_laplace_mechanism,
    identity,
)
from dp_accounting.rdp.rdp_privacy_accountant import DEFAULT_RDP_ORDERS
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlgm.privacy.accountants import (
    PldAccountant,
    RenyiAccountant,
    quiet,
)
from fedlgm.privacy.accounting import composed_epsilon
from fedlgm.privacy.events import gaussian_event
from fedlgm.privacy.grid import least_epsilon, sampled_gaussian
from fedlgm.privacy.repetition import compose_with, repeatable


@pytest.mark.parametrize(
    ("multiplier", "rate", "interval"),
    [
        (0.9, 0.1, 1e-3),
        (5.0, 0.5, 1e-4),
        (0.3, 0.01, 1e-3),
        (1.5, 0.999, 1e-3),
        (0.06, 0.2, 1e-1),
        (1.0, 1e-7, 1e-4),
        # the last: a point of the grid at the limit of the losses
        (30.0, 1e-4, 1e-4),
        (0.7, 1 - math.exp(-1), 1e-3),
    ],
)
def test_a_grid_is_that_of_dp_accounting(multiplier: float, rate: float, interval: float) -> None:
    theirs = from_gaussian_mechanism(
        multiplier, sampling_prob=rate, value_discretization_interval=interval
    )
    ours = sampled_gaussian(multiplier, rate, interval)
    assert theirs._symmetric == ours._symmetric
    for side in ("_pmf_remove", "_pmf_add"):
        one, other = (getattr(made, side) for made in (theirs, ours))
        assert type(one) is type(other)
        np.testing.assert_equal(vars(one), vars(other))


@pytest.mark.parametrize(("multiplier", "rate"), [(0.9, 0.1), (5.0, 0.5), (1.5, 0.999)])
@pytest.mark.parametrize("truncation", [0.0, 1e-15, 1e-6])
def test_compositions_are_those_of_dp_accounting(
    multiplier: float, rate: float, truncation: float
) -> None:
    once = from_gaussian_mechanism(
        multiplier, sampling_prob=rate, value_discretization_interval=1e-3
    )
    often = repeatable(once)
    assert often._symmetric == once._symmetric
    for count in (1, 7, 40):
        theirs, ours = (one.self_compose(count, truncation) for one in (once, often))
        for side in ("_pmf_remove", "_pmf_add"):
            a, b = (dict(vars(getattr(made, side))) for made in (theirs, ours))
            assert a.keys() == b.keys()
            assert np.array_equal(a.pop("_probs"), b.pop("_probs"))
            assert a == b
        assert theirs.get_epsilon_for_delta(1e-5) == ours.get_epsilon_for_delta(1e-5)


@settings(max_examples=30)
@given(
    st.floats(0.3, 30.0),
    st.floats(1e-3, 0.999),
    st.integers(1, 500),
    st.one_of(st.sampled_from([0.0, 1.0]), st.floats(-30, -0.01).map(lambda power: 10**power)),
)
def test_epsilons_are_those_of_dp_accounting(
    multiplier: float, rate: float, count: int, delta: float
) -> None:
    """Also where delta is below the mass of infinite losses, or the epsilon is 0."""
    often = repeatable(sampled_gaussian(multiplier, rate, 1e-2)).self_compose(count)
    for pmf in (often._pmf_remove.to_dense_pmf(), often._pmf_add.to_dense_pmf()):
        assert least_epsilon(pmf, delta) == pmf.get_epsilon_for_delta(delta)


def test_epsilons_on_coarse_grids_and_of_large_losses_are_those_of_dp_accounting() -> None:
    for multiplier, interval in ((0.03, 0.1), (0.3, 5.0), (0.02, 1.0), (5.0, 1e-4)):
        once = sampled_gaussian(multiplier, 0.1, interval)
        for pmf in (once._pmf_remove.to_dense_pmf(), once._pmf_add.to_dense_pmf()):
            for delta in (1e-12, 1e-5, 0.01, 0.5, pmf._infinity_mass, pmf._infinity_mass * 1.5):
                assert least_epsilon(pmf, delta) == pmf.get_epsilon_for_delta(delta)


@pytest.mark.parametrize(("multiplier", "rate"), [(0.9, 0.1), (5.0, 0.5), (1.5, 0.999)])
def test_first_releases_are_composed_as_dp_accounting_does(multiplier: float, rate: float) -> None:
    nothing = identity(1e-3)
    once = sampled_gaussian(multiplier, rate, 1e-3)
    sparse = from_laplace_mechanism(1.0, value_discretization_interval=1e-3)
    # hardly anything: its probability is rounded to 1
    little = PrivacyLossDistribution(SparsePLDPmf({0: 1.0}, 1e-3, 1e-12, True))
    for before in (nothing, nothing.compose(sparse), once, little):
        for more in (repeatable(once).self_compose(7), once, sparse.self_compose(50)):
            theirs, ours = before.compose(more), compose_with(before, more)
            for side in ("_pmf_remove", "_pmf_add"):
                a, b = (getattr(made, side) for made in (theirs, ours))
                assert type(a) is type(b)
                np.testing.assert_equal(vars(a), vars(b))


@settings(max_examples=10)
@given(
    st.floats(0.3, 30.0),
    st.floats(1e-4, 0.999),
    st.integers(1, 5000),
    st.sampled_from([1e-15, 1e-10, 1e-6, 0.1]),
)
def test_the_tails_of_a_composition_are_those_of_dp_accounting(
    multiplier: float, rate: float, count: int, truncation: float
) -> None:
    once = repeatable(
        from_gaussian_mechanism(multiplier, sampling_prob=rate, value_discretization_interval=1e-3)
    )
    for pmf in (
        one for one in (once._pmf_remove, once._pmf_add) if hasattr(one, "_bounds")
    ):  # others are sparse
        assert pmf._bounds(count, truncation) == compute_self_convolve_bounds(
            pmf._probs, count, truncation
        )


def test_sparse_distributions_and_bad_counts_are_theirs() -> None:
    once = from_laplace_mechanism(1.0, value_discretization_interval=0.5)
    assert repeatable(once).self_compose(3).get_epsilon_for_delta(1e-5) == once.self_compose(
        3
    ).get_epsilon_for_delta(1e-5)
    for made in (
        once,
        repeatable(
            from_gaussian_mechanism(1.0, sampling_prob=0.1, value_discretization_interval=1e-3)
        ),
    ):
        with pytest.raises(ValueError, match="num_times"):
            made.self_compose(0)


def test_epsilons_of_a_run_grow_as_before() -> None:
    seen = [
        PldAccountant().compose(gaussian_event(1.0, 0.1), count).get_epsilon(1e-5)
        for count in (1, 5, 10)
    ]
    assert all(low < high for low, high in pairwise(seen))


@settings(max_examples=10)
@given(
    st.lists(
        st.tuples(st.floats(0.2, 50.0), st.floats(1e-4, 0.999), st.integers(1, 1000)),
        min_size=1,
        max_size=2,
    ),
    st.floats(-30, -0.01).map(lambda power: 10**power),
)
def test_the_best_of_all_orders_is_among_those_that_are_left(
    releases: list[tuple[float, float, int]], delta: float
) -> None:
    events = [(gaussian_event(multiplier, rate), count) for multiplier, rate, count in releases]
    few, every = RenyiAccountant(), RenyiAccountant()
    few.narrow(events, delta)
    with quiet():
        for event, count in events:
            few.compose(event, count)
            every.compose(event, count)
    found = few.get_epsilon(delta)
    assert found == every.get_epsilon(delta) or found == math.inf  # then all are tried
    assert composed_epsilon(events, delta, "rdp") == every.get_epsilon(delta)


@pytest.mark.parametrize(
    ("rate", "multiplier", "left"),
    # the third: several fractional orders do not converge; the last: no double holds 1 / z^2
    [
        (0.1, 1.0, [4.6]),
        (0.01, 8.0, [512.0]),
        (0.5, 0.9, [2.5]),
        (0.1, 1e-200, DEFAULT_RDP_ORDERS),
    ],
)
def test_few_orders_are_left(rate: float, multiplier: float, left: list[float]) -> None:
    accountant, event = RenyiAccountant(), gaussian_event(multiplier, rate)
    accountant.narrow([(event, 10)], 1e-5)
    assert accountant._orders.tolist() == left


def test_orders_are_left_as_they_are_for_other_releases() -> None:
    accountant = RenyiAccountant()
    accountant.narrow([(gaussian_event(1.0, 0.1), 10), (gaussian_event(1.0), 1)], 1e-5)
    assert accountant._orders.tolist() == DEFAULT_RDP_ORDERS
