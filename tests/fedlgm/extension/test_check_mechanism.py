"""The test kit for mechanisms: every bundled one passes, each way to break the contract is one
sentence."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import simulations
from fedlgm import mechanisms
from fedlgm.errors import ConfigError, FedlgmError
from fedlgm.extension.loader import load_object
from fedlgm.extension.testing import check_mechanism
from fedlgm.mechanisms import Mechanism, UsesPrivateNorms
from fedlgm.mechanisms.dp_sgd import DPSGD
from fedlgm.mechanisms.method import Method
from fedlgm.planning import allocation, queries
from fedlgm.planning.clipping import Scaling
from fedlgm.planning.facts import LocalSteps, LocalTraining, RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan, UnprotectedPlan
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.events import gaussian_event
from fedlgm.privacy.guarantee import Guarantee
from fedlgm.training.example_level.scaling import FlatClip

PROVEN = Guarantee("proven", "test")
EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
LOCAL = RunFacts(
    0.0,
    Sampling("poisson", 100, 0.1),
    "replace-one",
    "local",
    rounds=4,
    epsilon=8.0,
    delta=1e-5,
    training=LocalTraining(gradient_clip=1.0),
)


@pytest.mark.parametrize("name", mechanisms.names())
def test_bundled_mechanisms_pass(name: str) -> None:
    if name != "client-ladp":  # whose clients add their own noise
        check_mechanism(mechanisms.get(name))
    check_mechanism(mechanisms.get(name), facts=LOCAL)


EXAMPLES_LOCAL = replace(
    LOCAL, relation="add-remove", accountant="rdp", steps=LocalSteps(3, 0.1, 8.0)
)


@pytest.mark.parametrize("name", mechanisms.names("example"))
@pytest.mark.parametrize("facts", [None, EXAMPLES_LOCAL])
def test_bundled_example_level_mechanisms_pass(name: str, facts: RunFacts | None) -> None:
    check_mechanism(mechanisms.get(name), facts=facts)


NORMS = ["public", "stale", "quantile", "shares"]


@pytest.mark.parametrize(
    ("allocation", "norms"),
    [
        *((name, None) for name in allocation.names()),
        *zip(allocation.names(), itertools.cycle(NORMS), strict=False),
    ],
)
def test_per_layer_dp_sgd_passes(allocation: str, norms: str | None) -> None:
    clip = {} if norms is None else {"clip": "med", "norms": norms}
    check_mechanism(mechanisms.get("dp-sgd", style="per-layer", allocation=allocation, **clip))


@dataclass(frozen=True)
class Forgetful(DPSGD):
    """Scales every example to twice its bound."""

    def scaling(self, plan: ReleasePlan) -> Scaling:
        return FlatClip(2 * self.bound)


def test_a_scaling_beyond_the_plan_is_noticed() -> None:
    with pytest.raises(FedlgmError, match="longer than the plan's bounds"):
        check_mechanism(Forgetful("forgetful"))


@pytest.mark.parametrize(
    "options", [{"norms": "stale"}, {"norms": "quantile"}, {"norms": "shares"}, {"norms": "public"}]
)
def test_sound_medclip_passes(options: dict[str, Any]) -> None:
    check_mechanism(mechanisms.get("snr-consistent", clip="med", **options))


def test_the_example_of_the_documentation_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    kind = load_object("own_mechanism:InverseSize", "mechanism")
    check_mechanism(kind("inverse-size"))
    lines = [
        line for line in (EXAMPLES / "own_mechanism.py").read_text().splitlines() if line.strip()
    ]
    assert len(lines) <= 20


def test_the_query_of_the_documentation_is_answered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    kind = load_object("own_query:FallingBound", "mechanism")
    check_mechanism(kind("falling-bound"))
    changes = ["mechanism.name=own_query:FallingBound", "federation.rounds=3"]
    result = simulations.simulate("digits", overrides=changes, run_dir=tmp_path / "run")
    bounds = [np.linalg.norm(row["clip"]) for row in result.history[1:]]
    assert bounds[0] == pytest.approx(1.0)
    assert bounds[-1] < 1.0  # the updates of this recipe are short
    assert 7.9 < result.epsilon <= 8


def test_a_query_that_is_not_registered_is_refused_before_a_run(tmp_path: Path) -> None:
    class Unknown(queries.BelowShare):
        name = "unknown-to-clients"

    @dataclass(frozen=True)
    class Asking(Equal):
        def plan(self, layers, facts, transcript):
            plan = super().plan(layers, facts, transcript)
            query = Unknown(tuple(layers.sizes.tolist()))
            asked = queries.NoisyQuery(query, query.bound * facts.noise_multiplier / 0.1**0.5)
            return replace(plan, sigma=plan.sigma / 0.9**0.5, queries=(asked,))

    with pytest.raises(
        ConfigError, match=r"unknown-to-clients'.*register your own .*fedlgm\.queries\.register"
    ):
        simulations.simulate(mechanism=Asking("asking"), run_dir=tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@dataclass(frozen=True)
class Equal(Mechanism):
    """All layers alike, at the run's multiplier."""

    def plan(self, layers, facts, transcript):
        clip = np.full(len(layers), len(layers) ** -0.5)
        return ReleasePlan(
            layers, clip, np.full(len(layers), facts.noise_multiplier), facts, PROVEN
        )


