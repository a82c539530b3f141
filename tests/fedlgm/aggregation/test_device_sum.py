"""Sums bounded where the updates lie give what the CPU's sums give."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from kernel_backends import BACKENDS, block, on

from fedlgm.aggregation import BoundedSum, DeviceSum
from fedlgm.aggregation.contributions import BoundedUpdates
from fedlgm.errors import PrivacyError
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import NoisyQuery, RunFacts, Sampling, UnprotectedPlan
from fedlgm.planning.queries import BelowBound, LayerStrength
from fedlgm.privacy.guarantee import Guarantee

LAYERS = LayerTable.from_sizes({"a": 1, "b": 30, "c": 70, "d": 5})
D = tuple(LAYERS.sizes.tolist())
QUERIES = (NoisyQuery(BelowBound(D), 2.0), NoisyQuery(LayerStrength(D), 3.0))


def plan(
    family="gaussian",
    skipped=(),
    queries=(),
    bounded_by="aggregator",
    clip=(1.0, 4.0, math.inf, 0.5),
):
    sigma = np.array(
        [math.inf if name in skipped else 0.5 + i for i, name in enumerate(LAYERS.names)]
    )
    facts, guarantee = RunFacts(1.0, Sampling("poisson", 10, 0.5)), Guarantee("none", "test")
    return UnprotectedPlan(
        LAYERS,
        np.array(clip),
        sigma,
        facts,
        guarantee,
        family=family,
        queries=queries,
        bounded_by=bounded_by,
    )


PLANS = {
    "all layers": plan(),
    "laplace": plan("laplace"),
    "two layers": plan(skipped=("b", "d")),
    "queries": plan(queries=QUERIES, skipped=("a",)),
    "bounded by the trainer": plan(bounded_by="trainer"),
    "two layers bounded by the trainer": plan(bounded_by="trainer", skipped=("b", "d")),
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


def handed_over(made, rows):
    """What a trainer hands over: raw updates, or updates of which it says that it kept the plan's
    bounds."""
    return BoundedUpdates(rows, tuple(made.clip.tolist())) if made.bounded_by == "trainer" else rows


@pytest.mark.parametrize("name", PLANS)
def test_a_block_is_bounded_as_client_by_client(backend, name):
    made, rows = PLANS[name], updates()
    expected = BoundedSum.empty(made)
    expected.add(handed_over(made, rows))
    there = on(rows, backend)
    ours = DeviceSum(made, there.device, backend)
    for part in (there[:0], there[:4], there[4:]):
        ours.add(handed_over(made, part))
    assert (ours.count, int(ours.discarded)) == (expected.count, expected.discarded)
    # Squares are taken only where clients are bounded in l2 norm.
    squared = made.family == "gaussian" and made.bounded_by == "aggregator"
    assert (expected.count, expected.discarded) == (6, 3 if squared else 2)
    np.testing.assert_allclose(ours.total.cpu(), expected.total, rtol=1e-5, atol=1e-5)


def test_updates_that_the_trainer_bounded_are_added_as_they_are(backend):
    made, rows = PLANS["bounded by the trainer"], updates()
    ours = DeviceSum(made, on(rows, backend).device, backend)
    ours.add(handed_over(made, on(rows, backend)))
    np.testing.assert_allclose(ours.total.cpu(), rows[[0, 2, 3, 5]].double().sum(dim=0), rtol=1e-6)
    with pytest.raises(PrivacyError, match="raw updates"):
        ours.add(on(rows, backend))
    with pytest.raises(PrivacyError, match="at most"):
        ours.add(BoundedUpdates(on(rows, backend), (1.0, 4.1, math.inf, 0.5)))
    with pytest.raises(PrivacyError, match="has bounded single units"):
        DeviceSum(PLANS["all layers"], on(rows, backend).device, backend).add(
            handed_over(made, on(rows, backend))
        )


@pytest.mark.parametrize("name", ["bounded by the trainer", "two layers bounded by the trainer"])
def test_bounded_updates_are_added_without_waiting_for_the_device(name):
    """A tensor on the meta device has no values: reading one is an error."""
    made = PLANS[name]
    ours = DeviceSum(made, torch.device("meta"))
    ours.add(handed_over(made, torch.empty(3, LAYERS.size, device="meta")))
    assert ours.count == 3


def test_the_queries_of_a_tiny_update_stay_within_their_bound(backend):
    made = PLANS["queries"]
    for scale in (1e-30, 1e-19, 1e-10, 1.0, 1e10):
        ours = DeviceSum(made, on(torch.empty(0), backend).device, backend)
        ours.add(on(scale * block(1, LAYERS.size), backend))
        assert torch.linalg.vector_norm(ours.total[-4:].double()) <= 1
        assert torch.linalg.vector_norm(ours.total[-8:-4].double()) <= 1


def test_bounds_below_what_float32_can_measure_are_refused():
    with pytest.raises(PrivacyError, match="at least 2"):
        DeviceSum(plan(clip=(1.0, 1.0, 1e-13, 1.0)), torch.device("cpu"), "torch")
