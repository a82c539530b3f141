"""Integers for secure sums: the bound holds exactly, words add up, and what does not fit is
refused."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, special

from fedlgm import Guarantee, LayerTable, ReleasePlan, RunFacts, Sampling
from fedlgm.aggregation import bound_update
from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.noise import integer
from fedlgm.noise.integer import (
    IntegerGrid,
    bits_needed,
    centred,
    round_within,
    words,
    wrap_probability,
)
from fedlgm.noise.integer_noise import LAWS
from fedlgm.planning.distributed_trust import Shares
from fedlgm.planning.queries import NoisyQuery, get
from fedlgm.privacy import composed_epsilon, epsilon

SIZES = {"a": 40, "b": 5, "c": 1}


def facts_of(
    nodes=10, threshold=7, colluders=1, multiplier=2.0, noise="discrete-gaussian", **more
) -> RunFacts:
    sampling = Sampling("fixed", nodes, 1.0)
    shares = Shares(threshold, colluders, noise)
    return RunFacts(
        multiplier, sampling, "replace-one", "distributed", accountant="rdp", shares=shares, **more
    )


def plan_of(clip=(1.0, 2.0, 0.5), sigma=(6.0, 9.0, 3.0), facts=None, **more) -> ReleasePlan:
    layers, proven = LayerTable.from_sizes(SIZES), Guarantee("proven", "an example")
    return ReleasePlan(layers, list(clip), list(sigma), facts or facts_of(), proven, **more)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=60),
    st.integers(1, 5000),
    st.integers(0, 2**32 - 1),
)
def test_rounded_values_never_exceed_the_bound(values, bound, seed):
    values = np.array(values)
    norm = np.linalg.norm(values)
    if norm > bound:
        values = values * (bound / norm)
    rounded = round_within(values, bound, np.random.default_rng(seed))
    assert (
        sum(int(x) ** 2 for x in rounded) <= bound**2
    )  # in Python's integers, which do not overflow
    assert rounded.shape == values.shape


def test_rounding_on_a_fine_grid_is_without_bias():
    values = np.random.default_rng(1).uniform(-3, 3, 50)
    mean = np.mean(
        [round_within(values, 10_000, np.random.default_rng(s)) for s in range(4000)], axis=0
    )
    assert np.abs(mean - values).max() < 5 * 0.5 / math.sqrt(4000)


def test_a_coarse_grid_shortens_what_it_must():
    """Where coordinates are half a unit long nearly every draw is longer than the bound."""
    values, rounded = np.full(400, 0.5), []
    for seed in range(20):
        rounded.append(round_within(values, 10, np.random.default_rng(seed)))
        assert int(np.dot(rounded[-1], rounded[-1])) <= 100
    assert np.mean(rounded) < 0.25


@pytest.mark.parametrize("queries", [False, True])
def test_sums_without_noise_come_back(queries):
    asked = (NoisyQuery(get("below-bound", [40, 5, 1]), 8.0),) if queries else ()
    plan = plan_of(queries=asked)
    grid = IntegerGrid.of(plan)
    exact = [
        bound_update(torch.randn(46, generator=torch.Generator().manual_seed(s)) * 3, plan)
        for s in range(10)
    ]
    total = np.zeros(plan.size, dtype=np.uint32)
    for client, one in enumerate(exact):
        total += words(grid.round_to_grid(one.numpy(), np.random.default_rng(client)))
    assert grid.to_model_units(total) == pytest.approx(sum(exact).numpy(), abs=1e-4)


@pytest.mark.parametrize("noise", LAWS)
def test_the_noise_of_the_honest_nodes_is_the_plans(noise):
    plan = plan_of(facts=facts_of(10, 7, 1, noise=noise))
    grid = IntegerGrid.of(plan)
    none = np.zeros(plan.size)
    draws = np.array(
        [
            sum(
                grid.share(none, np.random.default_rng(1), np.random.default_rng([s, i]))
                for i in range(6)
            )
            for s in range(150)
        ]
    )
    opened = np.array([grid.to_model_units(words(row)) for row in draws])
    for start, end, sigma in ((0, 40, 6.0), (40, 45, 9.0), (45, 46, 3.0)):
        count = 150 * (end - start)
        assert opened[:, start:end].std() == pytest.approx(sigma, rel=5 / math.sqrt(2 * count))
    assert grid.variance * 6 >= (grid.units * plan.effective_multiplier) ** 2


def test_a_layer_without_a_bound_or_noise_carries_nothing():
    plan = plan_of(clip=(1.0, 0.0, 0.5), sigma=(6.0, 0.0, 3.0))
    contribution = bound_update(torch.ones(46), plan).numpy()
    rounded = IntegerGrid.of(plan).round_to_grid(contribution, np.random.default_rng(1))
    assert (rounded[40:45] == 0).all()
    assert (rounded[:40] != 0).all()


def test_a_contribution_beyond_the_plans_bounds_is_refused():
    plan = plan_of()
    for wrong in (np.full(46, 10.0), np.full(46, np.nan)):
        with pytest.raises(PrivacyError, match="exceeds the bounds"):
            IntegerGrid.of(plan).round_to_grid(wrong, np.random.default_rng(1))


def law_of_one(noise: str, variance: int, reach: int) -> np.ndarray:
    """Probabilities of one node's noise on [-reach, reach]."""
    values = np.arange(-reach, reach + 1)
    weights = (
        special.ive(np.abs(values), variance)
        if noise == "skellam"
        else np.exp(-(values**2) / (2 * variance))
    )
    return weights / weights.sum()


