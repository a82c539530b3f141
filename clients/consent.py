"""What a client that adds its own noise has agreed to: it trusts no server to ask for enough of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from flwr.app import ConfigRecord, RecordDict

from fedlgm import wire
from fedlgm.contributions import BoundedBy
from fedlgm.errors import PrivacyError
from fedlgm.facts import RunFacts
from fedlgm.noise import Family
from fedlgm.plan import ReleasePlan

_ROUNDING = 1 + 1e-6


@dataclass(frozen=True)
class Consent:
    """The budget of a client under local trust, kept in the node's own Flower state.

    A release with Gaussian noise of effective multiplier m costs 1 / m^2, and such costs add up under composition, so
    releases may differ. With Laplace noise, and in local steps whose batches are sampled, every release must have the
    agreed multiplier; local steps must also be no more, and sampled at no higher a rate, than was agreed to.

    Attributes:
        facts: the run's facts as the client computes them from its own recipe; `facts.releases` may be made in all.
        protected: whether the recipe's own mechanism is private; published variants that are not promise nothing.
        family: law of the recipe's noise; multipliers of different laws cannot be compared.
        bounded_by: who bounds the client's contribution by the recipe.
        allowance: what the releases may cost together, in releases at the run's noise multiplier (see
            `Mechanism.costs`); by default as many as there are.

    Example:
        >>> from fedlgm import Guarantee, LayerTable, Sampling
        >>> facts = RunFacts(2.0, Sampling("poisson", 10, 1.0), "replace-one", "local", rounds=1)
        >>> plan = ReleasePlan(LayerTable.from_sizes({"a": 3}), [1.0], [2.0], facts, Guarantee("proven", "an example"))
        >>> consent, state = Consent(facts), RecordDict()
        >>> consent.check(plan)
        >>> consent.record(state, client=0, key="noise 1", plan=plan)
        >>> consent.record(state, client=0, key="noise 2", plan=plan)
        Traceback (most recent call last):
            ...
        fedlgm.errors.PrivacyError: client 0 has made the 1 releases it agreed to ...
    """

    facts: RunFacts
    protected: bool = True
    family: Family = "gaussian"
    bounded_by: BoundedBy = "aggregator"
    allowance: float | None = None

    def check(self, plan: ReleasePlan) -> None:
        """Refuse a plan that protects less than what was agreed to.

        Raises:
            PrivacyError: another trust model, law of noise or way of bounding, no noise, or too little.
        """
        if plan.facts.trust != "local":
            raise PrivacyError("this client agreed to add its own noise: it refuses a plan for central trust")
        if not self.protected:
            return
        if not plan.protected:
            raise PrivacyError("this client agreed to private releases: it refuses a plan without a guarantee")
        if plan.bounded_by != self.bounded_by:
            raise PrivacyError(
                f"this client agreed to contributions bounded by the {self.bounded_by}: it refuses a plan that leaves "
                f"it to the {plan.bounded_by}"
            )
        if plan.family != self.family:
            raise PrivacyError(f"this client agreed to {self.family} noise: it refuses a plan with {plan.family} noise")
        self._check_steps(plan)
        if (
            plan.family == "laplace" or plan.facts.steps
        ) and plan.effective_multiplier * _ROUNDING < self.facts.noise_multiplier:
            raise PrivacyError(
                f"this client agreed to a noise multiplier of {self.facts.noise_multiplier:g}: it refuses a plan with "
                f"{plan.effective_multiplier:g}"
            )

    def _check_steps(self, plan: ReleasePlan) -> None:
        """Refuse local steps that cost more, or are another way to train, than what was agreed to."""
        agreed, asked = self.facts.steps, plan.facts.steps
        if (agreed is None) != (asked is None):
            what = "whole updates" if agreed is None else "local steps"
            raise PrivacyError(f"this client agreed to noise its {what}: it refuses a plan for anything else")
        if agreed is None or asked is None:
            return
        if asked.count > agreed.count or asked.rate > agreed.rate * _ROUNDING:
            raise PrivacyError(
                f"this client agreed to {agreed.count} steps per round at the rate {agreed.rate:g}: it refuses a plan "
                f"with {asked.count} at {asked.rate:g}"
            )
        if plan.facts.relation != self.facts.relation:
            raise PrivacyError(
                f"this client agreed to {self.facts.relation}: it refuses a plan for {plan.facts.relation}"
            )

    def check_raw_figures(self) -> None:
        """Refuse to hand out figures without noise; only published variants that are not private ask for them.

        Raises:
            PrivacyError: the recipe's mechanism is private.
        """
        if self.protected:
            raise PrivacyError("this client agreed to private releases: it hands out no layer norms without noise")

    def record(self, state: RecordDict, client: int, key: str, plan: ReleasePlan) -> None:
        """Count a release before it is made; the same noise again is the same release.

        Args:
            state: the node's state.
            client: the client's number.
            key: name of the release's noise, see `fedlgm.release.local_release`: of equal names with equal noise.
            plan: what is released.

        Raises:
            PrivacyError: the release would exceed what was agreed to.
        """
        if wire.RELEASES not in state:
            state[wire.RELEASES] = ConfigRecord()
        record = state.config_records[wire.RELEASES]
        keys, costs = f"{client}.keys", f"{client}.costs"
        made = dict(zip(cast(list[str], record.get(keys, [])), cast(list[float], record.get(costs, [])), strict=True))
        made[key] = self._cost(plan)
        releases = self.facts.releases
        allowance = releases if self.allowance is None else self.allowance
        if len(made) > releases or sum(made.values()) > allowance * _ROUNDING:
            raise PrivacyError(
                f"client {client} has made the {releases} releases it agreed to "
                "(privacy.max_participations), or fewer with less noise, and refuses another"
            )
        record[keys], record[costs] = list(made), list(made.values())

    def _cost(self, plan: ReleasePlan) -> float:
        """In releases at the agreed noise multiplier."""
        if not self.protected or plan.family == "laplace" or plan.facts.steps is not None:
            return 1.0
        return (self.facts.noise_multiplier / plan.effective_multiplier) ** 2
