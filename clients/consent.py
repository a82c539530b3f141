"""What a client that adds its own noise has agreed to: it trusts no server to ask for enough of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from flwr.app import ConfigRecord, RecordDict

from fedlgm import wire
from fedlgm.clipping import side_clip
from fedlgm.errors import PrivacyError
from fedlgm.noise import Family
from fedlgm.plan import Budget, ReleasePlan
from fedlgm.privacy.guarantee import Guarantee

_ROUNDING = 1 + 1e-6


@dataclass(frozen=True)
class Consent:
    """The budget of a client under local trust, kept in the node's own Flower state.

    A release with Gaussian noise of effective multiplier m costs 1 / m^2, and such costs add up under composition, so
    releases may differ. With Laplace noise every release must have the agreed multiplier.

    Attributes:
        budget: the run's budget as the client computes it from its own recipe.
        participations: releases that may be made in all.
        guarantee: what the recipe's own mechanism guarantees; published variants that are not private promise nothing.
        family: law of the recipe's noise; multipliers of different laws cannot be compared.
        allowance: what these releases may cost together, in releases at the budget's noise multiplier (see
            `Mechanism.costs`); by default as many as there are.
    """

    budget: Budget
    participations: int
    guarantee: Guarantee
    family: Family = "gaussian"
    allowance: float | None = None

    @property
    def private(self) -> bool:
        """Whether there is anything to hold the server to."""
        return self.guarantee.status != "none"

    def check(self, plan: ReleasePlan) -> None:
        """Refuse a plan that protects less than what was agreed to.

        Raises:
            PrivacyError: another trust model, unit of privacy or law of noise, no noise, or too little.
        """
        if plan.budget.trust != "local":
            raise PrivacyError("this client agreed to add its own noise: it refuses a plan for central trust")
        if not self.private:
            return
        if plan.guarantee.status == "none":
            raise PrivacyError("this client agreed to private releases: it refuses a plan without a guarantee")
        unit = self.guarantee.unit
        if plan.guarantee.unit != unit:  # where it is an example, updates are not bounded here
            raise PrivacyError(
                f"this client agreed to {unit}-level privacy: it refuses a plan for {plan.guarantee.unit}s"
            )
        if plan.family != self.family:
            raise PrivacyError(f"this client agreed to {self.family} noise: it refuses a plan with {plan.family} noise")
        for side in plan.sides:
            whole = side.size == len(plan.layers)
            if not whole or side.clip * _ROUNDING < side_clip(side.name, plan.layers):
                raise PrivacyError(f"the plan counts less for {side.name!r} than a client contributes: refused")
        if plan.family == "laplace" and plan.effective_multiplier * _ROUNDING < self.budget.noise_multiplier:
            raise PrivacyError(
                f"this client agreed to a noise multiplier of {self.budget.noise_multiplier:g}: it refuses a plan with "
                f"{plan.effective_multiplier:g}"
            )

    def check_raw_figures(self) -> None:
        """Refuse to hand out figures without noise; only published variants that are not private ask for them.

        Raises:
            PrivacyError: the recipe's mechanism is private.
        """
        if self.private:
            raise PrivacyError("this client agreed to private releases: it hands out no layer norms without noise")

    def record(self, state: RecordDict, client: int, key: str, plan: ReleasePlan) -> None:
        """Count a release before it is made; the same noise again is the same release.

        Args:
            state: the node's state.
            client: the client's number.
            key: name of the noise key, see `fedlgm.release.fingerprint`.
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
        allowance = self.participations if self.allowance is None else self.allowance
        if len(made) > self.participations or sum(made.values()) > allowance * _ROUNDING:
            raise PrivacyError(
                f"client {client} has made the {self.participations} releases it agreed to "
                "(privacy.max_participations), or fewer with less noise, and refuses another"
            )
        record[keys], record[costs] = list(made), list(made.values())

    def _cost(self, plan: ReleasePlan) -> float:
        """In releases at the agreed noise multiplier."""
        if not self.private or plan.family == "laplace":
            return 1.0
        return (self.budget.noise_multiplier / plan.effective_multiplier) ** 2
