"""How a run's rounds are charged: one by one, or as parts of one mechanism.

How noise is drawn is decided separately, in `fedlgm.noise.run_noise`. For example, independent
noise under cyclic sampling is drawn round by round, but charged as one mechanism.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from typing_extensions import override

from fedlgm import privacy
from fedlgm.errors import PrivacyError
from fedlgm.planning import views
from fedlgm.planning.facts import RunFacts
from fedlgm.planning.layers import LayerTable
from fedlgm.privacy.guarantee import Unit

_SECRET = {
    "example": "which examples a round draws stays secret",
    "step": "which of its examples a client's step draws stays secret",
}
"""The secret on which amplification by sampling depends, if the unit is an example."""
_PARTICIPATION = {
    True: "every client is in one of {b} groups for the whole run, and who takes part in a group's "
    "round stays secret",
    False: "nobody takes part twice within {b} rounds; who takes part when may be known",
}
"""Condition on participation in a run that is one mechanism. The key says whether secret draws
amplify the run.
"""


class _Plan(views.Plan, Protocol):
    """The numbers of a plan (`fedlgm.planning.plan.ReleasePlan`) that charges depend on."""

    @property
    def place(self) -> int:
        """Number of earlier rounds."""


class _Mechanism(Protocol):
    """The methods of a mechanism (`fedlgm.mechanisms.Mechanism`) that the charge of its run
    uses.
    """

    @property
    def name(self) -> str:
        """Registered name."""

    def costs(self, layers: LayerTable, rounds: int) -> np.ndarray:
        """Cost of each round relative to a release at the run's multiplier."""

    def check_run(self, layers: LayerTable, facts: RunFacts) -> None:
        """Refuse a run whose rounds are charged together if this mechanism does not support such
        runs.
        """


