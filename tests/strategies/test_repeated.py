"""A round that is released twice: no noise is shared by two releases, and both are paid for as what
they are."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from dp_accounting import dp_event

from fedlgm.aggregation import BoundedSum
from fedlgm.noise import correlation
from fedlgm.noise.keys import KeyRing
from fedlgm.planning.facts import RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import Guarantee, ReleasePlan, UnprotectedPlan
from fedlgm.privacy.accounting import composed_epsilon
from fedlgm.privacy.events import gaussian_event
from fedlgm.privacy.ledger import Ledger
from fedlgm.training.devices import Numerics
from strategies import Releaser

LAYERS = LayerTable.from_sizes({"a": 3000, "b": 1000})
CLIP = np.array([0.6, 0.8])


def plan_with(sigma, facts, position=None) -> ReleasePlan:
    return ReleasePlan(
        LAYERS, CLIP, np.array(sigma), facts, Guarantee("proven", "a test"), position=position
    )


def multiplier(sigma) -> float:
    return float(1 / np.sqrt(np.sum((CLIP / np.array(sigma)) ** 2)))


def total(value: float) -> BoundedSum:
    plan = plan_with([1.0, 1.0], RunFacts(0.0, Sampling("poisson", 10, 0.5)))
    return BoundedSum(plan, torch.full((LAYERS.size,), value, dtype=torch.float64))


FIRST, SECOND = [1.0, 2.0], [2.0, 0.8 / math.sqrt(1 / multiplier([1.0, 2.0]) ** 2 - 0.09)]
FACTS = {
    "separate": RunFacts(1.0, Sampling("poisson", 10, 0.5)),
    "correlated": RunFacts(
        multiplier(FIRST),
        Sampling("cyclic", 10, 0.5, 2),
        rounds=4,
        noise=correlation.get("banded", 4, bands=2),
    ),
}


@pytest.mark.parametrize("kind", FACTS)
def test_the_same_sum_by_another_plan_has_other_noise(tmp_path, kind):
    """With the same draws at two scales the two releases gave the exact sum away; the ledger saw
    one release."""
    assert multiplier(FIRST) == pytest.approx(multiplier(SECOND), rel=1e-12)
    facts, position = FACTS[kind], 0 if kind == "correlated" else None
    with Ledger(tmp_path / "ledger.sqlite", "test") as ledger:
        releaser = Releaser(KeyRing(5, secret=True), ledger, Numerics())
        one, other = (
            releaser.mean(total(7.0), plan_with(sigma, facts, position), 1).double()
            * facts.sampling.expected
            for sigma in (FIRST, SECOND)
        )
        assert ledger.position() == 2
    scales = np.repeat(FIRST, [3000, 1000]), np.repeat(SECOND, [3000, 1000])
    solved = (one.numpy() * scales[1] - other.numpy() * scales[0]) / (scales[1] - scales[0])
    assert np.abs(solved - 7.0).mean() > 0.3


def test_a_round_released_twice_with_the_same_draws_is_amplified_once(tmp_path):
    """Both releases hold a client or neither does: that is no composition of two sampled
    mechanisms."""
    facts = RunFacts(1.0, Sampling("poisson", 100, 0.02))
    plan = plan_with([1.0, 1.0], facts)
    with Ledger(tmp_path / "ledger.sqlite", "test") as ledger:
        releaser = Releaser(KeyRing(5, secret=True), ledger, Numerics())
        for value in (1.0, 2.0, 1.0):
            releaser.mean(total(value), plan, 1)
        events = sorted(str(charge.event) for charge in ledger.charges())
        assert events == sorted([str(plan.event), str(plan.repeated_event)])
        # Power: an observer who adds the two releases up sees one sampled mechanism of 1 / sqrt(2)
        # of the noise.
        least = composed_epsilon(
            [(gaussian_event(plan.effective_multiplier / math.sqrt(2), 0.02), 1)], 1e-3
        )
        assert (
            composed_epsilon([(plan.event, 2)], 1e-3) < 0.7 * least < least < ledger.epsilon(1e-3)
        )


def test_releases_by_other_draws_are_amplified_each(tmp_path):
    facts = RunFacts(1.0, Sampling("poisson", 100, 0.02))
    plan = plan_with([1.0, 1.0], facts)
    with Ledger(tmp_path / "ledger.sqlite", "test") as ledger:
        Releaser(KeyRing(5, secret=True), ledger, Numerics()).mean(total(1.0), plan, 1)
        Releaser(KeyRing(6, secret=True), ledger, Numerics(), redrawn=ledger.position()).mean(
            total(1.0), plan, 1
        )
        assert [str(charge.event) for charge in ledger.charges()] == 2 * [str(plan.event)]


@pytest.mark.parametrize("family", ["gaussian", "laplace"])
@pytest.mark.parametrize("trust", ["central", "local"])
def test_what_is_not_amplified_costs_the_same_again(family, trust):
    relation = "replace-one" if trust == "local" else "add-remove"
    facts = RunFacts(1.0, Sampling("poisson", 10, 1.0), relation, trust)
    plan = ReleasePlan(LAYERS, CLIP, 2 * CLIP, facts, Guarantee("proven", "a test"), family=family)
    assert plan.repeated_event == plan.event


@pytest.mark.parametrize("kind", FACTS)
def test_a_release_that_is_not_private_is_not_when_it_is_repeated(kind):
    guarantee = Guarantee("none", "a test")
    plan = UnprotectedPlan(LAYERS, CLIP, CLIP, FACTS[kind], guarantee, position=1)
    assert isinstance(plan.event, dp_event.NonPrivateDpEvent)
    assert plan.repeated_event == plan.event
