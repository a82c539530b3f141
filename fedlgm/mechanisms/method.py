"""A mechanism together with the model's layers and the facts of one run, on which server and
clients must agree.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from torch import nn

from fedlgm import privacy
from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.extension.loader import is_bundled
from fedlgm.mechanisms.mechanism import (
    BoundsExamples,
    Mechanism,
    PlansFromPrivateData,
    code_of,
)
from fedlgm.mechanisms.private_plans import UsesPrivateNorms
from fedlgm.noise.draws import check_scale
from fedlgm.planning import charging
from fedlgm.planning.facts import RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan, UnprotectedPlan
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.reuse import require_rounds

_AGREE = 1e-4  # relative tolerance between a given multiplier and the budget's multiplier


@dataclass(frozen=True)
class Method:
    """A mechanism together with the layers of one model and the facts of one run. It plans the
    release of every round.

    Attributes:
        mechanism: the mechanism that plans each round.
        layers: `mechanism.table(...)` of the model's layers.
        facts: the run's public facts, with the calibrated noise multiplier.
    """

    mechanism: Mechanism
    layers: LayerTable
    facts: RunFacts

    @classmethod
    def of(
        cls,
        module: nn.Module,
        mechanism: Mechanism,
        facts: RunFacts,
        group_by: str | Callable[[str], str] = "module",
    ) -> Method:
        """Make the method of a mechanism for the layers of `module`, with noise calibrated to the
        budget of `facts`.

        Example:
            >>> import torch
            >>> from fedlgm import Sampling, mechanisms
            >>> facts = RunFacts(0.0, Sampling("poisson", 100, 0.1), rounds=5, epsilon=8.0, delta=1e-5)
            >>> method = Method.of(torch.nn.Linear(3, 2), mechanisms.get("snr-consistent"), facts)
            >>> method.layers.size, method.facts.noise_multiplier > 0
            (8, True)

        Args:
            module: the model, which may be on the meta device.
            mechanism: the mechanism.
            facts: the run's facts with a budget; without epsilon their own `noise_multiplier`
                stays.
            group_by: see `LayerTable.from_module`.

        Raises:
            ConfigError, PrivacyError: see `Mechanism.calibrate`.
        """
        return cls.calibrate(
            mechanism, mechanism.table(LayerTable.from_module(module, group_by)), facts
        )

    @classmethod
    def calibrate(
        cls,
        mechanism: Mechanism,
        layers: LayerTable,
        facts: RunFacts,
    ) -> Method:
        """Make the method of a mechanism for a table of layers, with noise calibrated to the budget
        of `facts`.

        Args:
            mechanism: the mechanism.
            layers: `mechanism.table(...)` of the model's layers.
            facts: the run's facts with a budget; without epsilon their own `noise_multiplier`
                stays.

        Raises:
            ConfigError: the facts have a budget and a `noise_multiplier` that does not meet it
                exactly.
            ConfigError, PrivacyError: see `Mechanism.calibrate` and `Mechanism.check_run`.
        """
        with code_of(type(mechanism), mechanism.name):
            charging.of(facts).check_mechanism(mechanism, layers)
            if facts.noise_multiplier and facts.epsilon is None:
                return cls(mechanism, layers, facts)
            unset = facts.with_multiplier(0.0)
            to = unset.with_multiplier(mechanism.calibrate(unset))
        if facts.noise_multiplier and not math.isclose(
            facts.noise_multiplier, to.noise_multiplier, rel_tol=_AGREE
        ):
            raise ConfigError(
                f"noise_multiplier = {facts.noise_multiplier:g} and epsilon = {facts.epsilon:g} "
                f"are both given, but this epsilon needs {to.noise_multiplier:.6g}: leave out "
                "epsilon, or set noise_multiplier to 0"
            )
        return cls(mechanism, layers, to)

    def check_cohorts(self, sampling: Sampling) -> None:
        """Require that clients are drawn by the planned sampling if the run's cost depends on how
        they are drawn.

        Raises:
            ConfigError: the cohorts are drawn by another sampling.
        """
        facts, planned = self.facts, self.facts.sampling
        # the cost of a mechanism with `BoundsExamples` depends on how examples are drawn, not
        # clients
        if sampling == planned or isinstance(self.mechanism, BoundsExamples):
            return
        # If each client adds a share of the noise, the epsilon towards readers depends on the
        # cohorts.
        if facts.accounted_rate < 1 or facts.shares is not None or planned.separation is not None:
            apart = (
                f" with {planned.separation} rounds between a client's participations"
                if planned.separation
                else ""
            )
            raise ConfigError(
                f"the run's cost rests on {planned.scheme} sampling of {planned.population:,} "
                f"participants at rate {planned.rate:g}{apart}: its sampler must draw by facts.sampling"
            )

    def plan(self, transcript: Transcript) -> ReleasePlan:
        """Plan the next round's release from public values alone. The plan includes its position in
        the run if its cost and noise depend on the position.

        Raises:
            ConfigError: a user's mechanism fails, or does not return a plan.
            PrivacyError: the plan's facts or layers are not the run's; a mechanism that plans from
                unprotected data calls a plan protected; the plan's cost differs from the
                mechanism's `costs`; or noise of the plan's scales cannot be drawn.
        """
        with code_of(type(self.mechanism), self.mechanism.name):
            draft: object = self.mechanism.plan(self.layers, self.facts, transcript)
        plan = self._check_plan(
            draft, transcript.plan, position=charging.of(self.facts).position(transcript.rounds)
        )
        if isinstance(self.mechanism, PlansFromPrivateData):
            self._refuse_protected(plan)
        self._refuse_other_cost(plan, transcript)
        return plan

    def events(self, plan: ReleasePlan) -> list[tuple[privacy.DpEvent, int]]:
        """Return the events of all rounds, each with the number of its rounds. If a unit can take
        part only in some of the rounds, the events are those of the rounds that cost most.

        Args:
            plan: the protected plan of one of the rounds.
        """
        process, facts = charging.of(self.facts), self.facts
        multipliers = np.sort(facts.noise_multiplier / np.sqrt(self._costs))
        return process.events(plan, multipliers if process.joint else multipliers[: facts.releases])

    def require_rounds(
        self, ledger: privacy.Ledger, past: Transcript, *, sampled: bool = True
    ) -> None:
        """Refuse a ledger that contains rounds which are not in `past`, if it must not be used
        again (see `fedlgm.privacy.reuse`).

        Args:
            ledger: the ledger that the run would charge.
            past: the rounds that the run has completed.
            sampled: whether rounds in the ledger that are released again get new draws of
                participants.

        Raises:
            LedgerError: the ledger contains rounds that are not in `past` and is refused.
        """
        if ledger.rounds() <= past.rounds:
            return
        facts, plan = self.facts, self.plan(past)
        left = facts.rounds - past.rounds
        if facts.sampling.block is None:  # blocks are charged in their first rounds
            left = min(facts.releases, left)
        events = [(plan.event, left)]
        if plan.protected:
            costs = self._costs[past.rounds : past.rounds + left]
            events = charging.of(facts).events(
                plan, facts.noise_multiplier / np.sqrt(costs), sampled
            )
        require_rounds(
            ledger,
            past.rounds,
            events,
            epsilon=facts.epsilon,
            delta=facts.delta,
            accountant=facts.accountant,
        )

    def plan_from_private_norms(self, norms: np.ndarray) -> ReleasePlan:
        """Plan the round of a published variant that uses unprotected layer norms
        (`UsesPrivateNorms`).

        Args:
            norms: the norms, or other unprotected figures, in the mechanism's format.

        Raises:
            PrivacyError: the mechanism calls the plan protected, or the plan's facts or layers are
                not the run's.
        """
        assert isinstance(self.mechanism, UsesPrivateNorms)
        with code_of(type(self.mechanism), self.mechanism.name):
            draft: object = self.mechanism.plan_from_private_norms(self.layers, self.facts, norms)
        plan = self._check_plan(draft)
        self._refuse_protected(plan)
        return plan

    def _check_plan(
        self, plan: object, last: ReleasePlan | None = None, **more: Any
    ) -> ReleasePlan:
        """Check that a mechanism returned a plan of this run, because the facts in a plan determine
        its charge.

        Returns:
            The plan with the fields `more` set. If `last` equals this plan and the mechanism
            belongs to this package, the result is the object `last`, so that values derived from
            the plan are computed only once.
        """
        name = self.mechanism.name
        # a class derived from these two could report another event
        if type(plan) not in (ReleasePlan, UnprotectedPlan):
            raise ConfigError(
                f"{name}: plan() must return a ReleasePlan, got {type(plan).__name__}"
            )
        assert isinstance(plan, ReleasePlan)
        if plan.facts != self.facts:
            fields = [f.name for f in dataclasses.fields(RunFacts)]
            other = [f for f in fields if getattr(plan.facts, f) != getattr(self.facts, f)]
            raise PrivacyError(
                f"{name}: the plan's facts are not the run's ({', '.join(other)} differ), and its "
                "cost follows from them: pass `facts` on unchanged"
            )
        plan.guarantee.require_unit(self.facts.sampling.of or self.mechanism.unit)
        if plan.layers != self.layers:
            raise PrivacyError(
                f"{name}: the plan's layers are not the run's: pass `layers` on unchanged"
            )
        if last is not None and is_bundled(self.mechanism) and plan.equals(last, **more):
            return last
        for part in plan.parts:  # before the charge
            check_scale(part.sigma)
        # the plan is rebuilt from its fields, so that a user cannot set values that a plan computes
        # from the fields
        return replace(plan, **more)

    @cached_property
    def _costs(self) -> np.ndarray:
        """The mechanism's cost of each round. It is computed only once, so no later release can
        change it.
        """
        return self.mechanism.costs(self.layers, self.facts.rounds)

    def _refuse_other_cost(self, plan: ReleasePlan, transcript: Transcript) -> None:
        """Refuse a plan whose cost differs from the cost that was fixed before the run, because
        only fixed costs compose.
        """
        done, last = transcript.rounds, transcript.plan
        if not plan.protected or done >= self.facts.rounds:
            return
        if last is not None and last.protected and last.family != plan.family:
            raise PrivacyError(
                f"{self.mechanism.name}: round {done + 1} has {plan.family} noise, but the round "
                f"before had {last.family} noise: fix the kind of noise before the run, because "
                "costs that depend on past releases do not compose"
            )
        # the multiplier in the plan's event
        multiplier = plan.effective_multiplier if plan.size else self.facts.noise_multiplier
        cost = (self.facts.noise_multiplier / multiplier) ** 2
        fixed = self._costs[done]
        if not abs(cost - fixed) <= 1e-6 * fixed:
            raise PrivacyError(
                f"{self.mechanism.name}: round {done + 1} costs {cost:.6g} releases at the run's "
                f"multiplier, but costs() states {fixed:.6g}: override costs() if the costs are "
                "fixed before the run; past releases may change how noise is spread, but not how "
                "much noise there is"
            )

    def _refuse_protected(self, plan: ReleasePlan) -> None:
        if plan.protected:
            raise PrivacyError(
                f"{self.mechanism.name}: its plans depend on private data (UsesPrivateNorms, "
                "UsesPrivateUpdates), so noise does not make them private: they must be of the "
                "type UnprotectedPlan"
            )