@pytest.mark.parametrize("noise", LAWS)
@pytest.mark.parametrize(("counted", "holds"), [(6, True), (10, False)], ids=["t - m", "n instead"])
def test_the_exact_delta_of_a_coarse_grid_is_below_the_stated_one(
    monkeypatch, noise, counted, holds
):
    """The hockey-stick divergence of the honest nodes' noise, moved by twice the bound, by
    summation over all integers.

    The attacker knows everybody else's contribution and all noise of the colluders. Noise in n
    shares instead of t - m is found out.
    """
    monkeypatch.setattr(integer, "_FINEST", 100)
    multiplier, delta = 4.0, 1e-5
    plan = plan_of(
        clip=(1.0, 0.0, 0.0),
        sigma=(multiplier, 0.0, 0.0),
        facts=facts_of(10, 7, 1, multiplier, noise),
    )
    grid = IntegerGrid.of(plan)
    variance = (
        grid.variance if holds else grid.noise.variance((grid.units * multiplier) ** 2, counted)
    )
    one = law_of_one(noise, variance, 10 * math.isqrt(variance))
    total = one
    for _ in range(5):
        total = np.convolve(total, one)
    moved = 2 * grid.units
    here, there = np.pad(total, (0, moved)), np.pad(total, (moved, 0))
    stated = composed_epsilon([(plan.event, 1)], delta, "rdp")
    gaussian = epsilon(multiplier, delta, steps=1, relation="replace-one")
    exact = np.maximum(0.0, here - math.exp(stated) * there).sum()
    assert (exact <= delta) == holds
    if holds:  # nor is more added than asked for
        assert np.maximum(0.0, here - math.exp(gaussian) * there).sum() == pytest.approx(
            delta, rel=0.02
        )


@pytest.mark.parametrize("length", [1 + 1e-6, 2.0**31, math.inf])
def test_rounding_refuses_what_is_longer_than_the_bound(length):
    """A very long vector would pass an integer check that overflows."""
    with pytest.raises(PrivacyError, match="exceeds the bounds"):
        round_within(np.array([length * 100, 0.0]), 100, np.random.default_rng(1))


def test_words_wrap_and_come_back():
    values = np.random.default_rng(1).integers(-(2**31), 2**31, 1000)
    assert (centred(words(values)) == values).all()
    assert (centred(words(values * 8)) == centred(words(values) * np.uint32(8))).all()


@pytest.mark.parametrize(
    ("deviation", "coordinates", "answer"),
    [
        (5000, 1, 5.6166e-11),
        (6000, 1, 4.7257e-8),
        (5000, 10**6, 5.6165e-5),
        (6000, 10**6, 4.6158e-2),
    ],
)
def test_known_answers_of_wrapping(deviation, coordinates, answer):
    assert float(f"{wrap_probability(16, deviation, coordinates):.4e}") == answer


