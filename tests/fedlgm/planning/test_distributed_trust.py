"""Noise in shares: what is refused, what it costs whom, whose noise is drawn once, and when a round
is void."""

from __future__ import annotations

import pytest
import torch
from flwr.app import RecordDict

from clients.consent import Agreed
from fedlgm import Guarantee, LayerTable, LocalTraining, ReleasePlan, RunFacts, Sampling
from fedlgm.aggregation import BoundedSum
from fedlgm.aggregation.client_release import Asked
from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.noise import correlation
from fedlgm.noise.integer_noise import LAWS
from fedlgm.noise.keys import KeyRing
from fedlgm.noise.release import local_release
from fedlgm.planning import charging
from fedlgm.planning import trust as noised_by
from fedlgm.planning.distributed_trust import Shares
from fedlgm.planning.facts import LocalSteps
from fedlgm.planning.plan import UnprotectedPlan
from fedlgm.privacy import composed_epsilon, discrete_gaussian_tau, distributed_epsilon, epsilon
from fedlgm.privacy.cost import Cost
from fedlgm.privacy.events import decode, encode
from fedlgm.privacy.ledger import Ledger
from strategies.releaser import Releaser

LAYERS = LayerTable.from_sizes({"a": 40, "b": 5})
PROVEN = Guarantee("proven", "an example")
GIVEN = {"trust": "distributed", "accountant": "rdp", "shares": Shares(7, 1)}


def facts_of(sampling=None, relation="replace-one", multiplier=2.0, **more) -> RunFacts:
    return RunFacts(multiplier, sampling or Sampling("fixed", 10, 1.0), relation, **(GIVEN | more))


def plan_of(facts=None, kind=ReleasePlan, guarantee=PROVEN, **more) -> ReleasePlan:
    return kind(LAYERS, [1.0, 2.0], [6.0, 9.0], facts or facts_of(), guarantee, **more)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"shares": None}, r"needs shares: the \[distributed\] section"),
        ({"trust": "local"}, "shares of the noise are for trust 'distributed', not 'local'"),
        ({"accountant": "pld"}, "set privacy.accountant = 'rdp'"),
        (
            {"sampling": Sampling("poisson", 10, 0.5)},
            "needs a public number of nodes in every round",
        ),
        ({"relation": "add-remove"}, "must be 'replace-one' under distributed trust"),
        ({"steps": LocalSteps(2, 0.1, 8.0)}, "set privacy.unit|use privacy.unit = 'client'"),
        ({"shares": Shares(11, 1)}, "a round asks 10 nodes, so a threshold of 11 is never met"),
        ({"shares": Shares(5, 0)}, "the threshold must be at least 6"),
        (
            {"shares": Shares(7, 4)},
            "could open two sums of one round: the threshold must be at least 8",
        ),
        (
            {"noise": correlation.get("banded", 4, bands=2), "rounds": 4},
            "correlated noise needs trust = 'central': under distributed trust the server sees",
        ),
    ],
)
def test_facts_that_do_not_go_with_it_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        facts_of(**wrong)


@pytest.mark.parametrize(
    ("threshold", "colluders", "message"),
    [
        (0, 0, "threshold must be"),
        (3, -1, "colluders must be"),
        (3, 3, "leaves no honest node"),
        (2.5, 0, "threshold"),
    ],
)
def test_shares_that_no_node_can_have_are_refused(threshold, colluders, message):
    with pytest.raises(ConfigError, match=message):
        Shares(threshold, colluders)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"family": "laplace"},
            "integer noise at a Gaussian's cost, but the plan has laplace noise",
        ),
        ({"bounded_by": "trainer"}, "needs contributions that the sum bounds"),
        (
            {"kind": UnprotectedPlan, "guarantee": Guarantee("none", "an example")},
            "needs a private plan",
        ),
    ],
)
def test_plans_that_cannot_be_carried_out_are_refused(more, message):
    with pytest.raises(ConfigError, match=message):
        plan_of(**more)


@pytest.mark.parametrize("noise", LAWS)
def test_plans_and_events_travel(noise):
    plan = plan_of(
        facts_of(
            epsilon=8.0, delta=1e-5, rounds=3, max_participations=3, shares=Shares(7, 1, noise)
        )
    )
    text = plan.to_json()
    again = ReleasePlan.from_json(LAYERS, text)
    assert again.to_json() == text
    assert again.facts == plan.facts
    assert decode(encode(plan.event)) == plan.event
    assert Cost.of(plan.event).figure == pytest.approx(plan.effective_multiplier / 2)


