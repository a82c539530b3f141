"""Random allocation: its draws, and the charges of its blocks."""

import math
from dataclasses import replace

import numpy as np
import pytest
from dp_accounting import dp_event
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedlgm import Guarantee, LayerTable, ReleasePlan, RunFacts, Sampling
from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.planning import charging
from fedlgm.planning.allocator import Allocator
from fedlgm.privacy import composed_epsilon
from fedlgm.privacy.events import AllocationDpEvent

SAMPLING = Sampling("allocation", 100, 0.2, participations=2, block=10)
FACTS = RunFacts(1.5, SAMPLING, rounds=20, epsilon=8.0, delta=1e-5)


def plan_of(position, multiplier=1.5, family="gaussian", facts=FACTS):
    layers = LayerTable.from_sizes({"a": 3})
    guarantee = Guarantee("proven", "an example")
    return ReleasePlan(
        layers, [1.0], [multiplier], facts, guarantee, position=position, family=family
    )


@given(st.integers(0, 2**32), st.integers(1, 6), st.integers(0, 6), st.permutations(range(1, 25)))
def test_every_unit_takes_part_k_times_in_each_block_whatever_the_order(seed, k, spare, order):
    block = k + spare

    def numbers(round):
        return np.random.default_rng([seed, round]).random(30)

    forwards, jumping = Allocator(k, block, numbers), Allocator(k, block, numbers)
    drawn = np.array([forwards.draw(round) for round in range(1, 4 * block + 1)])
    for start in range(0, 4 * block, block):
        assert (drawn[start : start + block].sum(axis=0) == k).all()
    for round in order[: 4 * block]:
        if round <= 4 * block:
            assert (jumping.draw(round) == drawn[round - 1]).all()


def test_sets_of_rounds_are_uniform_and_independent():
    rng, units = np.random.default_rng(1), 60_000
    numbers = {round: rng.random(units) for round in range(1, 11)}
    allocator = Allocator(2, 5, numbers.__getitem__)
    drawn = np.array([allocator.draw(round) for round in range(1, 11)])
    for start in (0, 5):
        codes = (drawn[start : start + 5] * (2 ** np.arange(5))[:, None]).sum(axis=0)
        counts = np.unique(codes, return_counts=True)[1]
        assert len(counts) == 10
        assert stats.chisquare(counts).pvalue > 1e-3
    table = np.array([[np.sum(drawn[2] & drawn[8]), np.sum(drawn[2] & ~drawn[8])],
                      [np.sum(~drawn[2] & drawn[8]), np.sum(~drawn[2] & ~drawn[8])]])  # fmt: skip
    assert stats.chi2_contingency(table).pvalue > 1e-3
    assert abs(np.corrcoef(drawn[0, :-1], drawn[0, 1:])[0, 1]) < 0.02