class Impure(Equal):
    counter = itertools.count(1)

    def plan(self, layers, facts, transcript):
        weights = np.roll(np.arange(1.0, len(layers) + 1), next(self.counter))
        sigma = np.full(len(layers), facts.noise_multiplier)
        return ReleasePlan(layers, weights / np.linalg.norm(weights), sigma, facts, PROVEN)


class HalfTheNoise(Equal):
    def plan(self, layers, facts, transcript):
        plan = super().plan(layers, facts, transcript)
        return replace(plan, sigma=plan.sigma / 2)


class OtherFacts(Equal):
    def plan(self, layers, facts, transcript):
        return super().plan(
            layers, replace(facts, sampling=Sampling("poisson", 10**6, 1e-6)), transcript
        )


class Cheaper(Equal):
    """Claims a larger multiplier than its parts have."""

    def plan(self, layers, facts, transcript):
        plan = super().plan(layers, facts, transcript)
        object.__setattr__(plan, "effective_multiplier", 2 * plan.effective_multiplier)
        return plan


class OtherUnit(Equal):
    def plan(self, layers, facts, transcript):
        return replace(
            super().plan(layers, facts, transcript), guarantee=Guarantee("proven", "", unit="user")
        )


class OtherNoise(Equal):
    """Laplace noise after a release above 0, with the same figure for its multiplier."""

    def plan(self, layers, facts, transcript):
        positive = transcript.mean is not None and float(transcript.mean[0]) > 0
        family = "laplace" if positive else "gaussian"
        clip = np.full(len(layers), 1 / (len(layers) if positive else len(layers) ** 0.5))
        return ReleasePlan(
            layers, clip, np.full(len(layers), facts.noise_multiplier), facts, PROVEN, family
        )


class NoCosts(Equal):
    def costs(self, layers, rounds):
        return np.ones(1)


class NoPlan(Equal):
    def plan(self, layers, facts, transcript):
        return {"clip": [1.0]}


class Remembers(Equal):
    """Spreads noise by the rounds it has planned, which a resumed run's mechanism has not."""

    def plan(self, layers, facts, transcript):
        seen = self.__dict__.setdefault("seen", set())
        earlier = sum(round < transcript.rounds for round in seen)
        seen.add(transcript.rounds)
        weights = np.roll(np.arange(1.0, len(layers) + 1), earlier)
        sigma = np.full(len(layers), facts.noise_multiplier)
        return ReleasePlan(layers, weights / np.linalg.norm(weights), sigma, facts, PROVEN)


class ChangesThePast(Equal):
    def plan(self, layers, facts, transcript):
        transcript.models[-1].abs_()
        return super().plan(layers, facts, transcript)


