"""A client under local trust refuses what it did not agree to, whoever asks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from flwr.app import RecordDict

from clients import Consent
from fedlgm import mechanisms
from fedlgm.clipping import quantile_side_clip
from fedlgm.errors import PrivacyError
from fedlgm.layers import LayerTable
from fedlgm.plan import Budget, ReleasePlan, Sampling, Side
from fedlgm.privacy.guarantee import Guarantee
from fedlgm.transcript import Transcript
from simulations import recipe as recipes
from simulations.assembly import Assembly

LAYERS = LayerTable.from_sizes({"a": 3, "b": 5})
AGREED = Budget(4.0, Sampling("poisson", 10, 1.0), "replace-one", "local", 3)
PROVEN = Guarantee("proven", "the Gaussian mechanism", "replace-one", "local")


def plan_with(budget: Budget, mechanism: str = "snr-consistent") -> ReleasePlan:
    import torch

    method = mechanisms.get(mechanism)
    return method.plan(method.table(LAYERS), budget, Transcript.start(torch.zeros(8)))


def laplace(multiplier: float) -> ReleasePlan:
    scale = np.full(2, 2.0 * multiplier)  # 1 / (1/b + 1/b)
    return ReleasePlan(LAYERS, np.ones(2), scale, AGREED, PROVEN, family="laplace")


def test_the_agreed_releases_are_made_and_not_one_more() -> None:
    consent, state, plan = Consent(AGREED, 2, PROVEN), RecordDict(), plan_with(AGREED)
    consent.check(plan)
    consent.record(state, 7, "first", plan)
    consent.record(state, 7, "first", plan)  # the same noise again
    consent.record(state, 7, "second", plan)
    consent.record(state, 8, "first", plan)  # another client of the node
    with pytest.raises(PrivacyError, match="client 7 has made the 2 releases"):
        consent.record(state, 7, "third", plan)


def test_less_noise_uses_the_budget_up_faster() -> None:
    weak = plan_with(replace(AGREED, noise_multiplier=2.0))
    with pytest.raises(PrivacyError, match="less noise"):
        Consent(AGREED, 3, PROVEN).record(RecordDict(), 1, "only", weak)
    state, consent = RecordDict(), Consent(AGREED, 5, PROVEN)
    consent.record(state, 1, "worth four", weak)
    consent.record(state, 1, "the fifth", plan_with(AGREED))
    with pytest.raises(PrivacyError):
        consent.record(state, 1, "one too many", plan_with(replace(AGREED, noise_multiplier=40.0)))


def test_central_trust_no_guarantee_and_weak_laplace_noise_are_refused() -> None:
    consent = Consent(AGREED, 5, PROVEN)
    with pytest.raises(PrivacyError, match="central trust"):
        consent.check(plan_with(replace(AGREED, trust="central")))
    with pytest.raises(PrivacyError, match="without a guarantee"):
        consent.check(plan_with(replace(AGREED, noise_multiplier=0.0), "none"))
    with pytest.raises(PrivacyError, match="noise multiplier of 4"):
        consent.check(laplace(3.9))
    consent.check(laplace(4.0))


def test_no_detail_of_a_plan_can_loosen_the_bound() -> None:
    """Whatever the server writes into it: unbounded updates, or a side that is charged less than it holds."""
    consent, honest = Consent(AGREED, 5, PROVEN), plan_with(AGREED)
    with pytest.raises(PrivacyError, match="client-level privacy"):
        consent.check(replace(honest, guarantee=replace(PROVEN, unit="example")))
    side = Side("below-bound", 2, quantile_side_clip(LAYERS), 50.0)
    consent.check(replace(honest, sides=(side,)))
    with pytest.raises(PrivacyError, match="counts less for 'below-bound'"):
        consent.check(replace(honest, sides=(replace(side, clip=side.clip / 2),)))


def test_raw_norms_are_handed_out_only_where_nothing_was_promised() -> None:
    with pytest.raises(PrivacyError, match="no layer norms"):
        Consent(AGREED, 5, PROVEN).check_raw_figures()
    Consent(AGREED, 5, replace(PROVEN, status="none")).check_raw_figures()


def test_a_recipes_clients_agree_to_its_budget() -> None:
    local = ["privacy.trust=local", "privacy.max_participations=3"]
    consent = Assembly(recipes.load("digits", local)).consent()
    assert consent is not None
    assert consent.private
    assert consent.participations == 3
    assert Assembly(recipes.load("digits")).consent() is None
    nothing = Assembly(recipes.load("digits", [*local, "mechanism={name = 'none'}"])).consent()
    assert nothing is not None
    assert not nothing.private
