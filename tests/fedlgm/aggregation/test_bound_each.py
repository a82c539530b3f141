"""Contributions bounded side by side are those that sums of one client hold, and nothing else
passes."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedlgm.aggregation import BoundedSum, bound_each
from fedlgm.aggregation.contributions import BoundedAnswer, BoundedUpdates
from fedlgm.errors import PrivacyError
from fedlgm.planning import queries
from fedlgm.planning.facts import RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import NoisyQuery, ReleasePlan
from fedlgm.privacy.guarantee import Guarantee

LAYERS = LayerTable.from_sizes({"a": 3, "b": 2, "c": 1})
PLAN = ReleasePlan(
    LAYERS, np.array([2.0, 0.5, 1.0]), np.full(3, 3.0), RunFacts(1.0, Sampling("poisson", 10, 1.0)),
    Guarantee("proven", "a test"),
)  # fmt: skip
STRENGTH = NoisyQuery(queries.get("layer-strength", (3, 2, 1)), 0.5)
HUGE = 1.7e308
ROWS = [
    [1.0, -2.0, 0.1, 4.0, 0.5, -7.0],
    [-0.0, 0.0, 1e-320, -1e-320, 1.0, -0.0],
    [HUGE, HUGE, HUGE, 1.0, 1.0, 1.0],  # finite, though its sum is not
    [math.nan, 0.0, 0.0, 0.0, 0.0, 1.0],
    [0.0, math.inf, 0.0, 0.0, -math.inf, 1.0],
]
PLANS = [
    PLAN,
    replace(PLAN, bounded_by="trainer"),
    replace(PLAN, bounded_by="trainer", released=np.array([True, False, True])),
    replace(PLAN, bounded_by="trainer", released=np.array([False, True, False])),
    replace(
        PLAN, bounded_by="trainer", released=np.array([False, True, True]), queries=(STRENGTH,)
    ),
    replace(
        PLAN, bounded_by="trainer", released=np.array([True, True, False]), queries=(STRENGTH,)
    ),
]


def rows_of(plan: ReleasePlan, kind: torch.dtype = torch.float64) -> BoundedUpdates | torch.Tensor:
    values = torch.tensor(ROWS, dtype=torch.float64).to(kind)
    if plan.bounded_by == "aggregator":
        return values
    answers = torch.arange(15.0).view(5, 3)
    answers[0, 1] = math.nan
    given = BoundedAnswer("layer-strength", answers, STRENGTH.bound)
    return BoundedUpdates(values, plan.bounds, (given,) if plan.queries else ())


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("plan", PLANS)
def test_each_is_a_sum_of_one(plan, kind):
    """To the bit and the sign of a zero, because clients' noise is keyed by these bytes."""
    updates = rows_of(plan, kind)
    found = bound_each(updates, plan)
    for row in range(len(ROWS)):
        alone = BoundedSum.empty(plan)
        alone.add(updates[row : row + 1])
        assert found[row].numpy().tobytes() == alone.total.numpy().tobytes()
        assert not alone.discarded or not found[row].any()


def test_what_does_not_fit_the_plan_is_refused():
    trained = PLANS[1]
    with pytest.raises(
        PrivacyError, match="needs a trainer that bounds its updates, but this one returns raw"
    ):
        bound_each(torch.ones(2, 6), trained)
    with pytest.raises(PrivacyError, match="the trainer has bounded single units"):
        bound_each(BoundedUpdates(torch.ones(2, 6), PLAN.bounds), PLAN)
    for bounds in ((2.1, 0.5, 1.0), (2.0, 0.5), (math.nan, 0.5, 1.0)):
        with pytest.raises(PrivacyError, match="the trainer kept the bounds"):
            bound_each(BoundedUpdates(torch.ones(2, 6), bounds), trained)
    with pytest.raises(PrivacyError, match="asks for the queries"):
        bound_each(BoundedUpdates(torch.ones(2, 6), PLAN.bounds), PLANS[4])