@dataclass(frozen=True)
class Process:
    """The charging of rounds one by one, for independent noise and sampling in which any client may
    take part in any round.

    Example:
        >>> from fedlgm import RunFacts, Sampling
        >>> process = of(RunFacts(1.0, Sampling("poisson", 100, 0.1)))
        >>> process.needs("client"), process.run is None
        ('who takes part in a round stays secret', True)

    Attributes:
        facts: the run's facts.
    """

    facts: RunFacts

    def run_events(self) -> list[tuple[privacy.DpEvent, int]]:
        """Events of the run's rounds that can contain one unit's data, assuming that every round
        has the facts' multiplier.
        """
        facts = self.facts
        multiplier = facts.noise_multiplier / facts.moved
        return [(facts.noised_by.event(multiplier, facts.accounted_rate), facts.noisy_sums)]

    @property
    def joint(self) -> bool:
        """Whether several rounds are one mechanism. If so, a run that is continued must repeat its
        earlier draws and noise.
        """
        return False

    @property
    def run(self) -> privacy.whole_run.WholeRun | None:
        """The run as one mechanism; None if rounds are charged one by one or in blocks."""
        return None

    def needs(self, unit: Unit) -> str:
        """Conditions of the guarantee in addition to bounds and noise; empty if there are none."""
        if self.facts.accounted_rate == 1:
            return ""
        return _SECRET.get(
            "step" if self.facts.steps else unit, "who takes part in a round stays secret"
        )

    def check_mechanism(self, mechanism: _Mechanism, layers: LayerTable) -> None:
        """Refuse a mechanism whose rounds cannot be charged this way (see
        `Mechanism.check_run`).
        """
        facts = self.facts
        facts.noised_by.check_costs(mechanism.name, mechanism.costs(layers, facts.rounds))

    def check(self, plan: _Plan) -> None:
        """Refuse a plan that cannot be charged this way (PrivacyError)."""
        if self.facts.overlap > 1 and (
            plan.family != "gaussian"
            or not {"trainer", "replace-one"} & {plan.bounded_by, self.facts.relation}
        ):
            raise PrivacyError(
                "overlap above 1: the joint cost of a person at several clients is known "
                "for Gaussian noise, and only with relation 'replace-one' or for single examples "
                "(without a person's rows a client sends another update): choose such a setting"
            )

    def is_charged(self, plan: _Plan, before: Callable[[], int]) -> bool:
        """Whether a round is charged. Only a round that releases nothing is free, and only if
        `before()`, the number of earlier charged rounds, is 0.
        """
        return plan.size > 0 or before() > 0

    def position(self, rounds: int) -> int | None:
        """Always None: plans state no position, because the cost of a round does not depend on
        it.
        """
        return None

    def calibrate(self, levels: Mapping[float, int] | None = None) -> float:
        """Smallest sigma_* at which the run meets the budget of its facts.

        Args:
            levels: number of releases at each noise level relative to sigma_*; None if all releases
                have level 1.
        """
        facts, (epsilon, delta) = self.facts, self.facts.budget()
        rate, relation, accountant = facts.accounted_rate, facts.relation, facts.accountant
        releases = {1.0: facts.noisy_sums}
        if levels:
            releases = {level: count * facts.copies for level, count in levels.items()}
        gaussian = privacy.accounting.calibrate_levels(
            releases, epsilon, delta, draws=rate, relation=relation, accountant=accountant
        ) * (facts.overlap // facts.copies)

        def within(multiplier: float) -> bool:
            least = multiplier / facts.moved
            events = [
                (facts.noised_by.event(least * level, rate), count)
                for level, count in releases.items()
            ]
            return privacy.composed_epsilon(events, delta, accountant) <= epsilon

        return facts.noised_by.calibrate(gaussian, within)

    def event(self, plan: _Plan) -> privacy.DpEvent:
        """The accounting event of one round of `plan` (`ReleasePlan.event`)."""
        return self._at(plan, self._multiplier(plan), self.facts.accounted_rate)

    def repeated_event(self, plan: _Plan) -> privacy.DpEvent:
        """The accounting event of a repeated release (`ReleasePlan.repeated_event`)."""
        return self._at(plan, self._multiplier(plan), 1.0)

    def events(
        self, plan: _Plan, multipliers: np.ndarray, sampled: bool = True
    ) -> list[tuple[privacy.DpEvent, int]]:
        """Events of rounds like `plan` with these effective multipliers, and the number of rounds
        of each event.

        Args:
            plan: plan of one of the rounds.
            multipliers: sigma_eff of each round, [rounds].
            sampled: whether to count the amplification by the run's sampling.
        """
        rate = self.facts.accounted_rate if sampled else 1.0
        levels, counts = np.unique(multipliers, return_counts=True)
        return [
            (self._at(plan, float(m), rate), int(n)) for m, n in zip(levels, counts, strict=True)
        ]

    def _multiplier(self, plan: _Plan) -> float:
        return plan.effective_multiplier if plan.size > 0 else self.facts.noise_multiplier

    def _at(self, plan: _Plan, effective: float, rate: float) -> privacy.DpEvent:
        multiplier = effective / self.facts.moved
        if plan.family == "laplace":
            loss = 1.0 / multiplier if multiplier > 0 else math.inf
            event = privacy.events.laplace_event(loss, rate, self.facts.relation)
        else:
            event = self.facts.noised_by.event(multiplier, rate)
        return privacy.events.repeat_event(event, self.facts.noisy_steps * self.facts.copies)


class Joint(Process):
    """Rounds that are parts of one mechanism. Noise is planned for all of these rounds together,
    and the cost of a round depends on its position.

    Example:
        >>> from fedlgm import RunFacts, Sampling
        >>> of(RunFacts(1.0, Sampling("cyclic", 100, 0.25, 4), rounds=8)).joint
        True
    """

    @property
    def joint(self) -> bool:
        """Always true."""
        return True

    @override
    def check_mechanism(self, mechanism: _Mechanism, layers: LayerTable) -> None:
        mechanism.check_run(layers, self.facts)

    def check(self, plan: _Plan) -> None:
        """Require Gaussian noise of at least the calibrated level.

        Raises:
            PrivacyError: the noise is not Gaussian, or lies below the calibrated level.
        """
        if plan.family != "gaussian":
            raise PrivacyError(
                "noise of a whole run is accounted for as Gaussian, but the plan has "
                f"{plan.family} noise"
            )
        if plan.effective_multiplier < self.facts.least_multiplier:
            raise PrivacyError(
                "a run is one mechanism only if no round has less noise than was planned for the "
                f"run: this plan has the multiplier {plan.effective_multiplier:g}, but the run has "
                f"{self.facts.noise_multiplier:g}"
            )

    def is_charged(self, plan: _Plan, before: Callable[[], int]) -> bool:
        """Always true, because the cost covers all rounds together."""
        return True

    def position(self, rounds: int) -> int:
        """The number of earlier rounds."""
        return rounds


class OneMechanism(Joint):
    """A run that is one mechanism (`fedlgm.privacy.whole_run`): each round is charged the increase
    of the run's cost.

    Example:
        >>> from fedlgm import RunFacts, Sampling
        >>> process = of(RunFacts(1.0, Sampling("cyclic", 100, 0.25, 4), rounds=8))
        >>> isinstance(process, OneMechanism), process.position(3), process.run.participations
        (True, 3, 2)
    """

    @property
    def run(self) -> privacy.whole_run.WholeRun:
        """The run as one mechanism."""
        return privacy.whole_run.whole_run(self.facts)

    def needs(self, unit: Unit) -> str:
        """The condition on participation."""
        return _PARTICIPATION[self.facts.accounted_rate < 1].format(
            b=self.facts.sampling.separation
        )

    @override
    def run_events(self) -> list[tuple[privacy.DpEvent, int]]:
        return self.run.events(self.facts.least_multiplier, self.facts.rounds)

    def calibrate(self, levels: Mapping[float, int] | None = None) -> float:
        """The noise multiplier, which is the same for every round."""
        return self.run.calibrate(*self.facts.budget(), self.facts.accountant)

    def event(self, plan: _Plan) -> privacy.DpEvent:
        """The cost that the round adds."""
        return self.run.event(plan.place, self.facts.least_multiplier)

    def repeated_event(self, plan: _Plan) -> privacy.DpEvent:
        """The event of releasing the round's row of C x once more."""
        return self.run.repeated_event(plan.place, self.facts.least_multiplier)

    def events(
        self, plan: _Plan, multipliers: np.ndarray, sampled: bool = True
    ) -> list[tuple[privacy.DpEvent, int]]:
        """Events of the first rounds, at the run's least multiplier."""
        return self.run.events(self.facts.least_multiplier, len(multipliers))


class Allocated(Joint):
    """Blocks of rounds. A unit takes part a fixed number of times in each block, by a secret draw.
    Every block is one mechanism, and its first round is charged for the whole block.

    The releases of a block's first rounds are among the releases of the whole block, so they cost
    no more than the whole block. The other rounds of a block are not charged. Blocks compose,
    because their draws are independent.

    Example:
        >>> from fedlgm import RunFacts, Sampling
        >>> sampling = Sampling("allocation", 100, 0.1, participations=1, block=10)
        >>> process = of(RunFacts(1.0, sampling, rounds=20))
        >>> process.blocks, process.needs("client")
        (2, 'every client takes part in 1 of each 10 rounds, and in which ones stays secret')
    """

    @property
    def allocation(self) -> privacy.participation.Allocation:
        """The numbers of participations and of rounds in a block."""
        sampling = self.facts.sampling
        return privacy.participation.Allocation(sampling.participations or 0, sampling.block or 0)

    @property
    def blocks(self) -> int:
        """Number of blocks, including an incomplete last block."""
        return -(-self.facts.rounds // self.allocation.rounds)

    @override
    def run_events(self) -> list[tuple[privacy.DpEvent, int]]:
        return [(self._block(), self.blocks)]

    def needs(self, unit: Unit) -> str:
        """The condition that the draws stay secret."""
        taken, rounds = self.allocation
        return (
            f"every {unit} takes part in {taken} of each {rounds} rounds, and in which ones stays "
            "secret"
        )

    def calibrate(self, levels: Mapping[float, int] | None = None) -> float:
        """The noise multiplier, which is the same for every round."""
        facts, (epsilon, delta) = self.facts, self.facts.budget()
        multiplier = privacy.accounting.calibrate_levels(
            {1.0: self.blocks},
            epsilon,
            delta,
            draws=self.allocation,
            relation=facts.relation,
            accountant=facts.accountant,
        )
        return multiplier * (1 + privacy.whole_run.MARGIN)

    def event(self, plan: _Plan) -> privacy.DpEvent:
        """The cost of the whole block in its first round; nothing in the other rounds."""
        return self._block() if plan.place % self.allocation.rounds == 0 else self._nothing()

    def repeated_event(self, plan: _Plan) -> privacy.DpEvent:
        """The event of one more release for a unit that takes part in it for certain.

        Given the first release of a round, the second one multiplies the likelihood ratio of some
        of the unit's draws by a factor W of mean 1. If W multiplies the whole ratio instead, the
        result is larger in convex order. This larger result is the ratio for a unit whose
        participation is certain.
        """
        return self._gaussian()

    def events(
        self, plan: _Plan, multipliers: np.ndarray, sampled: bool = True
    ) -> list[tuple[privacy.DpEvent, int]]:
        """Events of the blocks to which the first rounds belong, at the run's least multiplier."""
        if not sampled:
            return [(self._gaussian(), len(multipliers))]
        return [(self._block(), -(-len(multipliers) // self.allocation.rounds))]

    @property
    def _least(self) -> float:
        return self.facts.least_multiplier / self.facts.moved

    def _block(self) -> privacy.DpEvent:
        return privacy.participation.release_event(self._least, self.allocation)

    def _gaussian(self) -> privacy.DpEvent:
        return privacy.events.gaussian_event(self._least)

    def _nothing(self) -> privacy.DpEvent:
        return privacy.events.gaussian_event(math.inf)


def of(facts: RunFacts) -> Process:
    """The object that determines how a run's rounds are charged. They are charged one by one if
    noise is independent and a client's rounds do not depend on each other.

    Example:
        >>> from fedlgm import Sampling
        >>> type(of(RunFacts(1.0, Sampling("cyclic", 100, 0.25, 4)))).__name__
        'OneMechanism'
    """
    if facts.sampling.block is not None:
        return Allocated(facts)
    alone = facts.noise is None and not facts.sampling.scheduled
    return (Process if alone else OneMechanism)(facts)
