"""The subject of an audit: a mechanism in a run's public setting, and neighbouring populations on
which the mechanism is tried.

The audit plans, adds up and releases with the same functions as a run. Only the clients' updates
are artificial, because an audit searches for the client whose data have the largest effect. If the
unit is an example, an "update" is an example's gradient, which the mechanism's scaling bounds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedlgm import mechanisms, privacy
from fedlgm.aggregation import BoundedSum
from fedlgm.aggregation.contributions import AnsweredUpdates, Updates
from fedlgm.errors import ConfigError
from fedlgm.mechanisms import (
    PlansFromAnswers,
    PlansFromPrivateData,
    UsesPrivateNorms,
    UsesPrivateSums,
    UsesPrivateUpdates,
)
from fedlgm.mechanisms.mechanism import BoundsExamples, Mechanism
from fedlgm.mechanisms.method import Method
from fedlgm.noise.draws import NoiseBackend
from fedlgm.noise.keys import KeyRing
from fedlgm.noise.release import release
from fedlgm.planning import charging
from fedlgm.planning.clipping import LEAST_CLIP
from fedlgm.planning.facts import LocalTraining, RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.transcript import Transcript
from fedlgm.training.example_level.bounding import bound_gradients, scaled_sum

LAYERS = {"first": 400, "second": 1600, "last": 100}
"""Sizes of the layers of the model on which mechanisms are tried by default."""
_ABOVE = 8.0  # norm of raw updates divided by their bounds
_ANSWER = 1e6  # an answer to a query, far above any bound
_ROUNDS = 4
_CLIENTS = 7  # an odd number, so that one client decides where a median lies
# number of examples with equal gradients, the angle of these gradients to the first layer, and the
# norm of one further example's gradient divided by the bound
_BATCH, _ANGLE, _CANARY = 100, 0.01, 10.0


@dataclass(frozen=True)
class World:
    """One of two neighbouring populations in one round.

    Attributes:
        plan: the plan of the population's release.
        total: the population's exact bounded sum (under local trust, the target's contribution
            alone), [plan.size].
    """

    plan: ReleasePlan
    total: Tensor

    def release(self, keys: KeyRing, round: int = 1, backend: NoiseBackend = "cpu") -> Tensor:
        """Release the population's sum once, as a run would, [plan.size]."""
        plan, noised_by = self.plan, self.plan.facts.noised_by
        noisy_sum = noised_by.observe(self.total, plan, keys, round, backend)
        return (
            release(self.total.clone(), plan, keys, round, noised_by.party(0), backend)
            if noisy_sum is None
            else noisy_sum
        )


