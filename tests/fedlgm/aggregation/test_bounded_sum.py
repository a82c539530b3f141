"""Contributions never exceed their bounds, and whoever bounds them is who the plan says."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlgm.aggregation import BoundedSum, bound_update
from fedlgm.aggregation.contributions import BoundedUpdates
from fedlgm.errors import PrivacyError
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import NoisyQuery, ReleasePlan, RunFacts, Sampling, UnprotectedPlan
from fedlgm.planning.queries import BelowBound
from fedlgm.privacy.guarantee import Guarantee

SIZES = {"a": 1, "b": 5, "c": 5000}


def plan(clip, sigma=None, family="gaussian", sizes=SIZES, **more):
    layers = LayerTable.from_sizes(sizes)
    sigma = np.ones(len(layers)) if sigma is None else sigma
    facts = RunFacts(1.0, Sampling("poisson", 10, 0.5))
    return ReleasePlan(
        layers, clip, sigma, facts, Guarantee("proven", "test"), family=family, **more
    )


@pytest.mark.parametrize(("family", "p"), [("gaussian", 2), ("laplace", 1)])
@given(seed=st.integers(0, 2**32 - 1), magnitude=st.floats(-20, 12), bound=st.floats(1e-6, 1e6))
def test_every_layer_stays_within_its_bound(family, p, seed, magnitude, bound):
    made = plan(bound * np.array([1.0, 0.5, 2.0]), family=family)
    generator = torch.Generator().manual_seed(seed)
    update = torch.randn(made.layers.size, generator=generator) * 10.0**magnitude
    bounded = bound_update(update, made)
    for part, raw, s in zip(
        made.layers.split(bounded), made.layers.split(update), made.clip, strict=True
    ):
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
    bounded = bound_update(
        torch.tensor([3.0, 4.0, 0.3]), plan([1.0, 1.0], [1.0, 1.0], sizes={"a": 2, "b": 1})
    )
    assert bounded.tolist() == pytest.approx([0.6, 0.8, 0.3], rel=2e-5)


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), -float("inf"), 3e38]
)  # the last one's square overflows
def test_what_is_not_finite_counts_as_nothing(value):
    made = plan([1.0, 1.0, 1.0], queries=(NoisyQuery(BelowBound(tuple(SIZES.values())), 1.0),))
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
    facts = RunFacts(0.0, Sampling("poisson", 10, 0.5))
    made = UnprotectedPlan(
        layers, np.array([math.inf]), np.zeros(1), facts, Guarantee("none", "test")
    )
    assert bound_update(torch.tensor([1e18, 2.0, 3.0]), made).tolist() == pytest.approx(
        [1e18, 2.0, 3.0]
    )


class TestBoundedByTheTrainer:
    """A label cannot switch bounding off: the trainer says in numbers what it kept to, and the sum
    compares."""

    MADE = plan([1.0, 2.0], sizes={"a": 1, "b": 2}, bounded_by="trainer")

    def test_what_it_bounded_is_added_as_it_is(self):
        total = BoundedSum.empty(self.MADE)
        total.add(
            BoundedUpdates(
                torch.tensor([[3.0, 4.0, 5.0], [1.0, math.nan, 1.0], [1.0, 1.0, 1.0]]), (1.0, 1.5)
            )
        )
        assert total.total.tolist() == [4.0, 5.0, 6.0]
        assert (total.count, total.discarded) == (3, 1)

    def test_finite_numbers_count_although_their_sum_overflows(self):
        total, most = BoundedSum.empty(self.MADE), torch.finfo(torch.float32).max
        for row in (
            [most, most, most],
            [math.inf, 0.0, 0.0],
            [math.inf, -math.inf, 0.0],
            [most, most, math.nan],
        ):
            total.add(BoundedUpdates(torch.tensor([row]), (1.0, 2.0)))
        assert total.total.tolist() == [most, most, most]
        assert (total.count, total.discarded) == (4, 3)

    def test_layers_that_are_not_released_are_left_out(self):
        made = plan(
            [1.0, 2.0],
            np.array([1.0, np.inf]),
            sizes={"a": 1, "b": 2},
            bounded_by="trainer",
            released=[True, False],
        )
        total = BoundedSum.empty(made)
        total.add(BoundedUpdates(torch.tensor([[3.0, 4.0, 5.0]]), (1.0, 2.0)))
        assert total.total.tolist() == [3.0]

    def test_float64_stays_float64(self):
        total = BoundedSum.empty(self.MADE)
        total.add(
            BoundedUpdates(
                torch.tensor([[1 + 2.0**-40, 0.0, 0.0]], dtype=torch.float64), (1.0, 2.0)
            )
        )
        assert total.total[0] == 1 + 2.0**-40

    @pytest.mark.parametrize(
        "bounds", [(1.0, 2.1), (1.0,), (1.0, 2.0, 0.0), (1.0, math.inf), (1.0, math.nan)]
    )
    def test_bounds_that_are_not_the_plans_are_refused(self, bounds):
        with pytest.raises(PrivacyError, match="allows at most"):
            BoundedSum.empty(self.MADE).add(BoundedUpdates(torch.zeros(1, 3), bounds))

    def test_raw_updates_and_updates_that_nobody_asked_to_bound_are_refused(self):
        with pytest.raises(PrivacyError, match="raw updates"):
            BoundedSum.empty(self.MADE).add(torch.zeros(1, 3))
        clients = plan([1.0, 2.0], sizes={"a": 1, "b": 2})
        with pytest.raises(PrivacyError, match="has bounded single units"):
            BoundedSum.empty(clients).add(BoundedUpdates(torch.zeros(1, 3), (1.0, 2.0)))
