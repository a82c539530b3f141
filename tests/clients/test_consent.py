"""A client under local trust refuses what it did not agree to, whoever asks."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from flwr.app import RecordDict

from clients import AnyClient, Consent
from clients.published_client import train_norms
from fedlgm import mechanisms
from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.noise.keys import KeyRing
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import NoisyQuery, ReleasePlan, RunFacts, Sampling
from fedlgm.planning.queries import BelowBound
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy import gaussian_epsilon
from fedlgm.privacy.guarantee import Guarantee
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly

LAYERS = LayerTable.from_sizes({"a": 3, "b": 5})
AGREED = RunFacts(4.0, Sampling("poisson", 10, 1.0), "replace-one", "local", 5)
LOCAL = ["privacy.trust=local", "privacy.max_participations=3"]
PROVEN = Guarantee("proven", "the Gaussian mechanism")


def plan_with(facts: RunFacts, mechanism: str = "snr-consistent") -> ReleasePlan:
    method = mechanisms.get(mechanism)
    return method.plan(method.table(LAYERS), facts, Transcript.start(torch.zeros(8)))


def laplace(multiplier: float) -> ReleasePlan:
    scale = np.full(2, 2.0 * multiplier)  # 1 / (1/b + 1/b)
    return ReleasePlan(LAYERS, np.ones(2), scale, AGREED, PROVEN, family="laplace")


def test_the_agreed_releases_are_made_and_not_one_more() -> None:
    consent, state, plan = Consent(replace(AGREED, rounds=2)), RecordDict(), plan_with(AGREED)
    consent.check(plan)
    consent.record(state, 7, "first", plan)
    consent.record(state, 7, "first", plan)  # the same noise again
    consent.record(state, 7, "second", plan)
    consent.record(state, 8, "first", plan)  # another client of the node
    with pytest.raises(PrivacyError, match="client 7 has made the 2 releases"):
        consent.record(state, 7, "third", plan)


def test_a_consent_needs_the_calibrated_noise() -> None:
    """With the facts of a recipe that nobody calibrated, any noise would do, at no cost."""
    for uncalibrated in (0, 0.0):
        with pytest.raises(ConfigError, match=r"agrees to any noise.*Method\.of\(\.\.\.\)\.facts"):
            Consent(replace(AGREED, noise_multiplier=uncalibrated))
    Consent(
        replace(AGREED, noise_multiplier=0.0), protected=False
    )  # of a published variant, which promises nothing


def test_less_noise_uses_the_budget_up_faster() -> None:
    weak = plan_with(replace(AGREED, noise_multiplier=2.0))
    with pytest.raises(PrivacyError, match="less noise"):
        Consent(replace(AGREED, rounds=3)).record(RecordDict(), 1, "only", weak)
    state, consent = RecordDict(), Consent(AGREED)
    consent.record(state, 1, "worth four", weak)
    consent.record(state, 1, "the fifth", plan_with(AGREED))
    with pytest.raises(PrivacyError):
        consent.record(state, 1, "one too many", plan_with(replace(AGREED, noise_multiplier=40.0)))


def test_central_trust_no_guarantee_and_weak_laplace_noise_are_refused() -> None:
    consent = Consent(AGREED)
    with pytest.raises(PrivacyError, match="central trust"):
        consent.check(plan_with(replace(AGREED, relation="add-remove", trust="central")))
    with pytest.raises(PrivacyError, match="without a guarantee"):
        consent.check(plan_with(replace(AGREED, noise_multiplier=0.0), "none"))
    with pytest.raises(PrivacyError, match="noise multiplier of 4"):
        replace(consent, family="laplace").check(laplace(3.9))
    replace(consent, family="laplace").check(laplace(4.0))


def test_no_detail_of_a_plan_can_loosen_the_bound() -> None:
    """Whatever the server writes into it: updates that nobody bounds, or a query with little
    noise."""
    consent, honest = Consent(AGREED), plan_with(AGREED)
    with pytest.raises(
        PrivacyError,
        match="bounded by the aggregator: it refuses a plan in which the trainer bounds them",
    ):
        consent.check(replace(honest, bounded_by="trainer"))
    with pytest.raises(PrivacyError, match="bounded by the trainer"):
        replace(consent, bounded_by="trainer").check(honest)

    def asks(sigma: float, name: str = "below-bound") -> ReleasePlan:
        written = replace(honest, queries=(NoisyQuery(BelowBound((3, 5)), sigma),)).to_json()
        return ReleasePlan.from_json(LAYERS, written.replace("below-bound", name))

    # The query's own bound counts, which no plan states: sqrt(2) / 2 beside one release at 4.
    assert asks(50.0).effective_multiplier == pytest.approx(
        (1 / 16 + 0.5 / 50**2) ** -0.5, rel=1e-8
    )
    consent.check(asks(50.0))
    consent.record(RecordDict(), 1, "little more than one release", asks(50.0))
    consent.record(RecordDict(), 1, "almost five", asks(1.5))
    with pytest.raises(PrivacyError, match="less noise"):
        consent.record(RecordDict(), 1, "more than five", asks(1.4))
    with pytest.raises(ConfigError, match="unknown auxiliary query"):
        asks(50.0, "everything")


def test_multipliers_of_another_law_are_not_compared() -> None:
    """1 / (epsilon of pure DP) and a Gaussian's sigma over its bound are different things."""
    with pytest.raises(
        PrivacyError, match="agreed to laplace noise: it refuses a plan with gaussian"
    ):
        Consent(AGREED, family="laplace").check(plan_with(AGREED))
    with pytest.raises(
        PrivacyError, match="agreed to gaussian noise: it refuses a plan with laplace"
    ):
        Consent(AGREED).check(laplace(4.0))
    laplace_client = Assembly(
        recipes.load("digits", [*LOCAL, "mechanism={name = 'laplace-inid'}", "privacy.epsilon=1"])
    ).privacy.consent()
    assert laplace_client is not None
    assert laplace_client.family == "laplace"


