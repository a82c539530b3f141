"""A run as one mechanism: known multipliers, prefixes that compose exactly, rows that are released
again."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from dp_accounting import dp_event
from hypothesis import given
from hypothesis import strategies as st

from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.mechanisms import get
from fedlgm.mechanisms.method import Method
from fedlgm.noise import correlation
from fedlgm.planning import charging
from fedlgm.planning.facts import RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy import composed_epsilon, gaussian_mu
from fedlgm.privacy.events import gaussian_event
from fedlgm.privacy.whole_run import WholeRun, whole_run


def banded(rounds, bands, scheme, *, rate=0.1, epsilon=3.0, relation="add-remove", noise="banded"):
    return RunFacts(
        0.0,
        Sampling(scheme, 500, rate, bands),
        relation,
        rounds=rounds,
        epsilon=epsilon,
        delta=1e-5,
        noise=None if noise == "identity" else correlation.get(noise, rounds, bands=bands),
    )


# Multipliers of T = 300 or 100, N = 500, 50 clients expected a round, delta = 1e-5, by PLD with
# another library's code.
@pytest.mark.parametrize(
    ("rounds", "epsilon", "scheme", "bands", "multiplier"),
    [
        (300, 1, "cyclic", 10, 20.434),
        (300, 3, "cyclic", 10, 7.617),
        (300, 8, "min-separation", 10, 3.288),
        (300, 16, "cyclic", 10, 1.885),
        (100, 8, "cyclic", 10, 1.898),
        (300, 3, "grouped-poisson", 2, 3.572),
    ],
)
def test_known_multipliers(rounds, epsilon, scheme, bands, multiplier):
    relation = "zero-out" if scheme == "min-separation" else "add-remove"
    facts = banded(rounds, bands, scheme, epsilon=epsilon, relation=relation)
    found = whole_run(facts).calibrate(epsilon, 1e-5, "pld")
    assert found == pytest.approx(multiplier, rel=3e-4 if epsilon < 16 else 6e-4)


def test_replace_one_doubles_what_a_client_moves():
    one, two = (
        whole_run(banded(100, 10, "cyclic", relation=r)) for r in ("add-remove", "replace-one")
    )
    assert two.calibrate(3.0, 1e-5, "pld") == pytest.approx(2 * one.calibrate(3.0, 1e-5, "pld"))
    assert two.event(0, 4.0).noise_multiplier == pytest.approx(one.event(0, 2.0).noise_multiplier)


@pytest.mark.parametrize(
    ("scheme", "noise"),
    [
        ("cyclic", "banded"),
        ("cyclic", "identity"),
        ("min-separation", "square-root"),
        ("grouped-poisson", "banded"),
    ],
)
def test_the_whole_run_meets_its_budget(scheme, noise):
    relation = "zero-out" if scheme == "min-separation" else "add-remove"
    facts = banded(37, 10 if scheme == "cyclic" else 4, scheme, relation=relation, noise=noise)
    run = whole_run(facts)
    spent = composed_epsilon(run.events(run.calibrate(3.0, 1e-5, "pld")), 1e-5)
    assert 3.0 * (1 - 2e-5) < spent <= 3.0


@given(
    st.integers(2, 40),
    st.integers(1, 12),
    st.floats(0.3, 30.0),
    st.lists(st.floats(-0.5, 1.0), min_size=0, max_size=11),
)
def test_prefixes_cost_what_they_are(rounds, separation, multiplier, others):
    """Charges of the first t rounds compose to one Gaussian of sigma_eff / sens_t: never less, by
    1e-7 at most more."""
    noise = correlation.Correlation(
        "own", rounds, np.array([1.0, *others][: min(rounds, separation + 2)])
    )
    run = WholeRun(noise, Sampling("min-separation", 40, 1 / 40, separation), "zero-out")
    precision = 0.0
    for position in range(rounds):
        event = run.event(position, multiplier)
        if not isinstance(event, dp_event.NoOpDpEvent):
            precision += event.noise_multiplier**-2.0
        exact = noise.prefix_sensitivity(position + 1, separation) / multiplier
        assert exact * (1 - 1e-12) <= math.sqrt(precision)
    whole = noise.sensitivity(separation) / multiplier
    assert whole <= math.sqrt(precision) * (1 + 1e-12)
    assert math.sqrt(precision) <= whole * (1 + 1e-6)


@given(st.integers(1, 30), st.integers(1, 6))
def test_amplified_charges_are_ahead_of_every_group(rounds, groups):
    """By the end of any round as many blocks are charged as a member of any group has begun."""
    noise = correlation.get("square-root", rounds, bands=min(groups, rounds))
    run = WholeRun(noise, Sampling("grouped-poisson", 600, 0.1, groups), "add-remove")
    charged = 0
    for position in range(rounds):
        event = run.event(position, 2.0)
        assert isinstance(event, dp_event.NoOpDpEvent) == (position % groups != 0)
        charged += not isinstance(event, dp_event.NoOpDpEvent)
        for group in range(groups):
            assert charged >= len(range(group, position + 1, groups))
    assert charged == run.participations
    block = run.event(0, 2.0)
    assert block.sampling_probability == pytest.approx(0.1 * groups)
    assert block.event.noise_multiplier == pytest.approx(2.0 / noise.column_norms().max(), rel=1e-7)


def test_a_row_that_is_released_again():
    """One more row of C with its own noise: bounded by the most that one client's rounds weigh in
    it."""
    noise = correlation.get("banded", 12, bands=4)
    run = WholeRun(noise, Sampling("cyclic", 40, 0.25, 4), "add-remove")
    for position in range(12):
        reach = noise.matrix()[
            position, max(0, position - 3) : position + 1
        ].max()  # rounds of one client are 4 apart
        assert run.repeated_event(position, 3.0).noise_multiplier == pytest.approx(
            3.0 / reach, rel=1e-6
        )
    # Appending the row to C and computing its sensitivity anew never gives more than both charges.
    for position in range(12):
        longer = np.vstack([noise.matrix(), noise.matrix()[position]])
        exact = max(
            np.linalg.norm(longer[:, list(pattern)].sum(axis=1))
            for first in range(4)
            for pattern in [range(first, 12, 4)]
        )
        charged = noise.sensitivity(4) ** 2 + noise.row_bound(position, 4) ** 2
        assert exact**2 <= charged * (1 + 1e-12)


class TestPlans:
    layers = LayerTable.from_sizes({"a": 30, "b": 5})

    def method(self, mechanism="snr-consistent", facts=None, **options):
        return Method.calibrate(
            get(mechanism, **options), self.layers, facts or banded(20, 10, "cyclic")
        )

    def plans(self, method):
        return [method.plan(Transcript(t, (np.zeros(1),))) for t in range(method.facts.rounds)]  # type: ignore[arg-type]

    def test_a_plan_knows_its_place(self):
        method = self.method()
        for position, plan in enumerate(self.plans(method)):
            assert plan.event == charging.of(plan.facts).run.event(
                position, method.facts.least_multiplier
            )
            again = type(plan).from_json(self.layers, plan.to_json())
            assert again.event == plan.event
            assert again.facts == plan.facts

    def test_a_plan_without_its_place_says_so(self):
        method = self.method()
        plan = method.mechanism.plan(self.layers, method.facts, Transcript(0, (np.zeros(1),)))  # type: ignore[arg-type]
        for figure in ("event", "repeated_event", "round_sigma", "noise_norms"):
            with pytest.raises(PrivacyError, match=r"make plans with Method\.plan"):
                getattr(plan, figure)

    def test_more_rounds_than_planned_are_not_covered(self):
        method = self.method()
        plan = method.plan(Transcript(20, (np.zeros(1),)))  # type: ignore[arg-type]
        with pytest.raises(PrivacyError, match="made for 20 rounds: there is no round 21"):
            _ = plan.event

    def test_a_round_with_less_noise_is_no_part_of_the_run(self):
        plan = self.plans(self.method())[3]
        replace(plan, sigma=plan.sigma * 1.5)
        with pytest.raises(PrivacyError, match="no round has less noise"):
            replace(plan, sigma=plan.sigma * 0.999)

    def test_every_allocation_spends_the_same(self):
        """One factor multiplies every layer: the allocation's shares and the cost do not depend on
        C."""
        for name in (
            "uniform",
            "snr-consistent",
            "min-total-noise",
            "dimension-adjusted",
            "gaussian",
            "gaussian-inid",
        ):
            method = Method.calibrate(
                get(name), get(name).table(self.layers), banded(20, 10, "cyclic")
            )
            spent = composed_epsilon([(plan.event, 1) for plan in self.plans(method)], 1e-5)
            assert spent == pytest.approx(3.0, rel=2e-5)
            assert spent <= 3.0

    def test_the_guarantee_says_what_it_rests_on(self):
        for scheme, relation, said in (
            (
                "cyclic",
                "add-remove",
                "nobody takes part twice within 4 rounds; who takes part when may be known",
            ),
            (
                "min-separation",
                "zero-out",
                "nobody takes part twice within 4 rounds; who takes part when may be known",
            ),
            ("grouped-poisson", "add-remove", "and who takes part in a group's round stays secret"),
        ):
            facts = banded(
                20, 4, scheme, relation=relation, rate=0.25 if scheme == "cyclic" else 0.1
            )
            plan = self.plans(Method(get("uniform"), self.layers, facts.with_multiplier(1.0)))[1]
            assert plan.guarantee.status == "proven"
            assert plan.guarantee.reason.count(said) == 1
            assert relation in plan.guarantee.sentence(noise_reproducible=False)


def test_mu_of_the_run():
    """Against the closed form: mu of the whole run is sens(C) / sigma_eff."""
    run = whole_run(banded(100, 10, "cyclic"))
    multiplier = run.calibrate(3.0, 1e-5, "pld")
    assert run.sensitivity / multiplier == pytest.approx(gaussian_mu(3.0, 1e-5), rel=1e-6)
    assert composed_epsilon(
        [(gaussian_event(multiplier / run.sensitivity), 1)], 1e-5
    ) == pytest.approx(3.0, rel=1e-6)


@pytest.mark.parametrize(
    ("name", "sampling", "relation", "message"),
    [
        ("banded", Sampling("poisson", 10, 0.2), "add-remove", "needs to know how many rounds"),
        ("banded", Sampling("fixed", 10, 0.2), "replace-one", "needs to know how many rounds"),
        (
            "banded",
            Sampling("grouped-poisson", 10, 0.2, 2),
            "add-remove",
            "10 bands with 2 groups is not proven",
        ),
        (
            "blt",
            Sampling("grouped-poisson", 10, 0.2, 2),
            "add-remove",
            "a buffered strategy with 2 groups",
        ),
        (
            "banded",
            Sampling("min-separation", 10, 0.2, 2),
            "add-remove",
            "use relation = 'zero-out'",
        ),
        (
            "identity",
            Sampling("grouped-poisson", 10, 0.2, 2),
            "replace-one",
            "proven for 'add-remove' and 'zero-out'",
        ),
        ("identity", Sampling("cyclic", 10, 0.5, 2), "swap", "unknown relation 'swap'"),
    ],
)
def test_what_is_not_proven_is_refused(name, sampling, relation, message):
    with pytest.raises(ConfigError, match=message):
        WholeRun(correlation.get(name, 10), sampling, relation)


@pytest.mark.parametrize("scheme", ["cyclic", "grouped-poisson"])
@pytest.mark.parametrize("position", [-1, 10, 11])
def test_no_round_outside_the_run_has_a_cost(scheme, position):
    rate = 0.5 if scheme == "cyclic" else 0.2
    run = WholeRun(
        correlation.get("banded", 10, bands=2), Sampling(scheme, 10, rate, 2), "add-remove"
    )
    for cost in (run.event, run.repeated_event):
        with pytest.raises(
            PrivacyError, match=f"the run was made for 10 rounds: there is no round {position + 1}"
        ):
            cost(position, 1.0)
    with pytest.raises(PrivacyError, match="there is no round 11"):
        run.events(1.0, 11)
