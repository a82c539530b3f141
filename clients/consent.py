"""The consent of a client that adds its own noise and does not trust the server to request enough
noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from flwr.app import ConfigRecord, RecordDict

from fedlgm import wire
from fedlgm.aggregation.client_release import Asked, Keys, Noised
from fedlgm.aggregation.contributions import BoundedBy
from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.noise.draws import Family
from fedlgm.noise.keys import KeyRing
from fedlgm.planning.facts import RunFacts
from fedlgm.planning.plan import ReleasePlan

_ROUNDING = 1 + 1e-6


@dataclass(frozen=True)
class Consent:
    """What a client agrees to release under local trust. The releases are counted in the state of
    the client's Flower node.

    A release with Gaussian noise of effective multiplier m costs 1 / m^2, and these costs add up
    under composition, so the multipliers of the releases may differ. With Laplace noise, and with
    local steps on sampled batches, every release must have at least the agreed multiplier. The
    number of local steps and their sampling rate must not exceed the agreed values.

    Attributes:
        facts: the facts of the run, which the client computes from its own copy of the recipe; at
            most `facts.releases` releases are allowed.
        protected: whether the recipe's mechanism is differentially private. For published variants
            that are not, no noise is required.
        family: distribution of the recipe's noise. A plan with another distribution is refused,
            because the noise multipliers of different distributions cannot be compared.
        bounded_by: party that bounds the client's contribution according to the recipe.
        allowance: largest total cost, in units of one release at the run's noise multiplier (see
            `Mechanism.costs`); by default the number of releases.

    Raises:
        ConfigError: `protected` is set, but the facts have no noise multiplier.

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

    def __post_init__(self) -> None:
        if self.protected and not self.facts.noise_multiplier > 0:
            raise ConfigError(
                "a consent without a noise multiplier agrees to any noise: take the facts with "
                "the calibrated multiplier, as in Method.of(...).facts"
            )

    def check(self, plan: ReleasePlan) -> None:
        """Raise PrivacyError if a plan protects the client less than agreed.

        Raises:
            PrivacyError: the trust model, the distribution of the noise, the bounding party or the
                local steps differ from the agreement, or the plan has too little noise.
        """
        if not plan.facts.noised_by.uploads_released:
            raise PrivacyError(
                "this client agreed to add its own noise: it refuses a plan for "
                f"{plan.facts.trust} trust"
            )
        if not self.protected:
            return
        if not plan.protected:
            raise PrivacyError(
                "this client agreed to private releases: it refuses a plan without a guarantee"
            )
        if plan.bounded_by != self.bounded_by:
            raise PrivacyError(
                f"this client agreed to contributions bounded by the {self.bounded_by}: it "
                f"refuses a plan in which the {plan.bounded_by} bounds them"
            )
        if plan.family != self.family:
            raise PrivacyError(
                f"this client agreed to {self.family} noise: it refuses a plan with {plan.family} "
                "noise"
            )
        self._check_steps(plan)
        if _alike(plan) and plan.effective_multiplier * _ROUNDING < self.facts.noise_multiplier:
            raise PrivacyError(
                f"this client agreed to a noise multiplier of {self.facts.noise_multiplier:g}: it "
                f"refuses a plan with {plan.effective_multiplier:g}"
            )

    def _check_steps(self, plan: ReleasePlan) -> None:
        """Raise PrivacyError if the plan's local steps are more than agreed, have a higher sampling
        rate, or protect under another relation.
        """
        agreed, asked = self.facts.steps, plan.facts.steps
        if (agreed is None) != (asked is None):
            what = "whole updates" if agreed is None else "local steps"
            raise PrivacyError(
                f"this client agreed to noise its {what}: it refuses a plan for anything else"
            )
        if agreed is None or asked is None:
            return
        if asked.count > agreed.count or asked.rate > agreed.rate * _ROUNDING:
            raise PrivacyError(
                f"this client agreed to {agreed.count} steps per round at the rate "
                f"{agreed.rate:g}: it refuses a plan with {asked.count} steps at the rate "
                f"{asked.rate:g}"
            )
        if plan.facts.relation != self.facts.relation:
            raise PrivacyError(
                f"this client agreed to {self.facts.relation}: it refuses a plan for "
                f"{plan.facts.relation}"
            )

    def record(self, state: RecordDict, client: int, key: str, plan: ReleasePlan) -> None:
        """Count a release before it is made. A repetition with the same noise is not counted again.

        Args:
            state: the node's state.
            client: the client's number.
            key: name of the release's noise (see `fedlgm.noise.release.local_release`); releases
                with the same name have the same noise.
            plan: the release's plan.

        Raises:
            PrivacyError: the release would exceed the agreed budget.
        """
        if wire.RELEASES not in state:
            state[wire.RELEASES] = ConfigRecord()
        # Not through `config_records`, which Flower builds anew at every access
        record = cast(ConfigRecord, state[wire.RELEASES])
        keys, costs = f"{client}.keys", f"{client}.costs"
        past, spent = (
            cast(list[str], record.get(keys, [])),
            cast(list[float], record.get(costs, [])),
        )
        if len(past) != len(spent):
            raise PrivacyError(
                f"the record of client {client}'s releases is damaged: it refuses another"
            )
        place = past.index(key) if key in past else len(past)
        after = [*spent[:place], self._cost(plan), *spent[place + 1 :]]
        releases = self.facts.releases
        allowance = releases if self.allowance is None else self.allowance
        if len(after) > releases or sum(after) > allowance * _ROUNDING:
            raise PrivacyError(
                f"client {client} has made the {releases} releases it agreed to "
                "(privacy.max_participations), or fewer with less noise, and refuses another"
            )
        if not past:
            record[keys], record[costs] = [key], after
        elif place == len(past):  # in place: Flower checks every entry of a newly assigned list
            past.append(key)
            spent.append(after[-1])
        else:
            spent[place] = after[place]

    def _cost(self, plan: ReleasePlan) -> float:
        """Compute the cost of a release, in units of one release at the agreed noise multiplier."""
        if not self.protected or _alike(plan):
            return 1.0
        return (self.facts.noise_multiplier / plan.effective_multiplier) ** 2