@pytest.mark.parametrize("noise", LAWS)
@pytest.mark.parametrize("relation_factor", [(1.0, 4.3772), (0.5, 9.9973)])
def test_one_release_costs_a_little_more_than_the_exact_gaussian(relation_factor, noise):
    """The exact costs are known (one release at multiplier 1, zero-out and replace-one); what is
    proven is above."""
    multiplier, exact = relation_factor
    event = noised_by.get("distributed", Shares(7, 1, noise)).event(multiplier, 1.0)
    assert round(epsilon(multiplier, 1e-5, steps=1), 4) == exact
    assert exact < composed_epsilon([(event, 1)], 1e-5, "rdp") < exact * 1.1
    with pytest.raises(PrivacyError, match="accountant = 'rdp'"):
        composed_epsilon([(event, 1)], 1e-5, "pld")


@pytest.mark.parametrize("rounds", [1, 100])
def test_the_charge_covers_the_law_of_the_honest_nodes_noise(rounds):
    honest, each, units = 6, 4.0, 10
    plan_multiplier = each * honest**0.5 / units
    event = noised_by.get("distributed", Shares(7, 1)).event(plan_multiplier / 2, 1.0)
    law = {"deviation": each, "parties": honest, "sensitivity": 2 * units, "dimension": 10**7}
    exact = distributed_epsilon("discrete-gaussian", **law, rounds=rounds, delta=1e-5)
    assert composed_epsilon([(event, rounds)], 1e-5, "rdp") >= exact * (1 - 1e-3)
    assert discrete_gaussian_tau(each, honest) < 1e-60


@pytest.mark.parametrize(
    ("rate", "rounds", "multiplier", "readers", "server"),
    [(0.1, 100, 1.0, 7.0466, 17.8566), (0.1, 300, 2.0, 4.1833, 14.8299)],
)
def test_known_answers_of_the_two_epsilons(rate, rounds, multiplier, readers, server):
    assert round(epsilon(multiplier, 1e-5, steps=rounds, sampling_rate=rate), 4) == readers
    assert round(epsilon(multiplier, 1e-5, steps=round(rate * rounds)), 4) == server


def test_readers_have_the_noise_of_the_threshold_and_the_plan_says_both():
    facts = facts_of(epsilon=8.0, delta=1e-5, rounds=10, max_participations=10, multiplier=6.0)
    found = facts.noised_by.readers_epsilon(facts, 10)
    assert found == pytest.approx(
        epsilon(6.0 * (7 / 6) ** 0.5, 1e-5, steps=10, relation="replace-one", accountant="rdp")
    )
    assert found < epsilon(6.0, 1e-5, steps=10, relation="replace-one", accountant="rdp")
    reason = plan_of(facts).guarantee.reason
    assert "against the server with 1 colluding nodes" in reason
    assert f"readers of the released models: epsilon {found:.4g}" in reason
    assert facts.noised_by.readers_epsilon(facts, 0) == 0.0


def test_sampling_amplifies_for_readers_alone_and_only_without_a_cap():
    given = {
        "sampling": Sampling("fixed", 100, 0.1),
        "epsilon": 8.0,
        "delta": 1e-5,
        "multiplier": 6.0,
        "rounds": 50,
    }
    free, capped = facts_of(**given), facts_of(**given, max_participations=5)
    assert free.accounted_rate == capped.accounted_rate == 1.0
    every = epsilon(6.0 * (7 / 6) ** 0.5, 1e-5, steps=50, relation="replace-one", accountant="rdp")
    assert free.noised_by.readers_epsilon(free, 50) < every / 2
    few = epsilon(6.0 * (7 / 6) ** 0.5, 1e-5, steps=5, relation="replace-one", accountant="rdp")
    assert capped.noised_by.readers_epsilon(capped, 50) == pytest.approx(few)