@dataclass(frozen=True)
class Subject:
    """A mechanism to audit, with the layers and facts of the run for which it is calibrated.

    Attributes:
        name: name of the subject in reports.
        method: the mechanism with its layers and facts.
        seed: seed of the artificial updates.

    Raises:
        ConfigError: `method` is not a `Method`, or its sampling is a random allocation.

    Example:
        >>> subject = Subject.of("snr-consistent", epsilon=1.0)
        >>> subject.reported_epsilon(subject.method.plan(subject.start)) <= 1.0
        True
    """

    name: str
    method: Method
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.method, Method):
            raise ConfigError(
                "method must be a fedlgm.mechanisms.method.Method, which Subject.of makes; got "
                f"{self.method!r}"
            )

        if self.method.facts.sampling.block is not None:
            raise ConfigError(
                "an audit places canaries in rounds that it draws itself, which random allocation "
                "does not permit: audit the same noise with sampling 'poisson'"
            )

    @classmethod
    def of(
        cls,
        name: str | Mechanism,
        variant: str = "sound",
        *,
        epsilon: float = 4.0,
        delta: float = 1e-5,
        rounds: int | None = None,
        rate: float = 1.0,
        layers: LayerTable | None = None,
        **options: Any,
    ) -> Subject:
        """Make a subject from a mechanism that is calibrated for a small run.

        Args:
            name: name of a registered mechanism, "package.module:Class", or a mechanism object.
            variant: "sound" or "published"; variants that plan from a client's own update run under
                local trust.
            epsilon: budget of the run.
            delta: delta of the budget.
            rounds: number of rounds of the run. None stands for four rounds, or for one round if
                canaries do not fit the releases (Laplace noise, no noise, local trust, variants
                whose plans depend on private data).
            rate: Poisson sampling rate.
            layers: layers of the model; by default three layers of very different sizes (`LAYERS`).
            options: options of the mechanism.

        Raises:
            ConfigError: a name, variant or option is unknown, or a value is outside its range.
        """
        if isinstance(name, Mechanism):
            mechanism, label = name, name.name
        else:
            if variant == "published" and "clip" in mechanisms.options(name):
                # of these mechanisms' published variants, only the one with MedClip is not private
                options.setdefault("clip", "med")
            mechanism = mechanisms.get(name, variant=variant, **options)
            label = name if variant == "sound" else f"{name} ({variant})"
        if isinstance(mechanism, PlansFromAnswers):
            raise ConfigError(
                f"{label}: its clients make two releases in a round and plan the second from the "
                "first, which an audit does not repeat: audit 'uniform' under local trust, whose "
                "releases have the same bounds and cost"
            )
        local = isinstance(mechanism, UsesPrivateUpdates)
        table = mechanism.table(layers or LayerTable.from_sizes(LAYERS))
        facts = RunFacts(
            0.0,
            Sampling("poisson", 10 * _CLIENTS, 1.0 if local else rate),
            "replace-one" if local else "add-remove",
            "local" if local else "central",
            rounds or _ROUNDS,
            epsilon=epsilon,
            delta=delta,
            training=LocalTraining(gradient_clip=1.0),
        )
        method = Method.calibrate(mechanism, table, facts)
        subject = cls(label, method)
        if rounds is None and not subject.alignable:
            once = Method.calibrate(mechanism, table, dataclasses.replace(facts, rounds=1))
            subject = dataclasses.replace(subject, method=once)
        return subject

    @property
    def layers(self) -> LayerTable:
        """The layers as the mechanism sees them."""
        return self.method.layers

    @property
    def facts(self) -> RunFacts:
        """The run's public facts."""
        return self.method.facts

    @property
    def delta(self) -> float:
        """Delta at which epsilons are stated."""
        return self.facts.budget()[1]

    @property
    def private_plan(self) -> bool:
        """Whether the plan itself depends on private data, as it does in published variants without
        a valid guarantee.
        """
        return isinstance(self.method.mechanism, PlansFromPrivateData)

    @property
    def examples(self) -> bool:
        """Whether the unit is an example, whose gradient the mechanism's scaling bounds."""
        return isinstance(self.method.mechanism, BoundsExamples)

    @cached_property
    def alignable(self) -> bool:
        """Whether canary-aligned sums fit the releases: public plans, Gaussian noise, central
        trust.
        """
        if self.private_plan or self.facts.noised_by.uploads_released:
            return False
        plan = self.method.plan(self.start)
        return plan.family == "gaussian" and plan.effective_multiplier > 0 and plan.size > 0

    # -- plans ---------------------------------------------------------------------------------------------------------

    @cached_property
    def start(self) -> Transcript:
        """Transcript before the first round: a random public model."""
        return Transcript.start(torch.randn(self.layers.size, generator=self._generator(1)))

    def later(self) -> Transcript:
        """Make a transcript of one finished round, which an adaptive mechanism may read.

        If the plan depends on private data, the result is the transcript before the first round.
        """
        start = self.start
        if self.private_plan:
            return start
        first = self.method.plan(start)
        generator = self._generator(2)
        mean = 0.05 * torch.randn(first.size, generator=generator)
        return start.extend(
            start.models[-1] + 0.1 * torch.randn(self.layers.size, generator=generator), mean, first
        )

    def plan(self, transcript: Transcript, updates: list[Tensor]) -> ReleasePlan:
        """Plan the round for clients with these updates, which sound mechanisms never see."""
        mechanism = self.method.mechanism
        if isinstance(mechanism, UsesPrivateSums) and (looks := mechanism.looks(len(self.layers))):
            gradients = torch.stack(updates)
            sums = [scaled_sum(gradients, scaling, self.layers)[0] for scaling in looks]
            figures = mechanism.figures(self.layers, sums, len(updates))
            return mechanism.plan_from_private_norms(self.layers, self.facts, figures)
        if isinstance(mechanism, UsesPrivateNorms):
            norms = np.stack([self.layers.norms(update).numpy() for update in updates])
            return mechanism.plan_from_private_norms(self.layers, self.facts, norms)
        plan = self.method.plan(transcript)
        # here every client has a separate plan, and this one is the target's, whose update comes
        # last
        if isinstance(mechanism, UsesPrivateUpdates):
            plan, _ = mechanism.plan_from_private_update(plan, updates[-1], transcript.models[-1])
        return plan

    def world(
        self, transcript: Transcript, updates: list[Tensor], base: World | None = None
    ) -> World:
        """Build a population with these updates, of which the last is the target's.

        `base` is the same population without the target, if it is known.

        Raises:
            ConfigError: the mechanism releases nothing.
        """
        plan = self.plan(transcript, updates)
        if plan.size == 0:
            raise ConfigError(f"{self.name} releases nothing here: there is no release to audit")
        alone = plan.facts.noised_by.uploads_released
        block = BoundedSum.empty(plan)
        if base is not None and not alone and plan.to_json() == base.plan.to_json():
            block.total.copy_(base.total)
            alone = True
        self.add(block, updates[-1:] if alone else updates)
        return World(plan, block.total)

    def add(self, block: BoundedSum, updates: list[Tensor]) -> None:
        """Add raw updates to a sum, bounded by the sum's plan; gradients of examples form one
        batch.
        """
        mechanism = self.method.mechanism
        if isinstance(mechanism, BoundsExamples):
            block.add(
                bound_gradients(torch.stack(updates), mechanism.scaling(block.plan), block.plan)
            )
            return
        for update in updates:
            block.add(self._with_answers(update, block.plan))

    @staticmethod
    def _with_answers(update: Tensor, plan: ReleasePlan) -> Updates:
        """Attach very large answers to the queries about data, because a client could answer
        anything.
        """
        answer = math.copysign(_ANSWER, float(update.sum()))
        asked = [noisy for noisy in plan.queries if noisy.query.of_data]
        answers = {noisy.query.name: torch.full((1, noisy.size), answer) for noisy in asked}
        return AnsweredUpdates(update[None], answers) if answers else update

    def neighbours(self, transcript: Transcript) -> Iterator[tuple[World, World]]:
        """Yield pairs of populations that differ in one client: one with the target, the other
        without the target or, under the replace-one relation, with another client in its place.
        """
        for others in self._populations():
            base = self.world(transcript, others)
            for target in self._targets():
                if self.facts.relation == "replace-one":
                    for instead in (-target, target / 100):
                        pair = (
                            self.world(transcript, [*others, update], base)
                            for update in (target, instead)
                        )
                        yield next(pair), next(pair)
                else:
                    yield self.world(transcript, [*others, target], base), base

    def multipliers(self, plan: ReleasePlan) -> np.ndarray:
        """Compute the effective noise multiplier of every round, float64 [rounds], from the
        multiplier of the first round's plan.
        """
        costs = self.method.mechanism.costs(self.layers, self.facts.rounds)
        return plan.effective_multiplier * np.sqrt(costs[0] / costs)

    def charged_multipliers(self, plan: ReleasePlan) -> np.ndarray:
        """Compute the effective multipliers of the releases that can contain one unit's data.

        If a cap limits the number of such releases, the costliest releases are counted.
        """
        multipliers = self.multipliers(plan)
        return (
            multipliers
            if charging.of(self.facts).joint
            else np.sort(multipliers)[: self.facts.releases]
        )

    def reported_epsilon(self, plan: ReleasePlan, whole: bool = True) -> float:
        """Compute the reported epsilon: the proven epsilon, otherwise the claimed epsilon,
        otherwise `inf`.

        Args:
            plan: the first round's plan.
            whole: whether to report the epsilon of all releases that can contain a unit's data,
                with the run's sampling; otherwise that of one release in which every client takes
                part.
        """
        multipliers = self.charged_multipliers(plan) if whole else self.multipliers(plan)[:1]
        if not plan.protected:
            if plan.claim is None:
                return math.inf
            if "epsilon" in plan.claim:
                return len(multipliers) * float(plan.claim["epsilon"])
            event = privacy.events.decode(plan.claim["event"])
            return privacy.accounting.composed_epsilon(
                [(event, len(multipliers))], self.delta, self.facts.accountant
            )
        events = charging.of(self.facts).events(plan, multipliers, whole)
        return privacy.accounting.composed_epsilon(events, self.delta, self.facts.accountant)

    # -- made-up updates -----------------------------------------------------------------------------------------------

    def _generator(self, number: int) -> torch.Generator:
        return torch.Generator().manual_seed(1000 * self.seed + number)

    def _reach(self) -> np.ndarray:
        """Compute, for each layer, a norm that the layer's bound would clip; without a bound, a
        norm that training can reach.
        """
        clip = np.full(len(self.layers), np.inf)
        if self.examples or not isinstance(self.method.mechanism, UsesPrivateNorms):
            clip = self.method.plan(self.start).clip
        training = self.facts.training
        free = (
            training.lr
            * training.epochs
            * (training.gradient_clip or 1.0)
            / math.sqrt(len(self.layers))
        )
        return np.where(np.isfinite(clip), np.maximum(_ABOVE * clip, LEAST_CLIP), free)

    def _targets(self) -> Iterator[Tensor]:
        """Yield updates of the target: one that changes all coordinates, one that changes a single
        coordinate of every layer, and some that change one layer only.
        """
        reach, widths = self._reach(), self.layers.sizes
        spread = np.repeat(reach / np.sqrt(widths), widths)
        signs = torch.randint(0, 2, (self.layers.size,), generator=self._generator(3)) * 2.0 - 1.0
        yield torch.from_numpy(spread).float() * signs
        corners = np.zeros(self.layers.size)
        corners[self.layers.offsets[:-1]] = reach
        yield torch.from_numpy(corners).float()
        order = np.argsort(widths)
        for j in sorted({0, len(widths) - 1, int(order[0]), int(order[-1])}):
            alone = np.zeros(self.layers.size)
            alone[self.layers.offsets[j] : self.layers.offsets[j + 1]] = reach[j] / math.sqrt(
                widths[j]
            )
            yield torch.from_numpy(alone).float()
        if self.examples and len(widths) > 1:
            yield self._alone(1, _CANARY * float(np.linalg.norm(reach) / _ABOVE))

    def _alone(self, layer: int, length: float) -> Tensor:
        """Make an update of norm `length` along the first coordinate of one layer."""
        update = torch.zeros(self.layers.size)
        update[int(self.layers.offsets[layer])] = length
        return update

    def _populations(self) -> Iterator[list[Tensor]]:
        """Yield populations of other clients: first similar clients, then two halves whose updates
        differ in the first layer, so that the target alone decides where the medians lie.

        If the unit is an example, a batch of examples with equal gradients follows.
        """
        reach, widths = self._reach() / _ABOVE, self.layers.sizes
        generator = self._generator(4)
        scale = torch.from_numpy(np.repeat(reach / np.sqrt(widths), widths)).float()
        yield [
            scale * torch.randn(self.layers.size, generator=generator) for _ in range(_CLIENTS - 1)
        ]
        first = int(widths[0])
        halves = []
        for client in range(_CLIENTS - 1):
            update = scale.clone()
            update[:first] *= 1.0 if client < _CLIENTS // 2 else 3.0
            halves.append(update)
        yield halves
        if self.examples and len(widths) > 1:
            # Examples with equal gradients, nearly all of whose norm is in the first layer. Layer
            # weights that are computed from the batch then depend on a single example whose norm is
            # in the second layer.
            bound = float(np.linalg.norm(reach))
            agreed = self._alone(0, bound * math.cos(_ANGLE)) + self._alone(
                1, bound * math.sin(_ANGLE)
            )
            yield [agreed] * _BATCH