class Fails(Equal):
    def plan(self, layers, facts, transcript):
        return 1 / (transcript.rounds - transcript.rounds)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        (Remembers, r"after earlier rounds plan\(\) returns a different plan from a new object"),
        (ChangesThePast, "changes the past releases"),
        (Fails, r"mechanism 'broken': ZeroDivisionError: .*\(test_check_mechanism.py, line"),
        (Impure, "must be pure"),
        (HalfTheNoise, "override costs"),
        (OtherFacts, "facts are not the run's"),
        (OtherUnit, "is for one user, but one client is protected"),
        (OtherNoise, "fix the kind of noise before the run"),
        (NoCosts, "one figure per round"),
        (NoPlan, "must return a ReleasePlan"),
    ],
)
def test_what_breaks_the_contract_is_refused_in_one_sentence(
    kind: type[Mechanism], sentence: str
) -> None:
    with pytest.raises((FedlgmError, AttributeError), match=sentence) as caught:
        check_mechanism(kind("broken"))
    assert "\n" not in str(caught.value)


class NoDataclass(Mechanism):
    """Its own constructor leaves the name out."""

    def __init__(self) -> None: ...

    def plan(self, layers, facts, transcript):
        raise NotImplementedError


@pytest.mark.parametrize("given", [NoDataclass(), Equal, "uniform"])
def test_what_is_no_mechanism_is_refused_in_one_sentence(given: Any) -> None:
    with pytest.raises(FedlgmError, match=r"derived from fedlgm.Mechanism, made with its name"):
        check_mechanism(given)


class LouderAfterLargeReleases(Equal):
    """How much noise there is follows from what was released, always within what `costs` says."""

    def plan(self, layers, facts, transcript):
        plan = super().plan(layers, facts, transcript)
        large = transcript.mean is not None and float(transcript.mean[0]) > 0
        return replace(plan, sigma=plan.sigma * (2.0 if large else 1.0))


def test_a_cost_that_follows_releases_is_noticed() -> None:
    with pytest.raises(FedlgmError, match="how noise is spread, but not how much noise there is"):
        check_mechanism(LouderAfterLargeReleases("louder"))


class QuietAfterHugeReleases(Equal):
    """Adds less noise than it states, but only after a release that ordinary rounds hardly show."""

    def costs(self, layers, rounds):
        return np.full(rounds, 4.0)

    def plan(self, layers, facts, transcript):
        plan = super().plan(layers, facts, transcript)
        huge = transcript.mean is not None and float(transcript.mean.abs().max()) > 100
        return replace(plan, sigma=plan.sigma / (2.0 if huge else 1.0))


class LouderAfterSilence(LouderAfterLargeReleases):
    def plan(self, layers, facts, transcript):
        plan = Equal.plan(self, layers, facts, transcript)
        silent = transcript.mean is not None and not transcript.mean.any()
        return replace(plan, sigma=plan.sigma * (2.0 if silent else 1.0))


@pytest.mark.parametrize("kind", [QuietAfterHugeReleases, LouderAfterSilence])
def test_pasts_that_differ_much_are_tried(kind: type[Mechanism]) -> None:
    with pytest.raises(FedlgmError, match="how noise is spread, but not how much noise there is"):
        check_mechanism(kind("follows"))


