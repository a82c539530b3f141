"""The plan owns noise and event alike."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import dp_event
from hypothesis import given
from hypothesis import strategies as st

from fedlgm import mechanisms
from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.layers import LayerTable
from fedlgm.plan import ReleasePlan, RunFacts, Sampling, Side
from fedlgm.privacy.accounting import composed_epsilon
from fedlgm.privacy.guarantee import Guarantee
from fedlgm.transcript import Transcript

LAYERS = LayerTable.from_sizes({"a": 4, "b": 100, "c": 2500})
POISSON = Sampling("poisson", 500, 0.1)
PROVEN = Guarantee("proven", "test")


def plan(sigma=(2.0, 3.0, 4.0), clip=(1.0, 2.0, 3.0), budget=None, guarantee=PROVEN, **more):
    return ReleasePlan(LAYERS, np.array(clip), np.array(sigma), budget or RunFacts(1.0, POISSON), guarantee, **more)


def test_event_is_that_of_the_noise():
    made = plan(sides=(Side("bits", 3, 0.5, 4.0),))
    effective = (1 / 4 + 4 / 9 + 9 / 16 + 1 / 64) ** -0.5
    assert made.effective_multiplier == pytest.approx(effective, rel=1e-8)
    assert made.effective_multiplier <= effective
    assert made.event == dp_event.PoissonSampledDpEvent(0.1, dp_event.GaussianDpEvent(made.effective_multiplier))
    assert made.shares.sum() == pytest.approx(1 - effective**2 / 64, rel=1e-7)
    assert made.denominator == 50
    assert made.snr == pytest.approx([1 / 16, 4 / 900, 9 / 40_000])


def test_replacing_a_client_halves_the_multiplier():
    budget = RunFacts(1.0, Sampling("fixed", 500, 0.1), "replace-one")
    made = plan(budget=budget)
    inner = made.event.event
    assert inner.noise_multiplier == pytest.approx(plan().event.event.noise_multiplier / 2)
    assert made.event.sampling_probability == 0.1


def test_no_amplification_under_local_trust():
    made = plan(budget=RunFacts(1.0, POISSON, "replace-one", "local"))
    assert isinstance(made.event, dp_event.GaussianDpEvent)


def test_a_layer_without_noise_that_is_released_is_not_private():
    with pytest.raises(PrivacyError, match="without noise"):
        plan(sigma=(2.0, 0.0, 4.0))
    kept_back = plan(sigma=(2.0, math.inf, 4.0))
    assert kept_back.released.tolist() == [True, False, True]
    assert kept_back.effective_multiplier == pytest.approx((1 / 4 + 9 / 16) ** -0.5, rel=1e-8)
    with pytest.raises(PrivacyError, match="infinite noise"):
        plan(sigma=(2.0, math.inf, 4.0), released=np.array([True, True, True]))


def test_no_guarantee_means_no_epsilon():
    made = plan(guarantee=Guarantee("none", "because"))
    assert made.event == dp_event.NonPrivateDpEvent()
    assert composed_epsilon([(made.event, 1)], 1e-5) == math.inf


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


@pytest.mark.parametrize("side", [Side("bits", 3, -0.5, 4.0), Side("bits", 3, 0.5, float("nan"))])
def test_malformed_sides_are_refused(side):
    with pytest.raises(ConfigError, match="non-negative"):
        plan(sides=(side,))


def test_laplace_plans_have_no_sides_and_families_are_known():
    with pytest.raises(ConfigError, match="l2 norm"):
        plan(family="laplace", sides=(Side("bits", 3, 0.5, 4.0),))
    with pytest.raises(ConfigError, match="unknown noise family 'cauchy'"):
        plan(family="cauchy")


def test_a_plan_that_releases_nothing_counts_as_a_whole_release():
    nothing = plan(sigma=(math.inf,) * 3, clip=(0.0,) * 3)
    assert nothing.size == 0
    assert nothing.event == plan(sigma=(math.inf, math.inf, 3.0), budget=RunFacts(1.0, POISSON)).event


def test_plans_cannot_be_changed():
    made = plan()
    with pytest.raises(ValueError, match="read-only"):
        made.sigma[0] = 0.0
    with pytest.raises(AttributeError):
        made.sigma = np.zeros(3)


@given(
    st.lists(st.floats(1e-6, 1e6), min_size=3, max_size=3),
    st.lists(st.one_of(st.floats(1e-6, 1e6), st.just(math.inf)), min_size=3, max_size=3),
)
def test_json_round_trip_keeps_every_bit(clip, sigma):
    made = plan(sigma=sigma, clip=clip, sides=(Side("bits", 3, 0.5, 4.0),), claim={"epsilon": 0.1})
    again = ReleasePlan.from_json(LAYERS, made.to_json())
    assert again.clip.tolist() == made.clip.tolist()
    assert again.sigma.tolist() == made.sigma.tolist()
    assert again.released.tolist() == made.released.tolist()
    assert (again.event, again.parts, again.claim, again.guarantee) == (
        made.event,
        made.parts,
        made.claim,
        made.guarantee,
    )


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
            mechanisms.layerwise_gaussian.shares("snr-consistent", clip, LAYERS.sizes), clip, 1.2345678912345
        )
        events.add(plan(sigma=sigma, clip=clip).event)
    assert len(events) == 1
    assert mechanism.plan(LAYERS, RunFacts(1.2345678912345, POISSON), Transcript.start(None)).event in events


class TestSampling:
    @pytest.mark.parametrize(("population", "rate"), [(0, 0.5), (10, 0.0), (10, 1.1), (10, float("nan"))])
    def test_range(self, population, rate):
        with pytest.raises(ConfigError):
            Sampling("poisson", population, rate)

    def test_a_fixed_cohort_is_a_whole_number(self):
        """11 of 21 clients are more than the rate 0.5 that would be accounted for."""
        with pytest.raises(ConfigError, match="whole number"):
            Sampling("fixed", 21, 0.5)
        assert Sampling("fixed", 3, 1 / 3).expected == pytest.approx(1)

    def test_relations_that_do_not_fit(self):
        with pytest.raises(ConfigError, match="replace-one"):
            RunFacts(1.0, Sampling("fixed", 10, 0.5))
        with pytest.raises(ConfigError, match="replace-one"):
            RunFacts(1.0, POISSON, "add-remove", "local")
        RunFacts(1.0, Sampling("fixed", 10, 1.0))  # everybody, always
