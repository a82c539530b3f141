"""Sums bounded where the updates lie give what the CPU's sums give, and the same noise whichever way it is added."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from kernel_backends import BACKENDS, block, on

from fedlgm.aggregation import MOVEMENT_SIDE, QUANTILE_SIDE, BoundedSum
from fedlgm.aggregation.device_sum import DeviceSum
from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.keys import KeyRing
from fedlgm.layers import LayerTable
from fedlgm.plan import ReleasePlan, RunFacts, Sampling, Side
from fedlgm.privacy.guarantee import Guarantee
from fedlgm.release import add_released

LAYERS = LayerTable.from_sizes({"a": 1, "b": 30, "c": 70, "d": 5})
SIDES = (Side(QUANTILE_SIDE, 4, 1.0, 2.0), Side(MOVEMENT_SIDE, 4, 1.0, 3.0))


def plan(family="gaussian", skipped=(), sides=(), trust="central", unit="client", clip=(1.0, 4.0, math.inf, 0.5)):
    sigma = np.array([math.inf if name in skipped else 0.5 + i for i, name in enumerate(LAYERS.names)])
    relation = "replace-one" if trust == "local" else "add-remove"
    budget = RunFacts(1.0, Sampling("poisson", 10, 0.5), relation, trust)
    guarantee = Guarantee("none", "test", relation, trust, unit)
    return ReleasePlan(LAYERS, np.array(clip), sigma, budget, guarantee, family=family, sides=sides)


PLANS = {
    "all layers": plan(),
    "laplace": plan("laplace"),
    "two layers": plan(skipped=("b", "d")),
    "sides": plan(sides=SIDES, skipped=("a",)),
    "examples": plan(unit="example"),
    "nothing": plan(skipped=LAYERS.names),
}


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def updates() -> torch.Tensor:
    rows = block(6, LAYERS.size)
    rows[1, 40] = math.nan
    rows[2] *= 100
    rows[3] = 0
    rows[4, 0] = math.inf  # also where layer a is not released
    rows[5, 5] = 3e38  # its square overflows
    return rows


@pytest.mark.parametrize("name", PLANS)
def test_a_block_is_bounded_as_client_by_client(backend, name):
    made, rows = PLANS[name], updates()
    expected = BoundedSum.empty(made)
    expected.add(rows)
    there = on(rows, backend)
    ours = DeviceSum(made, there.device, backend)
    for part in (there[:0], there[:4], there[4:]):
        ours.add(part)
    assert (ours.count, int(ours.discarded)) == (expected.count, expected.discarded)
    assert (expected.count, expected.discarded) == (6, 2 if made.family == "laplace" else 3)
    np.testing.assert_allclose(ours.total.cpu(), expected.total, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["all layers", "laplace", "sides"])
def test_fused_client_noise_is_each_clients_own_release(backend, name):
    """One kernel over the block, or one release a client: the same noise, up to a step of the grid."""
    made, rows, keys = PLANS[name], updates(), KeyRing(4)
    there = on(rows, backend)
    fused, one_by_one = DeviceSum(made, there.device, backend), DeviceSum(made, there.device, backend)
    add_released(fused, there, [3, 1, 4, 15, 9, 2], [made], keys, 7, backend)
    add_released(fused, None, [6], [made], keys, 7, backend)
    copies = [ReleasePlan.from_json(LAYERS, made.to_json()) for _ in range(6)]  # plans of their own
    add_released(one_by_one, there, [3, 1, 4, 15, 9, 2], copies, keys, 7, backend)
    add_released(one_by_one, None, [6], copies[:1], keys, 7, backend)
    assert fused.count == one_by_one.count == 7
    assert int(fused.discarded) == int(one_by_one.discarded) > 1
    steps = torch.cat([torch.full((size,), 2.0 ** (math.floor(math.log2(b)) - 10)) for _, size, _, b in made.parts])
    moved = ((fused.total - one_by_one.total).cpu() / steps).abs()
    assert moved.max() <= 1
    assert (moved > 0).double().mean() < 0.05
    other = DeviceSum(made, there.device, backend)
    add_released(other, there, [3, 1, 4, 15, 9, 7], [made], keys, 7, backend)
    assert (other.total.cpu() / steps - fused.total.cpu() / steps).abs().median() > 100  # power: another stream


def test_the_sides_of_a_tiny_update_stay_within_their_bound(backend):
    made = PLANS["sides"]
    for scale in (1e-30, 1e-19, 1e-10, 1.0, 1e10):
        ours = DeviceSum(made, on(torch.empty(0), backend).device, backend)
        ours.add(on(scale * block(1, LAYERS.size), backend))
        assert torch.linalg.vector_norm(ours.total[-4:].double()) <= 1
        assert torch.linalg.vector_norm(ours.total[-8:-4].double()) <= 1


def test_bounds_below_what_float32_can_measure_are_refused():
    with pytest.raises(PrivacyError, match="at least 2"):
        DeviceSum(plan(clip=(1.0, 1.0, 1e-13, 1.0)), torch.device("cpu"), "torch")
    with pytest.raises(ConfigError, match="below-bound"):
        DeviceSum(plan(sides=(Side("surprise", 1, 1.0, 1.0),)), torch.device("cpu"), "torch").add(updates())
