"""Water-filling: which part of an update the flat bound keeps. What the bound guarantees does not
depend on it."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedlgm import mechanisms
from fedlgm.aggregation import BoundedSum, DeviceSum, bound_update, bounded_sum
from fedlgm.errors import ConfigError
from fedlgm.planning.facts import RunFacts, Sampling
from fedlgm.planning.layers import SAFETY, LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.transcript import Transcript

SIZES = {"a": 1, "b": 5, "c": 5000, "d": 40}
LAYERS = LayerTable.from_sizes(SIZES)
FACTS = RunFacts(1.5, Sampling("poisson", 100, 0.1))


def plan_of(name: str, layers: LayerTable = LAYERS, bound: float = 1.0) -> ReleasePlan:
    mechanism = mechanisms.get(name, bound=bound)
    return mechanism.plan(mechanism.table(layers), FACTS, Transcript(0, ()))


def of_norms(norms: list[float], seed: int = 0) -> Tensor:
    """A random update whose layers have these norms."""
    parts = LAYERS.split(torch.randn(LAYERS.size, generator=torch.Generator().manual_seed(seed)))
    return torch.cat([part * (norm / part.norm()) for part, norm in zip(parts, norms, strict=True)])


def norms_of(vector: Tensor) -> np.ndarray:
    return np.array([float(part.double().norm()) for part in LAYERS.split(vector)])


NORMS = st.lists(st.floats(-6, 12).map(lambda power: 10.0**power), min_size=4, max_size=4)


@given(norms=NORMS, seed=st.integers(0, 99), bound=st.floats(1e-6, 1e6))
def test_no_contribution_exceeds_the_bound_and_large_ones_use_it_whole(norms, seed, bound):
    update = of_norms(norms, seed)
    kept = bound_update(update, plan_of("water-filling", bound=bound))
    assert float(kept.norm()) <= bound
    if float(update.double().norm()) > 1.001 * bound:
        assert float(kept.norm()) == pytest.approx(bound, rel=1e-4)


@given(norms=NORMS, seed=st.integers(0, 99))
def test_layers_above_one_common_level_are_cut_to_it_and_no_others(norms, seed):
    update = of_norms(norms, seed)
    before, after = norms_of(update), norms_of(bound_update(update, plan_of("water-filling")))
    cut = after < before * (1 - 1e-4)
    if cut.any():
        level = after[cut].max()
        assert after[cut] == pytest.approx(np.full(cut.sum(), level), rel=2e-4)
        assert (after[~cut] <= level * (1 + 2e-4)).all()
    assert after[~cut] == pytest.approx(before[~cut], rel=2e-4)


def test_an_update_within_the_bound_keeps_its_bits():
    update = of_norms([0.1, 0.5, 0.3, 0.2])
    assert torch.equal(bound_update(update, plan_of("water-filling")).float(), update)


@given(norms=st.lists(st.floats(0.51, 1e6), min_size=4, max_size=4))
def test_layers_that_are_all_large_are_cut_as_by_uniform(norms):
    update = of_norms(norms)
    one, other = (bound_update(update, plan_of(name)) for name in ("water-filling", "uniform"))
    assert torch.allclose(one, other, rtol=1e-4, atol=0)


@given(norm=st.floats(1e-3, 1e6))
def test_layers_of_equal_norm_are_cut_as_by_flat_clipping(norm):
    update = of_norms([norm] * 4)
    one, other = (bound_update(update, plan_of(name)) for name in ("water-filling", "gaussian"))
    assert torch.allclose(one, other, rtol=1e-4, atol=0)


def test_it_is_neither_flat_nor_uniform_in_between():
    """The tests above can tell the rules apart: flat clipping cuts the small layers, `uniform`
    leaves bound unused."""
    update, names = of_norms([0.1, 8.0, 8.0, 0.1]), ("water-filling", "gaussian", "uniform")
    filled, flat, uniform = (norms_of(bound_update(update, plan_of(name))) for name in names)
    assert filled == pytest.approx([0.1, 0.7, 0.7, 0.1], rel=1e-3)
    assert flat == pytest.approx([0.0088, 0.707, 0.707, 0.0088], rel=1e-2)
    assert uniform == pytest.approx([0.1, 0.5, 0.5, 0.1], rel=1e-3)


@pytest.mark.parametrize("wrong", [lambda update, *_: update, lambda update, *_: 1e9 * update])
def test_the_bound_holds_whatever_the_levelling_does(monkeypatch, wrong):
    monkeypatch.setattr(bounded_sum, "cut_row_to_level", wrong)
    update = of_norms([0.1, 8.0, 8.0, 0.1])
    kept = bound_update(update, plan_of("water-filling"))
    assert float(kept.norm()) == pytest.approx(SAFETY, rel=1e-6)
    assert not np.allclose(
        norms_of(kept), [0.1, 0.7, 0.7, 0.1], rtol=1e-3
    )  # and its absence is seen


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 3e38])
def test_what_is_not_finite_counts_as_nothing(value):
    update = of_norms([1.0, 1.0, 1.0, 1.0])
    update[1:3] = value  # finite numbers whose squares overflow have no norm either
    for total in (
        BoundedSum.empty(plan_of("water-filling")),
        DeviceSum(plan_of("water-filling"), torch.device("cpu")),
    ):
        total.add(update[None])
        assert int(total.discarded) == 1
        assert not total.total.any()


@given(norms=NORMS)
def test_a_device_levels_as_the_cpu_does(norms):
    rows = torch.stack([of_norms(norms, seed) for seed in range(3)])
    plan = plan_of("water-filling")
    one, other = BoundedSum.empty(plan), DeviceSum(plan, torch.device("cpu"))
    one.add(rows)
    other.add(rows)
    assert torch.allclose(one.total, other.total.double(), rtol=1e-4, atol=1e-5)


def test_a_huge_layer_hides_no_small_ones():
    """The energy of the small layers must not be lost beside a norm of 1e9, in float64 or
    float32."""
    update, plan = of_norms([0.5, 0.6, 1e9, 0.1]), plan_of("water-filling")
    for total in (BoundedSum.empty(plan), DeviceSum(plan, torch.device("cpu"))):
        total.add(update)
        assert norms_of(total.total) == pytest.approx([0.5, 0.6, math.sqrt(0.38), 0.1], rel=1e-3)


def test_rows_are_levelled_one_by_one():
    rows, plan = (
        torch.stack([of_norms([3.0, 0.1, 2.0, 9.0], seed) for seed in range(3)]),
        plan_of("water-filling"),
    )
    together, apart = BoundedSum.empty(plan), BoundedSum.empty(plan)
    together.add(rows)
    for row in rows:
        apart.add(row)
    assert torch.equal(together.total, apart.total)


def test_updates_are_not_changed():
    update = of_norms([3.0, 0.1, 2.0, 9.0])
    kept = update.clone()
    bound_update(update, plan_of("water-filling"))
    assert torch.equal(update, kept)


class TestPlan:
    def test_it_costs_what_flat_clipping_costs(self):
        assert plan_of("water-filling").event == plan_of("gaussian").event

    def test_a_model_of_one_layer_has_the_flat_plan(self):
        one = LayerTable.from_sizes({"a": 7})
        assert plan_of("water-filling", one).to_json() == plan_of("gaussian", one).to_json()

    def test_plans_without_it_do_not_mention_it(self):
        assert "fills" not in json.loads(plan_of("gaussian").to_json())

    def test_it_is_part_of_a_plan(self):
        plan = plan_of("water-filling")
        assert plan.equals(plan_of("water-filling"))
        assert not plan.equals(plan_of("gaussian"))

    def test_it_travels_with_the_sizes_of_its_parts(self):
        """A client that merges its own layers, however it groups them, levels the parts that the
        plan names."""
        plan, other = (
            plan_of("water-filling"),
            LayerTable.from_sizes({"x": LAYERS.size}).as_single_layer(),
        )
        read = ReleasePlan.from_json(other, plan.to_json())
        assert read.fills == (1, 5, 5000, 40)
        update = of_norms([0.1, 8.0, 8.0, 0.1])
        assert torch.equal(bound_update(update, read), bound_update(update, plan))

    @pytest.mark.parametrize(
        "fills", [(1, 5), (1, 5, 5000, 41), (5046, 0), (-1, 5047), (1.0, 5045.0), ("5046",), 3]
    )
    def test_parts_that_are_not_the_update_are_refused(self, fills):
        raw = json.loads(plan_of("water-filling").to_json()) | {"fills": fills}
        with pytest.raises(ConfigError):
            ReleasePlan.from_json(LAYERS.as_single_layer(), json.dumps(raw))

    def test_a_trainer_that_bounds_is_refused(self):
        with pytest.raises(ConfigError, match="raw updates of clients and one l2 bound"):
            replace(plan_of("water-filling"), bounded_by="trainer")

    def test_several_bounds_are_refused(self):
        with pytest.raises(ConfigError, match="raw updates of clients and one l2 bound"):
            replace(plan_of("uniform"), fills=tuple(SIZES.values()))
