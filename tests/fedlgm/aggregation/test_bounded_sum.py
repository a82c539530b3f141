"""Contributions never exceed their bounds, and bounds always add up to S."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlgm.clipping import (
    QUANTILE_SIDE,
    BoundedSum,
    bound_update,
    eq_clip,
    med_clip,
    med_clip_published,
    next_quantile_bounds,
    quantile_side_clip,
    released_norms,
)
from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.layers import LayerTable
from fedlgm.plan import ReleasePlan, RunFacts, Sampling, Side
from fedlgm.privacy.guarantee import Guarantee

SIZES = {"a": 1, "b": 5, "c": 5000}


def plan(clip, sigma=None, family="gaussian", sizes=SIZES, sides=(), relation="add-remove", trust="central"):
    layers = LayerTable.from_sizes(sizes)
    sigma = np.ones(len(layers)) if sigma is None else sigma
    budget = RunFacts(1.0, Sampling("poisson", 10, 0.5), relation, trust)
    guarantee = Guarantee("proven", "test", relation, trust)
    return ReleasePlan(layers, clip, sigma, budget, guarantee, family=family, sides=sides)


@pytest.mark.parametrize(("family", "p"), [("gaussian", 2), ("laplace", 1)])
@given(seed=st.integers(0, 2**32 - 1), magnitude=st.floats(-20, 12), bound=st.floats(1e-6, 1e6))
def test_every_layer_stays_within_its_bound(family, p, seed, magnitude, bound):
    made = plan(bound * np.array([1.0, 0.5, 2.0]), family=family)
    generator = torch.Generator().manual_seed(seed)
    update = torch.randn(made.layers.size, generator=generator) * 10.0**magnitude
    bounded = bound_update(update, made)
    for part, raw, s in zip(made.layers.split(bounded), made.layers.split(update), made.clip, strict=True):
        norm = torch.linalg.vector_norm(part.double(), p).item()
        assert norm <= s
        if torch.linalg.vector_norm(raw.double(), p).item() < s * (1 - 2e-5):
            assert torch.equal(part, raw)
        elif p == 2 or len(part) < 100:
            assert norm == pytest.approx(s, rel=1e-4)


@pytest.mark.parametrize(("family", "p"), [("gaussian", 2), ("laplace", 1)])
def test_rounding_never_carries_a_layer_above_its_bound(family, p):
    """One large value first, then many that a running sum in float32 would lose."""
    made = plan([1.0, 1.0, 0.5], family=family, sizes={"a": 1, "b": 1, "c": 4096})
    for exponent in np.arange(8.0, 16.0, 0.1):
        update = torch.full((made.layers.size,), 2.0**-exponent)
        update[2] = 1.0
        bounded = made.layers.split(bound_update(update, made))[2]
        assert 0.5 * (1 - 3e-5) < torch.linalg.vector_norm(bounded.double(), p).item() <= 0.5


def test_bounds_below_what_float32_can_measure_are_refused():
    """The squares of 1e-23 vanish in float32: their norm would pass for 0."""
    with pytest.raises(PrivacyError, match="at least 2\\^-36"):
        bound_update(torch.full((5006,), 1e-23), plan([1e-30, 1e-30, 1e-30]))
    assert not bound_update(torch.full((5006,), 1e-23), plan([0.0, 0.0, 0.0])).any()


def test_three_four_five():
    bounded = bound_update(torch.tensor([3.0, 4.0, 0.3]), plan([1.0, 1.0], [1.0, 1.0], sizes={"a": 2, "b": 1}))
    assert bounded.tolist() == pytest.approx([0.6, 0.8, 0.3], rel=2e-5)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 3e38])  # the last one's square overflows
def test_what_is_not_finite_counts_as_nothing(value):
    made = plan([1.0, 1.0, 1.0], sides=(Side(QUANTILE_SIDE, 3, quantile_side_clip(LayerTable.from_sizes(SIZES)), 1.0),))
    update = torch.ones(made.layers.size)
    update[3] = value
    block = BoundedSum.empty(made)
    block.add(update)
    assert (block.count, block.discarded) == (1, 1)
    assert not block.total.any()


def test_layers_that_are_not_released_are_not_in_the_upload():
    made = plan([1.0, 1.0, 1.0], [1.0, math.inf, 1.0])
    one, other = torch.ones(made.layers.size), torch.ones(made.layers.size)
    other[1:6] = 77.0
    assert made.size == 5001
    assert torch.equal(bound_update(one, made), bound_update(other, made))


def test_zero_updates_stay_zero():
    made = plan([1.0, 1.0, 1.0])
    assert not bound_update(torch.zeros(made.layers.size), made).any()


def test_unbounded_layers_pass_unchanged():
    layers = LayerTable.from_sizes({"a": 3})
    budget = RunFacts(0.0, Sampling("poisson", 10, 0.5))
    made = ReleasePlan(layers, np.array([math.inf]), np.zeros(1), budget, Guarantee("none", "test"))
    assert bound_update(torch.tensor([1e18, 2.0, 3.0]), made).tolist() == pytest.approx([1e18, 2.0, 3.0])


@given(st.floats(1e-3, 1e3), st.lists(st.floats(0, 1e6), min_size=1, max_size=9), st.floats(0, 1))
def test_bounds_add_up_to_the_total(bound, norms, floor):
    norms = np.array(norms)
    for s in (eq_clip(bound, len(norms)), med_clip(bound, norms, floor)):
        assert math.sqrt(np.sum(s**2)) == pytest.approx(bound)
    if floor > 0.01 and norms.any():
        assert (
            med_clip(bound, norms, floor).min()
            >= floor * bound / math.sqrt(len(norms)) / math.sqrt(1 + floor**2) * 0.999
        )


@pytest.mark.parametrize("trust", ["central", "local"])
def test_norms_of_a_release_lose_their_noise(trust):
    layers = LayerTable.from_sizes({"a": 100_000, "b": 100_000, "c": 10})
    relation = "replace-one" if trust == "local" else "add-remove"
    budget = RunFacts(1.0, Sampling("poisson", 100, 0.5), relation, trust)
    made = ReleasePlan(layers, np.ones(3), np.array([2.0, 2.0, math.inf]), budget, Guarantee("proven", "test"))
    generator = torch.Generator().manual_seed(0)
    signal = torch.cat([torch.full((100_000,), 0.05), torch.zeros(100_000)])
    # Under local trust each of the fifty expected clients adds its own.
    spread = 2.0 * math.sqrt(50) if trust == "local" else 2.0
    noise = torch.randn(200_000, generator=generator) * spread / 50
    assert made.noise_norms[:2] == pytest.approx([float(part.norm()) for part in noise.split(100_000)], rel=0.01)
    mean = signal + noise
    found = released_norms(mean, made)
    if trust == "local":
        assert found[0] == pytest.approx(0.05 * math.sqrt(100_000), rel=0.06)
        assert found[1] < 12  # its noise alone has norm 89
        return
    assert found[0] == pytest.approx(0.05 * math.sqrt(100_000), rel=0.01)
    assert found[1] < 2.0  # its noise alone has norm 12.6
    assert found[2] == 0


def test_published_medclip_has_the_papers_shape():
    norms = np.array([[1.0, 1.0], [3.0, 1.0], [2.0, 1.0]])
    assert med_clip_published(0.5, norms).tolist() == pytest.approx([1 / 3, 1 / 6])
    assert med_clip_published(0.5, np.zeros((3, 2))).tolist() == pytest.approx(eq_clip(0.5, 2).tolist())


def test_quantile_bits_are_within_their_own_bound():
    sizes = {"a": 4, "b": 4, "c": 4}
    layers = LayerTable.from_sizes(sizes)
    side = Side(QUANTILE_SIDE, 3, quantile_side_clip(layers), 5.0)
    made = plan([1.0, 1.0, 1.0], sizes=sizes, sides=(side,))
    update = torch.cat([torch.full((4,), 0.1), torch.full((4,), 9.0), torch.zeros(4)])
    bits = bound_update(update, made)[12:]
    assert bits.tolist() == [0.5, -0.5, 0.5]
    assert float(bits.norm()) <= side.clip * (1 + 1e-12)


def test_a_side_has_the_size_of_what_a_client_contributes():
    made = plan([1.0, 1.0, 1.0], sides=(Side(QUANTILE_SIDE, 1000, 1.0, 1.0),))
    with pytest.raises(PrivacyError, match="1000 values of 'below-bound', a client has 3"):
        bound_update(torch.ones(made.layers.size), made)


def test_unknown_sides_are_refused():
    made = plan([1.0, 1.0, 1.0], sides=(Side("surprise", 1, 1.0, 1.0),))
    with pytest.raises(ConfigError, match="below-bound"):
        bound_update(torch.ones(made.layers.size), made)


def test_quantile_bounds_keep_the_total():
    moved = next_quantile_bounds(np.array([0.6, 0.8]), np.array([2.0, -1.0]), 1.0, 0.5, 0.2)
    assert math.sqrt(np.sum(moved**2)) == pytest.approx(1.0)
    # Shares outside [0, 1] are noise: the first bound shrinks, the second grows, both by at most one step.
    assert moved[0] / moved[1] == pytest.approx(0.75 * math.exp(-0.2))
    # Half of the clients below: too many for the lower quartile, too few for the upper one.
    for target, step in ((0.25, -0.05), (0.75, 0.05)):
        one = next_quantile_bounds(np.array([0.6, 0.8]), np.array([0.5, target]), 1.0, target, 0.2)
        assert one[0] / one[1] == pytest.approx(0.75 * math.exp(step))