class TestARunsOwnPlans:
    """What the kit finds is refused in a run as well, whether or not its user has called the
    kit."""

    LAYERS = LayerTable.from_sizes({"a": 3, "b": 2})
    FACTS = RunFacts(1.0, Sampling("fixed", 10, 0.5), "replace-one", rounds=3)

    def method(self, mechanism: Mechanism) -> Method:
        return Method(mechanism, self.LAYERS, self.FACTS)

    @pytest.mark.parametrize(
        "other",
        [
            {"relation": "add-remove", "sampling": Sampling("poisson", 10, 0.5)},
            {"sampling": Sampling("fixed", 1000, 0.005)},
            {"rounds": 1},
            {"delta": 0.5, "epsilon": 1.0},
        ],
    )
    def test_facts_that_are_not_the_runs_are_refused(self, other):
        class Slip(Equal):
            def plan(self, layers, facts, transcript):
                return super().plan(layers, replace(facts, **other), transcript)

        with pytest.raises(
            FedlgmError, match=rf"slip: the plan's facts are not the run's \(.*{sorted(other)[0]}"
        ):
            self.method(Slip("slip")).plan(Transcript.start(torch.zeros(5)))

    def test_layers_that_are_not_the_models_are_refused(self):
        class Slip(Equal):
            def plan(self, layers, facts, transcript):
                return super().plan(LayerTable.from_sizes({"a": 1, "b": 4}), facts, transcript)

        with pytest.raises(FedlgmError, match="the plan's layers are not the run's"):
            self.method(Slip("slip")).plan(Transcript.start(torch.zeros(5)))

    def test_a_class_derived_from_the_plan_is_refused(self):
        class Free(ReleasePlan):
            @property
            def event(self):
                return gaussian_event(float("inf"))

        class Own(Equal):
            def plan(self, layers, facts, transcript):
                plan = super().plan(layers, facts, transcript)
                return Free(layers, plan.clip, plan.sigma, facts, PROVEN)

        with pytest.raises(FedlgmError, match="must return a ReleasePlan, got Free"):
            self.method(Own("own")).plan(Transcript.start(torch.zeros(5)))

    def test_figures_that_a_plan_computes_cannot_be_set(self):
        plan = self.method(Cheaper("cheaper")).plan(Transcript.start(torch.zeros(5)))
        assert plan.effective_multiplier == pytest.approx(1.0)

    def test_noise_that_follows_releases_is_refused(self):
        method = self.method(LouderAfterLargeReleases("louder"))
        past = Transcript.start(torch.zeros(5))
        plan = method.plan(past)
        method.plan(past.extend(torch.zeros(5), -torch.ones(5), plan))
        with pytest.raises(
            FedlgmError, match="how noise is spread, but not how much noise there is"
        ):
            method.plan(past.extend(torch.zeros(5), torch.ones(5), plan))

    def test_private_norms_get_the_runs_facts_too(self):
        class Slip(LooksAndClaims):
            def plan_from_private_norms(self, layers, facts, norms):
                plan = Equal.plan(self, layers, facts, Transcript(0, ()))
                other = replace(facts, rounds=1)
                return UnprotectedPlan(
                    layers, plan.clip, plan.sigma, other, Guarantee("none", "test")
                )

        with pytest.raises(FedlgmError, match="facts are not the run's"):
            self.method(Slip("slip")).plan_from_private_norms(np.ones((1, 2)))


class LooksAndClaims(Equal, UsesPrivateNorms):
    """Plans from the clients' own norms, and calls that private."""

    def plan_from_private_norms(self, layers, facts, norms):
        return self.plan(layers, facts, Transcript(0, ()))


class LooksAndClaimsLater(LooksAndClaims):
    def plan(self, layers, facts, transcript):
        plan = super().plan(layers, facts, transcript)
        if transcript.rounds == 0 and not transcript.models:
            return plan
        return UnprotectedPlan(layers, plan.clip, plan.sigma, facts, Guarantee("none", "test"))


def test_plans_made_of_private_norms_are_never_charged_as_private() -> None:
    with pytest.raises(FedlgmError, match="must be of the type UnprotectedPlan"):
        check_mechanism(LooksAndClaims("claims"))
    layers, facts = (
        LayerTable.from_sizes({"a": 3, "b": 2}),
        RunFacts(1.0, Sampling("poisson", 10, 1.0)),
    )
    method = Method(LooksAndClaimsLater("later"), layers, facts)
    assert not method.plan(Transcript.start(torch.zeros(5))).protected
    with pytest.raises(FedlgmError, match="must be of the type UnprotectedPlan"):
        method.plan_from_private_norms(np.ones((1, 2)))