def _alike(plan: ReleasePlan) -> bool:
    """Whether every release must have at least the agreed multiplier. This is so for Laplace noise
    and sampled steps, whose costs cannot be added as 1 / m^2.
    """
    return plan.family == "laplace" or plan.facts.steps is not None


@dataclass(frozen=True)
class Agreed:
    """A Flower client's consent, together with its keys and the state in which its releases are
    counted.

    Example:
        >>> from fedlgm import Guarantee, LayerTable, Sampling
        >>> facts = RunFacts(2.0, Sampling("poisson", 10, 1.0), "replace-one", "local", rounds=1)
        >>> plan = ReleasePlan(LayerTable.from_sizes({"a": 3}), [1.0], [2.0], facts, Guarantee("proven", "an example"))
        >>> import torch
        >>> agreed = Agreed(KeyRing.from_seed(None), Consent(facts), RecordDict())
        >>> agreed.admit(Asked(plan, torch.zeros(3), 1, [0])).noise == agreed.keys  # of this model and plan alone
        False

    Attributes:
        keys: key ring from which the order of the batches and the client's noise are drawn.
        consent: the client's consent; None if the client has agreed to nothing.
        state: state of the node.
        needed: whether a client without consent refuses to add its own noise.
        summed: whether the client's contribution is added to other contributions before any party
            sees it, as the workers of a simulation do.

    Example:
        >>> Agreed(KeyRing.from_seed(None), None, RecordDict(), needed=True).needed
        True
    """

    keys: KeyRing
    consent: Consent | None
    state: RecordDict
    needed: bool = False
    summed: bool = False

    def admit(self, asked: Asked) -> Keys:
        """Check that the client consents to a release, and return the keys for it.

        The keys of the noise depend on the model and the plan. If either changes in a repeated
        round, the release is a different one and has different noise.

        Raises:
            PrivacyError: the client has not consented, or the plan protects the client's
                contribution only within a sum, and the server would see this contribution
                separately.
        """
        is_released = asked.plan.facts.noised_by.uploads_released
        if not (asked.plan.facts.noised_by.alone or self.summed):
            raise PrivacyError(
                "the plan protects a sum of several nodes, but the server would see this client's "
                "answer separately: run it over nodes with secure aggregation, or in a simulation"
            )
        if self.consent is not None:
            self.consent.check(asked.plan)
        elif is_released and self.needed:
            raise PrivacyError(
                "this client has not agreed to add its own noise, as local trust requires: give "
                "PrivateClientApp (or PrivateUpdates) a consent=Consent(...)"
            )
        if not is_released:
            return Keys(self.keys, self.keys)
        return Keys(
            self.keys,
            self.keys.derive(asked.model.numpy().tobytes(), asked.plan.to_json().encode()),
        )

    def charge(self, noised: Noised) -> None:
        """Count a release in the client's state, if the client has a consent."""
        if self.consent is not None:
            self.consent.record(self.state, noised.client, noised.name, noised.plan)