BASELINES = ("time-varying", "dpa", "full-dp", "sensitive", "adapldp")
HONEST = [(name, "equal-total") for name in (*BASELINES, "ladp", "snr-consistent", "gaussian-inid")]


@pytest.mark.parametrize(
    ("mechanism", "rule"), [*HONEST, *((name, "matched") for name in BASELINES)]
)
def test_an_honest_run_is_agreed_to_and_the_cheapest_plan_over_and_over_is_not(
    mechanism: str, rule: str
) -> None:
    rounds = 12
    options = [*LOCAL[:1], f"privacy.max_participations={rounds}", f"federation.rounds={rounds}"]
    options += [
        "training={optimizer = 'sgd', lr = 0.1, epochs = 1, batch_size = 16, gradient_clip = 1.0}"
    ]
    options.append(
        f"mechanism={{name = '{mechanism}'"
        + (f", calibration = '{rule}'}}" if mechanism in BASELINES else "}")
    )
    if rule == "matched":
        options += ["privacy.epsilon=0.2", "privacy.delta=0.02"]
    assembly = Assembly(recipes.load("digits", options))
    consent, transcript, state = assembly.privacy.consent(), assembly.privacy.start(), RecordDict()
    assert consent is not None
    plans = []
    for number in range(rounds):
        plan = assembly.privacy.method.plan(transcript)
        consent.check(plan)
        consent.record(state, 0, str(number), plan)
        plans.append(plan)
        mean = torch.full((plan.size,), 1e-3)
        transcript = transcript.extend(transcript.models[-1] + 1e-3, mean, plan)
    with pytest.raises(PrivacyError, match="refuses another"):
        consent.record(state, 0, "one more", plans[-1])
    worst = min(plans, key=lambda plan: plan.effective_multiplier)
    spent = (assembly.privacy.facts.noise_multiplier / worst.effective_multiplier) ** 2
    within = math.floor(consent.allowance * (1 + 1e-6) / spent)
    state = RecordDict()
    for number in range(within):
        consent.record(state, 0, str(number), worst)
    with pytest.raises(PrivacyError, match="refuses another"):
        consent.record(state, 0, "one more", worst)
    if mechanism in ("time-varying", "dpa"):
        assert within < rounds


def test_the_allowance_is_the_recipes_epsilon() -> None:
    """A server that asks for the least noise again and again gets what the recipe's epsilon allows,
    and not more."""
    options = [
        *LOCAL[:1],
        "privacy.max_participations=12",
        "federation.rounds=12",
        "mechanism={name = 'time-varying'}",
    ]
    assembly = Assembly(recipes.load("digits", options))
    consent, least = (
        assembly.privacy.consent(),
        assembly.privacy.facts.noise_multiplier / 2,
    )  # replace-one
    assert consent is not None
    assert consent.allowance is not None
    whole = gaussian_epsilon(math.sqrt(consent.allowance) / least, assembly.recipe.privacy.delta)
    assert whole == pytest.approx(assembly.recipe.privacy.epsilon, rel=1e-4)


@pytest.mark.parametrize(("cap", "last"), [(3, 3), (400, 12)])
def test_no_more_is_calibrated_for_than_a_client_can_take_part_in(cap: int, last: int) -> None:
    """Nobody knows in which rounds a client will be drawn: any of them must be agreed to, the
    costliest included."""
    options = [*LOCAL[:1], f"privacy.max_participations={cap}", "federation.rounds=12"]
    assembly = Assembly(recipes.load("digits", [*options, "mechanism={name = 'time-varying'}"]))
    plain = Assembly(recipes.load("digits", [*options, f"privacy.max_participations={last}"]))
    capped = Assembly(recipes.load("digits", options)).privacy.facts
    assert (capped.noise_multiplier, capped.releases) == (
        plain.privacy.facts.noise_multiplier,
        plain.privacy.facts.releases,
    )
    consent, transcript, plans = assembly.privacy.consent(), assembly.privacy.start(), []
    assert consent is not None
    assert consent.facts.releases == last
    for _ in range(12):
        plans.append(assembly.privacy.method.plan(transcript))
        transcript = transcript.extend(
            transcript.models[-1], torch.zeros(plans[-1].size), plans[-1]
        )
    for order in (plans, plans[::-1]):
        state = RecordDict()
        for number, plan in enumerate(order[:last]):
            consent.record(state, 0, str(number), plan)
        with pytest.raises(PrivacyError, match="refuses another"):
            consent.record(state, 0, "one more", order[0])


def test_raw_norms_are_handed_out_only_where_nothing_was_promised() -> None:
    client = Assembly(recipes.load("digits", LOCAL)).client(KeyRing.from_seed(1), AnyClient())
    with pytest.raises(PrivacyError, match="no layer norms"):
        train_norms(client, object(), object())  # type: ignore[arg-type]
    assert "train.norms" not in str(client.as_app()._registered_funcs)


def test_a_recipes_clients_agree_to_its_budget() -> None:
    consent = Assembly(recipes.load("digits", LOCAL)).privacy.consent()
    assert consent is not None
    assert consent.protected
    assert consent.facts.releases == 3
    assert Assembly(recipes.load("digits")).privacy.consent() is None
    nothing = Assembly(
        recipes.load("digits", [*LOCAL, "mechanism={name = 'none'}"])
    ).privacy.consent()
    assert nothing is not None
    assert not nothing.protected