def test_noise_is_bound_to_data_round_and_client_and_is_repeated_with_them():
    plan, keys = plan_of(), KeyRing.from_seed(None)
    update = torch.randn(1, 45)
    first, name = local_release(update, plan, keys, 1, 3)
    again, same = local_release(update, plan, keys, 1, 3)
    assert name == same
    assert torch.equal(first, again)
    assert torch.equal(first, first.round())
    seen = {name}
    for other in (
        local_release(update * 1.1, plan, keys, 1, 3),
        local_release(update, plan, keys, 2, 3),
        local_release(update, plan, keys, 1, 4),
        local_release(update, plan, keys.derive(b"another cohort"), 1, 3),
    ):
        seen.add(other[1])
        difference = other[0] - first
        assert difference.std() > plan.effective_multiplier * 2**24 / 6**0.5 / 2, (
            "the noise is another"
        )
    assert len(seen) == 5


def _answers(plan: ReleasePlan, count: int) -> BoundedSum:
    total = BoundedSum.empty(plan)
    for client in range(count):
        own, _ = local_release(torch.full((1, 45), 0.1), plan, KeyRing.from_seed(5), 1, client)
        total.merge(own, 1, 0)
    return total


def test_a_round_below_its_threshold_is_void(tmp_path):
    plan = plan_of()
    with Ledger(tmp_path / "ledger.sqlite", owner="an example") as ledger:
        releaser = Releaser(KeyRing.from_seed(1), ledger)
        releaser.charge_clients(plan, 1, range(6))
        assert not releaser.mean(_answers(plan, 6), plan, 1).any()
        assert releaser.mean(_answers(plan, 7), plan, 1).all()
        assert ledger.participations() == dict.fromkeys(range(6), 1)  # the void round was charged


def test_the_mean_is_over_the_public_number_whoever_answers(tmp_path):
    quiet = ReleasePlan(LAYERS, [1.0, 2.0], [1e-2, 1e-2], facts_of(), PROVEN)
    with Ledger(tmp_path / "ledger.sqlite", owner="an example") as ledger:
        mean = Releaser(KeyRing.from_seed(1), ledger).mean(_answers(quiet, 8), quiet, 1)
    assert mean[:40] == pytest.approx(0.1 * 8 / 10, abs=1e-2)


def test_a_client_that_is_not_summed_refuses():
    plan, model = plan_of(), torch.zeros(45)
    with pytest.raises(PrivacyError, match="answer separately"):
        Agreed(KeyRing.from_seed(None), None, RecordDict()).admit(Asked(plan, model, 1, [0]))
    assert Agreed(KeyRing.from_seed(None), None, RecordDict(), summed=True).admit(
        Asked(plan, model, 1, [0])
    )


def test_single_precision_does_not_hold_words():
    plan = plan_of()
    with pytest.raises(ConfigError, match="double precision"):
        plan.facts.noised_by.source().add_(torch.zeros(45), plan, KeyRing.from_seed(1), 1, 0, "cpu")


def test_whole_orders_cost_a_little_more_noise_and_stay_within_the_budget():
    budget = {"epsilon": 8.0, "delta": 1e-5, "rounds": 20, "max_participations": 20}
    gaussian, skellam = (facts_of(**budget, shares=Shares(7, 1, noise)) for noise in LAWS)
    least, more = charging.of(gaussian).calibrate(), charging.of(skellam).calibrate()
    assert least < more < 1.01 * least
    event = skellam.noised_by.event(more / 2, 1.0)
    assert 7.999 < composed_epsilon([(event, 20)], 1e-5, "rdp") <= 8.0
    with pytest.raises(
        ConfigError, match="unknown noise 'binomial'; known: discrete-gaussian, skellam"
    ):
        Shares(7, 1, "binomial")


def test_other_settings_keep_their_texts():
    assert facts_of().to_dict()["shares"] == {"threshold": 7, "colluders": 1}
    assert (
        "shares"
        not in RunFacts(1.0, Sampling("poisson", 10, 0.5), training=LocalTraining()).to_dict()
    )


def test_a_law_that_costs_more_than_twice_the_multiplier_gets_the_noise_that_it_needs():
    noised_by = facts_of(shares=Shares(7, 1, "skellam")).noised_by
    assert noised_by.calibrate(1.0, lambda multiplier: multiplier >= 5.0) == pytest.approx(5.0)
    assert noised_by.calibrate(1.0, lambda multiplier: True) == 1.0
