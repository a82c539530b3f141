"""Public facts of a run are checked where they are made."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest

from fedlgm.errors import ConfigError
from fedlgm.noise import correlation
from fedlgm.noise.correlation import Correlation
from fedlgm.planning.distributed_trust import Shares
from fedlgm.planning.facts import LocalSteps, LocalTraining, RunFacts, Sampling
from fedlgm.planning.queries import NoisyQuery
from fedlgm.privacy.accountants import new_accountant

POISSON = Sampling("poisson", 500, 0.1)


class TestSampling:
    @pytest.mark.parametrize(
        ("population", "rate"), [(0, 0.5), (10, 0.0), (10, 1.1), (10, float("nan"))]
    )
    def test_range(self, population, rate):
        with pytest.raises(ConfigError):
            Sampling("poisson", population, rate)

    def test_a_fixed_cohort_is_a_whole_number(self):
        """11 of 21 clients are more than the rate 0.5 that would be accounted for."""
        with pytest.raises(ConfigError, match="whole number"):
            Sampling("fixed", 21, 0.5)
        assert Sampling("fixed", 3, 1 / 3).expected == pytest.approx(1)

    @pytest.mark.parametrize("rounds", [0, -1, 2.5, True, "3"])
    def test_rounds_are_counted(self, rounds):
        with pytest.raises(
            ConfigError, match="the number of rounds must be a whole number of at least 1, got"
        ):
            RunFacts(1.0, POISSON, rounds=rounds)

    def test_relations_that_do_not_fit(self):
        with pytest.raises(ConfigError, match="replace-one"):
            RunFacts(1.0, Sampling("fixed", 10, 0.5))
        with pytest.raises(ConfigError, match="replace-one"):
            RunFacts(1.0, POISSON, "add-remove", "local")
        RunFacts(1.0, Sampling("fixed", 10, 1.0))  # everybody, always


class TestSeparation:
    """Sampling that keeps rounds between participations."""

    @pytest.mark.parametrize(
        ("scheme", "population", "rate", "separation", "message"),
        [
            ("poisson", 100, 0.1, 4, "use 'min-separation'"),
            ("fixed", 100, 0.1, 4, "use 'min-separation'"),
            ("cyclic", 100, 0.1, None, "needs a separation"),
            ("cyclic", 100, 0.1, 0, "needs a separation"),
            ("cyclic", 100, 0.1, 9, "1/9 of the clients in a round, but the rate is 0.1"),
            ("min-separation", 100, 0.1, 11, "a population of at least 110, not 100"),
            ("min-separation", 100, 0.005, 2, "whole number"),
            ("grouped-poisson", 100, 0.3, 4, "which is more than 1: take at most 3 groups"),
            ("every-other", 100, 0.3, 4, "unknown sampling scheme"),
        ],
    )
    def test_what_cannot_be_kept(self, scheme, population, rate, separation, message):
        with pytest.raises(ConfigError, match=message):
            Sampling(scheme, population, rate, separation)

    def test_rates(self):
        assert Sampling("cyclic", 100, 0.25, 4).within_group == 1.0
        assert Sampling("grouped-poisson", 100, 0.2, 4).within_group == pytest.approx(0.8)
        assert not Sampling("grouped-poisson", 100, 0.25, 4).amplifies  # the cycle itself
        assert not Sampling("min-separation", 100, 0.2, 4).amplifies
        assert Sampling("grouped-poisson", 100, 0.1, 4).amplifies

    def test_relations(self):
        apart, groups = (
            Sampling("min-separation", 100, 0.1, 4),
            Sampling("grouped-poisson", 100, 0.1, 4),
        )
        with pytest.raises(ConfigError, match="use relation = 'zero-out'"):
            RunFacts(1.0, apart, rounds=8)
        with pytest.raises(ConfigError, match="proven for 'add-remove' and 'zero-out'"):
            RunFacts(1.0, groups, "replace-one", rounds=8)
        with pytest.raises(ConfigError, match="replace-one"):
            RunFacts(1.0, Sampling("fixed", 10, 0.5), "zero-out")
        for relation in ("zero-out", "replace-one"):
            assert RunFacts(1.0, apart, relation, rounds=9).releases == 3

    def test_correlated_noise_needs_its_schema(self):
        banded = correlation.get("banded", 8, bands=4)
        groups = Sampling("grouped-poisson", 100, 0.1, 3)
        for sampling, options, message in (
            (POISSON, {}, "needs to know how many rounds"),
            (groups, {}, "4 bands with 3 groups is not proven"),
            (
                groups,
                {"noise": correlation.get("blt", 8, buffers=1)},
                "a buffered strategy with 3 groups",
            ),
            (
                Sampling("cyclic", 100, 0.25, 4),
                {"rounds": 9},
                "correlated over 8 rounds, but the run has 9",
            ),
            (
                POISSON,
                {"relation": "replace-one", "trust": "local"},
                "independent noise already has the least final and largest",
            ),
        ):
            with pytest.raises(ConfigError, match=message):
                RunFacts(1.0, sampling, **{"rounds": 8, "noise": banded, **options})

    def test_schedules_are_for_central_trust(self):
        with pytest.raises(ConfigError, match="max_participations counts"):
            RunFacts(1.0, Sampling("cyclic", 100, 0.25, 4), "replace-one", "local", 8)

    @pytest.mark.parametrize(
        "noise", [None, correlation.get("banded", 8, bands=4), correlation.get("blt", 8, buffers=1)]
    )
    def test_json_round_trip(self, noise):
        facts = RunFacts(1.5, Sampling("cyclic", 100, 0.25, 4), rounds=8, noise=noise)
        assert RunFacts.from_dict(json.loads(json.dumps(facts.to_dict()))) == facts

    def test_independent_noise_is_what_it_was(self):
        """Names of runs and keys of clients' noise are made of these texts."""
        facts = RunFacts(1.5, POISSON, "replace-one", "local", 7, 2.0, 1e-6, "rdp", 3)
        assert json.dumps(facts.to_dict()) == (
            '{"noise_multiplier": 1.5, "sampling": {"scheme": "poisson", "population": 500, '
            '"rate": 0.1}, "relation": '
            '"replace-one", "trust": "local", "rounds": 7, "epsilon": 2.0, "delta": 1e-06, '
            '"accountant": "rdp", '
            '"max_participations": 3, "training": {"optimizer": "sgd", "lr": 0.1, "momentum": 0.0, '
            '"epochs": 1, '
            '"batch_size": 32, "gradient_clip": null}}'
        )