class TestCharges:
    def test_the_first_round_of_a_block_is_charged_the_whole_block(self):
        events = [plan_of(position).event for position in range(20)]
        charged = [i for i, e in enumerate(events) if not isinstance(e, dp_event.NoOpDpEvent)]
        assert charged == [0, 10]
        assert events[0] == events[10]
        assert isinstance(events[0], AllocationDpEvent)
        assert (events[0].participations, events[0].rounds) == (2, 10)
        assert events[0].event.noise_multiplier == FACTS.least_multiplier

    def test_the_charges_of_all_rounds_cost_what_was_calibrated(self):
        process = charging.of(FACTS)
        facts = FACTS.with_multiplier(process.calibrate())
        noise = facts.noise_multiplier * (1 + 1e-9)
        events = [(plan_of(place, noise, facts=facts).event, 1) for place in range(20)]
        assert 7.99 < composed_epsilon(events, 1e-5) <= 8.0
        assert composed_epsilon(charging.of(facts).run_events(), 1e-5) == composed_epsilon(
            events, 1e-5
        )

    def test_a_prefix_costs_no_less_than_its_own_price(self):
        """Three rounds of a block of ten, each unit's participations in them at most two."""
        event = plan_of(0).event
        whole = composed_epsilon([(event, 1)], 1e-5)
        some = AllocationDpEvent(event.event, 1, 10)  # less than the prefix of a unit drawn twice
        assert whole > composed_epsilon([(some, 1)], 1e-5)

    def test_a_repeated_round_is_charged_without_the_secret(self):
        again = plan_of(3).repeated_event
        assert again == dp_event.GaussianDpEvent(FACTS.least_multiplier)

    def test_a_repeated_release_costs_no_more_than_that_by_monte_carlo(self):
        """Round 1 of 3 released twice for one draw: its likelihood ratio against the charge."""
        rng, count, noise = np.random.default_rng(3), 400_000, 1.2

        def profile(losses, epsilons):
            gains = np.maximum(-np.expm1(epsilons[:, None] - losses), 0)
            return gains.mean(axis=1), gains.std(axis=1) / math.sqrt(count)

        def weight(x):
            return np.exp(x / noise**2 - 1 / (2 * noise**2))

        epsilons = np.linspace(0, 3, 10)
        for present in (True, False):
            x, again = rng.normal(0, noise, (count, 3)), rng.normal(0, noise, count)
            certain = rng.normal(present, noise, count)
            drawn = rng.integers(0, 3, count)
            if present:
                x[np.arange(count), drawn] += 1
                again += drawn == 0
            each = weight(x)
            true = np.log((each[:, 0] * weight(again) + each[:, 1] + each[:, 2]) / 3)
            charged = np.log(each.mean(axis=1) * weight(certain))
            sign = 1 if present else -1
            mean, error = profile(sign * true, epsilons)
            bound, spread = profile(sign * charged, epsilons)
            assert (mean <= bound + 4 * np.hypot(error, spread)).all()

    def test_less_noise_or_other_noise_is_refused(self):
        with pytest.raises(PrivacyError, match="less noise than was planned"):
            plan_of(0, 1.4)
        with pytest.raises(PrivacyError, match="accounted for as Gaussian"):
            plan_of(0, 2.0, "laplace")

    def test_releases_and_words(self):
        assert FACTS.releases == 4
        assert replace(FACTS, rounds=21).releases == 6  # a started block counts as a whole one
        assert "takes part in 2 of each 10 rounds" in charging.of(FACTS).needs("client")
        assert RunFacts.from_dict(FACTS.to_dict()) == FACTS
        assert "participations=2, block=10" in repr(FACTS)
        assert "block" not in repr(RunFacts(1.0, Sampling("poisson", 10, 0.1)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"participations": 2}, "which needs both"),
        ({"participations": 3, "block": 10}, "3 of 10 rounds are not a share of 0.2"),
        ({"participations": 2, "block": 10, "separation": 2}, "keeps no rounds"),
        ({}, "which needs both"),
    ],
)
def test_samplings_that_make_no_sense(fields, message):
    with pytest.raises(ConfigError, match=message):
        Sampling("allocation", 100, 0.2, **fields)
    with pytest.raises(ConfigError, match="are for 'allocation'"):
        Sampling("poisson", 100, 0.2, participations=2, block=10)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"relation": "replace-one"}, "not for relation = 'replace-one'"),
        ({"trust": "local", "relation": "replace-one"}, "needs trust = 'central'"),
    ],
)
def test_facts_that_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        replace(FACTS, **changes)


def test_correlated_noise_is_refused():
    from fedlgm import correlation

    with pytest.raises(ConfigError, match="is proven for independent noise"):
        replace(FACTS, noise=correlation.get("banded", 20, bands=2))


def test_audits_are_refused():
    from fedlgm import mechanisms
    from fedlgm.mechanisms.method import Method
    from fedlgm_lab.audits.subject import Subject

    layers = LayerTable.from_sizes({"a": 3})
    facts = replace(FACTS, noise_multiplier=0.0)
    method = Method.calibrate(mechanisms.get("gaussian"), layers, facts)
    with pytest.raises(ConfigError, match="random allocation does not permit"):
        Subject("a run", method)
