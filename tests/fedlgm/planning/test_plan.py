"""The plan owns noise and event alike."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from hypothesis import given
from hypothesis import strategies as st

from fedlgm import mechanisms
from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.mechanisms.layerwise_gaussian import LayerwiseGaussian
from fedlgm.mechanisms.method import Method
from fedlgm.planning.facts import LocalSteps, LocalTraining
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import NoisyQuery, ReleasePlan, RunFacts, Sampling, UnprotectedPlan
from fedlgm.planning.queries import BelowBound
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.accounting import composed_epsilon
from fedlgm.privacy.guarantee import Guarantee

LAYERS = LayerTable.from_sizes({"a": 4, "b": 100, "c": 2500})
POISSON = Sampling("poisson", 500, 0.1)
PROVEN = Guarantee("proven", "test")
BITS = NoisyQuery(
    BelowBound((4, 100, 2500)), 4 * math.sqrt(3)
)  # its bound is sqrt(3) / 2: 1/8 of its noise


def plan(
    sigma=(2.0, 3.0, 4.0),
    clip=(1.0, 2.0, 3.0),
    facts=None,
    guarantee=PROVEN,
    kind=ReleasePlan,
    **more,
):
    return kind(
        LAYERS, np.array(clip), np.array(sigma), facts or RunFacts(1.0, POISSON), guarantee, **more
    )


def test_event_is_that_of_the_noise():
    made = plan(queries=(BITS,))
    effective = (1 / 4 + 4 / 9 + 9 / 16 + 1 / 64) ** -0.5
    assert made.effective_multiplier == pytest.approx(effective, rel=1e-8)
    assert made.effective_multiplier <= effective
    assert made.event == dp_event.PoissonSampledDpEvent(
        0.1, dp_event.GaussianDpEvent(made.effective_multiplier)
    )
    assert made.shares.sum() == pytest.approx(1 - effective**2 / 64, rel=1e-7)
    assert made.denominator == 50
    assert made.snr == pytest.approx([1 / 16, 4 / 900, 9 / 40_000])


def test_replacing_a_client_halves_the_multiplier():
    facts = RunFacts(1.0, Sampling("fixed", 500, 0.1), "replace-one")
    made = plan(facts=facts)
    inner = made.event.event
    assert inner.noise_multiplier == pytest.approx(plan().event.event.noise_multiplier / 2)
    assert made.event.sampling_probability == 0.1


def test_no_amplification_under_local_trust():
    made = plan(facts=RunFacts(1.0, POISSON, "replace-one", "local"))
    assert isinstance(made.event, dp_event.GaussianDpEvent)


def test_a_layer_without_noise_that_is_released_is_not_private():
    with pytest.raises(PrivacyError, match="without noise"):
        plan(sigma=(2.0, 0.0, 4.0))
    kept_back = plan(sigma=(2.0, math.inf, 4.0))
    assert kept_back.released.tolist() == [True, False, True]
    assert kept_back.effective_multiplier == pytest.approx((1 / 4 + 9 / 16) ** -0.5, rel=1e-8)
    with pytest.raises(PrivacyError, match="infinite noise"):
        plan(sigma=(2.0, math.inf, 4.0), released=np.array([True, True, True]))


def test_no_protection_means_no_epsilon():
    made = plan(guarantee=Guarantee("none", "because"), kind=UnprotectedPlan)
    assert made.event == dp_event.NonPrivateDpEvent()
    assert composed_epsilon([(made.event, 1)], 1e-5) == math.inf
    assert not made.protected
    assert plan().protected


@pytest.mark.parametrize(
    ("kind", "status"),
    [(ReleasePlan, "none"), (UnprotectedPlan, "proven"), (UnprotectedPlan, "conditional")],
)
def test_words_that_do_not_fit_the_kind_of_plan_are_refused(kind, status):
    with pytest.raises(PrivacyError, match=f"a guarantee '{status}' does not fit"):
        plan(guarantee=Guarantee(status, "because"), kind=kind)


def test_relation_and_trust_of_the_guarantee_are_those_of_the_facts():
    local = plan(facts=RunFacts(1.0, POISSON, "replace-one", "local"))
    assert (local.guarantee.relation, local.guarantee.trust, local.guarantee.status) == (
        "replace-one",
        "local",
        "proven",
    )
    stated = plan(guarantee=Guarantee("proven", "test", "replace-one", "local"))
    assert (stated.guarantee.relation, stated.guarantee.trust) == ("add-remove", "central")


def test_the_guarantee_says_what_must_stay_secret():
    """Amplification rests on draws that nobody knows; where there is none, nothing is said of
    it."""
    secret = "test; who takes part in a round stays secret"
    made = plan()
    assert made.guarantee.reason == secret
    assert dataclasses.replace(made, sigma=made.sigma * 2).guarantee.reason == secret  # said once
    assert plan(facts=RunFacts(1.0, Sampling("poisson", 500, 1.0))).guarantee.reason == "test"
    assert plan(facts=RunFacts(1.0, POISSON, "replace-one", "local")).guarantee.reason == "test"
    examples = plan(guarantee=Guarantee("proven", "test", unit="example"))
    assert examples.guarantee.reason == "test; which examples a round draws stays secret"
    unprotected = plan(
        sigma=(0.0, 0.0, 0.0), guarantee=Guarantee("none", "no noise"), kind=UnprotectedPlan
    )
    assert unprotected.guarantee.reason == "no noise"


def test_sampled_gaussian_releases_under_replace_one_are_conditional():
    sampled = RunFacts(1.0, Sampling("fixed", 500, 0.1), "replace-one")
    made = plan(facts=sampled)
    assert made.guarantee.status == "conditional"
    assert "conditional on" in made.guarantee.reason
    assert plan(facts=sampled, family="laplace").guarantee.status == "proven"
    assert (
        plan(facts=RunFacts(1.0, Sampling("fixed", 500, 1.0), "replace-one")).guarantee.status
        == "proven"
    )
    assert plan().guarantee.status == "proven"


@pytest.mark.parametrize(
    ("sigma", "clip"),
    [
        ((1.0, 1.0), (1.0, 1.0, 1.0)),
        ((1.0, 1.0, -1.0), (1.0, 1.0, 1.0)),
        ((1.0, 1.0, float("nan")), (1.0, 1.0, 1.0)),
        ((1.0, 1.0, 1.0), (1.0, 1.0, float("nan"))),
    ],
)
def test_malformed_plans_are_refused(sigma, clip):
    with pytest.raises(ConfigError):
        plan(sigma=sigma, clip=clip)


def test_laplace_plans_have_no_queries_and_families_are_known():
    with pytest.raises(ConfigError, match="l2 norm"):
        plan(family="laplace", queries=(BITS,))
    assert plan(bounded_by="trainer", queries=(BITS,)).queries == (BITS,)
    with pytest.raises(ConfigError, match="unknown noise family 'cauchy'"):
        plan(family="cauchy")
    with pytest.raises(
        ConfigError, match="unknown bounded_by 'nobody'; known: aggregator, trainer"
    ):
        plan(bounded_by="nobody")


def test_a_plan_that_releases_nothing_counts_as_a_whole_release():
    nothing = plan(sigma=(math.inf,) * 3, clip=(0.0,) * 3)
    assert nothing.size == 0
    assert (
        nothing.event == plan(sigma=(math.inf, math.inf, 3.0), facts=RunFacts(1.0, POISSON)).event
    )


def test_plans_cannot_be_changed():
    made = plan()
    with pytest.raises(ValueError, match="read-only"):
        made.sigma[0] = 0.0
    with pytest.raises(AttributeError):
        made.sigma = np.zeros(3)


@pytest.mark.parametrize(
    "kept", [lambda clip: clip[:3], torch.from_numpy], ids=["a view", "a tensor"]
)
def test_a_plan_does_not_change_with_the_arrays_that_it_was_made_of(kept):
    """A mechanism that keeps its bounds and decays them in place would bound by other numbers than
    are charged."""
    clip, sigma, released = np.ones(3), np.ones(3), np.ones(3, dtype=bool)
    made = ReleasePlan(
        LAYERS, kept(clip), kept(sigma), RunFacts(1.0, POISSON), PROVEN, released=kept(released)
    )
    before = made.to_json()
    clip *= 10
    sigma /= 10
    released[:] = False
    assert made.clip.tolist() == made.sigma.tolist() == [1.0, 1.0, 1.0]
    assert made.equals(plan(sigma=(1.0,) * 3, clip=(1.0,) * 3))
    assert made.to_json() == before


def test_queries_of_a_list_or_a_generator_are_kept():
    queries = [BITS]
    made, other = plan(queries=queries), plan(queries=(query for query in queries))
    queries.clear()
    assert made.queries == other.queries == (BITS,)


def test_users_are_not_protected_by_bounds_of_examples():
    users = RunFacts(1.0, dataclasses.replace(POISSON, of="user"))
    assert plan(facts=users).protects == "user, add-remove"
    with pytest.raises(PrivacyError, match="draws users with all of their data"):
        plan(facts=users, bounded_by="trainer")


@given(
    st.lists(st.floats(1e-6, 1e6), min_size=3, max_size=3),
    st.lists(st.one_of(st.floats(1e-6, 1e6), st.just(math.inf)), min_size=3, max_size=3),
)
def test_json_round_trip_keeps_every_bit(clip, sigma):
    facts = RunFacts(
        1.5, POISSON, rounds=7, epsilon=2.0, delta=1e-6, training=LocalTraining("adam", 0.03)
    )
    made = plan(sigma=sigma, clip=clip, facts=facts, queries=(BITS,), claim={"epsilon": 0.1})
    again = ReleasePlan.from_json(LAYERS, made.to_json())
    assert again.clip.tolist() == made.clip.tolist()
    assert again.sigma.tolist() == made.sigma.tolist()
    assert again.released.tolist() == made.released.tolist()
    for name in (
        "event",
        "parts",
        "claim",
        "guarantee",
        "facts",
        "queries",
        "bounded_by",
        "protected",
    ):
        assert getattr(again, name) == getattr(made, name)


@pytest.mark.parametrize("bounded_by", ["aggregator", "trainer"])
def test_json_keeps_what_protects(bounded_by):
    none = plan(guarantee=Guarantee("none", "because"), kind=UnprotectedPlan, bounded_by=bounded_by)
    again = ReleasePlan.from_json(LAYERS, none.to_json())
    assert (type(again), again.bounded_by) == (UnprotectedPlan, bounded_by)
    with pytest.raises(PrivacyError, match="does not fit"):
        ReleasePlan.from_json(
            LAYERS, none.to_json().replace('"protected": false', '"protected": true')
        )


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"protected": true}', "null", "[" * 100_000],
    ids=lambda text: text[:20],
)
def test_what_is_no_plan_is_refused(text):
    with pytest.raises(ConfigError, match="not a release plan"):
        ReleasePlan.from_json(LAYERS, text)


def test_a_plan_for_another_model_is_refused():
    with pytest.raises(ConfigError, match="2 layers"):
        ReleasePlan.from_json(LayerTable.from_sizes({"a": 1, "b": 2}), plan().to_json())


def test_rounds_that_differ_by_rounding_share_an_event():
    """Else the ledger would compose thousands of distinct events."""
    mechanism = mechanisms.get("snr-consistent")
    events = set()
    for factor in np.linspace(0.1, 9.7, 50):
        clip = factor * np.array([0.3, 0.2, 0.7])
        sigma = mechanisms.layerwise_gaussian.spread(
            mechanisms.layerwise_gaussian.shares("snr-consistent", clip, LAYERS.sizes),
            clip,
            1.2345678912345,
        )
        events.add(plan(sigma=sigma, clip=clip).event)
    assert len(events) == 1
    assert (
        mechanism.plan(LAYERS, RunFacts(1.2345678912345, POISSON), Transcript.start(None)).event
        in events
    )


def test_equal_rounds_share_one_plan():
    """A plan's text and cost are computed once; what a user's mechanism returns is made anew in
    every round."""

    class Mine(LayerwiseGaussian):
        __module__ = "mypkg.mechanisms"

    facts = RunFacts(1.0, POISSON, rounds=5)
    zeros = torch.zeros(LAYERS.size)
    for mechanism, shared in (
        (LayerwiseGaussian("uniform"), True),
        (LayerwiseGaussian("uniform", clip="med"), False),
        (Mine("uniform"), False),
    ):
        method, transcript = Method(mechanism, LAYERS, facts), Transcript.start(zeros)
        first = method.plan(transcript)
        second = method.plan(transcript.extend(zeros, torch.ones(LAYERS.size), first))
        assert (second is first) is shared, mechanism


@pytest.mark.parametrize(
    "field", [f.name for f in dataclasses.fields(ReleasePlan) if f.name != "fills"]
)
def test_plans_that_differ_in_one_field_are_not_equal(field):
    other = {
        "layers": LayerTable.from_sizes({"a": 4, "b": 100, "d": 2500}),
        "clip": np.array([1.0, 2.0, 2.5]),
        "sigma": np.array([2.0, 3.0, 5.0]),
        "facts": RunFacts(2.0, POISSON),
        "guarantee": Guarantee("proven", "other"),
        "family": "laplace",
        "released": np.array([True, True, False]),
        "queries": (BITS,),
        "bounded_by": "trainer",
        "claim": {"epsilon": 1.0},
        "downlink": 0.5,
        "position": 1,
        "notes": {"score": np.ones(3)},
        "freezes": True,
    }
    assert plan().equals(plan())
    assert not plan().equals(dataclasses.replace(plan(), **{field: other[field]}))
    assert not plan().equals(plan(), **{field: other[field]})


@pytest.mark.parametrize("family", ["gaussian", "laplace"])
def test_a_round_of_local_steps_is_charged_for_every_step(family: str) -> None:
    """Whatever the law of the noise; a user's mechanism may choose it."""

    def charged(count: int) -> float:
        facts = RunFacts(
            4.0, Sampling("poisson", 20, 1.0), "add-remove", "local", rounds=1,
            steps=LocalSteps(count, 1.0, 8.0), delta=1e-5,
        )  # fmt: skip
        plan = ReleasePlan(
            LayerTable.from_sizes({"a": 3}), [1.0], [4.0], facts, PROVEN,
            bounded_by="trainer", family=family,
        )  # fmt: skip
        return composed_epsilon([(plan.event, 1)], 1e-5)

    assert charged(6) > 1.5 * charged(1)