@pytest.mark.parametrize(
    ("coordinates", "units", "asked", "bits", "rotated"),
    [
        (26_010, 600, 100, 17, 14), (10**6, 4000, 100, 20, 16), (10**6, 4000, 1000, 23, 17),
        (11_200_000, 12_000, 1000, 25, 18),
    ],
)  # fmt: skip
def test_known_answers_of_the_bits_that_a_sum_needs(coordinates, units, asked, bits, rotated):
    assert bits_needed(asked, units, float(units), coordinates) == bits  # noise multiplier 1
    # After a random rotation, which nodes do not make: a contribution's length is spread over all
    # coordinates.
    spread = math.hypot(asked * units / math.sqrt(coordinates), math.sqrt(asked / 4), units)
    assert math.ceil(math.log2(2 * integer._deviations(coordinates) * spread + 1)) == rotated


def inflated(units: float, coordinates: int) -> float:
    """Bound after conditional rounding with beta = exp(-1/2), after Kairouz, Liu and Steinke
    2021."""
    root = math.sqrt(coordinates)
    return min(units + root, math.sqrt(units**2 + coordinates / 4 + units + root / 2))


@pytest.mark.parametrize(
    ("coordinates", "answers"),
    [(26_010, (597.7, 2080.8)), (10**6, (3555.2, 11441.4)), (11_181_642, (11821.4, 37638.4))],
)
def test_known_answers_of_the_grid_at_which_rounding_costs_a_percent_or_a_thousandth(
    coordinates, answers
):
    """Published rounding lengthens the bound by that much. Here the bound holds, and vectors get
    shorter by no more."""
    for answer, more in zip(answers, (0.01, 0.001), strict=True):
        found = optimize.brentq(
            lambda units, more=more: inflated(units, coordinates) / units - 1 - more, 1, 1e6
        )
        assert round(found, 1) == answer
        if coordinates < 10**6:
            values = np.random.default_rng(1).standard_normal(coordinates)
            units = math.ceil(found)
            rounded = round_within(
                values * (units / np.linalg.norm(values)), units, np.random.default_rng(2)
            )
            assert (1 - more) * units <= np.linalg.norm(rounded) <= units
    assert IntegerGrid.of(plan_of()).units > answers[1]


@pytest.mark.parametrize(
    ("asked", "threshold", "colluders", "answer"),
    [(100, 80, 0, 1.1180), (100, 67, 0, 1.2217), (100, 67, 10, 1.3245), (10, 7, 1, 1.2910)],
)
def test_known_answers_of_noise_over_a_trusted_servers(asked, threshold, colluders, answer):
    grid = IntegerGrid.of(plan_of(facts=facts_of(asked, threshold, colluders)))
    assert round(grid.noise_over_central, 4) == answer
    assert grid.wrap_probability < 1e-9


def test_grids_fit_for_any_number_of_nodes():
    for nodes in (2, 30, 1000, 10**4):
        for scale in (0.1, 1.0, 100.0):
            plan = plan_of(
                sigma=(6.0 * scale, 9.0 * scale, 3.0 * scale), facts=facts_of(nodes, nodes, 0)
            )
            grid = IntegerGrid.of(plan)
            assert grid.wrap_probability <= 1.001e-9
            assert grid.units <= min(2**24, 2**30 // nodes)


@pytest.mark.parametrize(("multiplier", "holds"), [(1e4, True), (1e5, False), (1e8, False)])
def test_a_grid_too_coarse_for_its_coordinates_is_refused(multiplier, holds):
    """A node would round for minutes, the longer the larger its update is, and send next to nothing
    of it."""
    layers, facts = LayerTable.from_sizes({"a": 10**6}), facts_of(multiplier=multiplier)

    def grid():
        return IntegerGrid.of(
            ReleasePlan(layers, [1.0], [multiplier], facts, Guarantee("proven", "an example"))
        )

    if holds:
        assert grid().units >= 4 * 10**3
        return
    with pytest.raises(
        ConfigError, match=r"too coarse for 1000000 numbers.*raise privacy\.epsilon"
    ):
        grid()


def test_a_modulus_that_wraps_and_noise_below_the_grid_are_refused():
    with pytest.raises(
        ConfigError, match="fewer than 4, or the sum of 100000000 nodes would not fit into 32 bits"
    ):
        plan_of(facts=facts_of(10**8, 10**8, 0))