class TestRunFacts:
    def test_json_round_trip(self):
        facts = RunFacts(
            1.5,
            POISSON,
            "replace-one",
            "local",
            7,
            2.0,
            1e-6,
            "rdp",
            3,
            LocalTraining("adam", 0.03, gradient_clip=1.0),
        )
        assert RunFacts.from_dict(json.loads(json.dumps(facts.to_dict()))) == facts

    def test_a_client_is_in_no_more_releases_than_there_are(self):
        assert RunFacts(1.0, POISSON, rounds=7).releases == 7
        assert RunFacts(1.0, POISSON, "replace-one", "local", 7, max_participations=3).releases == 3
        assert RunFacts(1.0, POISSON, "replace-one", "local", 7, max_participations=9).releases == 7

    @pytest.mark.parametrize(
        "sampling", [POISSON, Sampling("poisson", 10, 1.0), Sampling("cyclic", 10, 0.5, 2)]
    )
    def test_a_server_that_adds_the_noise_keeps_no_cap(self, sampling):
        """It does not see who is in a sum: noise for one of a hundred releases would be that of one
        release."""
        with pytest.raises(
            ConfigError, match="max_participations is for trust = 'local' or 'distributed'"
        ):
            RunFacts(0.0, sampling, rounds=100, epsilon=1.0, delta=1e-5, max_participations=1)

    def test_whoever_sees_who_takes_part_gets_no_amplification(self):
        assert RunFacts(1.0, POISSON).accounted_rate == 0.1
        assert RunFacts(1.0, POISSON, "replace-one", "local").accounted_rate == 1.0

    def test_facts_without_a_budget_cannot_be_calibrated_to(self):
        assert RunFacts(0.0, POISSON, epsilon=2.0, delta=1e-6).budget() == (2.0, 1e-6)
        for budget in ({}, {"epsilon": 2.0}, {"delta": 1e-6}):
            with pytest.raises(ConfigError, match="no epsilon and delta"):
                RunFacts(0.0, POISSON, **budget).budget()


class TestLocalSteps:
    FACTS = RunFacts(
        1.0, POISSON, trust="local", rounds=6, max_participations=4, steps=LocalSteps(3, 0.2, 8.0)
    )

    def test_a_clients_examples_are_sampled_whoever_takes_part(self):
        assert self.FACTS.accounted_rate == 0.2
        assert (self.FACTS.releases, self.FACTS.noisy_sums) == (4, 12)

    def test_they_travel_and_other_facts_stay_as_they_were(self):
        assert RunFacts.from_dict(json.loads(json.dumps(self.FACTS.to_dict()))) == self.FACTS
        plain = RunFacts(1.0, POISSON)
        assert "steps" not in plain.to_dict()
        assert "steps" not in repr(plain)
        assert plain.noisy_sums == plain.releases

    @pytest.mark.parametrize("values", [(0, 0.1, 8.0), (1, 0.0, 8.0), (1, 1.5, 8.0), (1, 0.1, 0.0)])
    def test_range(self, values):
        with pytest.raises(ConfigError):
            LocalSteps(*values)

    def test_the_server_does_not_noise_local_steps(self):
        with pytest.raises(ConfigError, match="noised by the clients"):
            RunFacts(1.0, POISSON, steps=LocalSteps(3, 0.2, 8.0))


@pytest.mark.parametrize("wrong", ["1.0", None, math.nan, math.inf, -1.0])
def test_a_noise_multiplier_is_a_number(wrong):
    with pytest.raises(ConfigError, match="noise_multiplier must be finite and positive"):
        RunFacts(wrong, Sampling("poisson", 10, 0.5))


@pytest.mark.parametrize("kind", [RunFacts, Sampling, LocalSteps, Shares, Correlation, NoisyQuery])
def test_no_class_states_another_cost_than_that_of_the_fields(kind):
    """A rate, number of releases or bound of its own would be charged instead."""
    with pytest.raises(ConfigError, match=f"Mine cannot be derived from {kind.__name__}"):
        type("Mine", (kind,), {})


def test_facts_take_no_stand_ins():
    stand_in = SimpleNamespace(scheme="cyclic", population=9, rate=1 / 3, separation=3, rounds=6)
    with pytest.raises(ConfigError, match=r"sampling must be a fedlgm\.Sampling"):
        RunFacts(1.0, stand_in)
    with pytest.raises(ConfigError, match=r"noise must be a fedlgm\.correlation\.Correlation"):
        RunFacts(1.0, Sampling("cyclic", 9, 1 / 3, 3), rounds=6, noise=stand_in)


def test_an_unknown_accountant_is_refused():
    """It once fell through to Renyi's."""
    with pytest.raises(ConfigError, match="accountant"):
        RunFacts(1.0, Sampling("poisson", 10, 0.5), accountant="nonsense")
    with pytest.raises(ConfigError, match="accountant"):
        new_accountant("zcdp", [])
