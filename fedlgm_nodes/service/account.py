"""A node's remaining budget: the price of a release, the caps on the number of releases, and their
common budget.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fedlgm import privacy
from fedlgm.privacy.floor import at_least
from fedlgm.privacy.past import Past
from fedlgm_nodes.policy import Policy, Refusal
from fedlgm_nodes.service.ledger import NodeLedger
from fedlgm_nodes.service.request import Request
from fedlgm_nodes.service.row import protected

_ROUNDING = 1 + 1e-6


class Account:
    """A policy's budget and caps, with the ledger's charges.

    Args:
        policy: the node's policy.
        ledger: the data set's ledger.
    """

    def __init__(self, policy: Policy, ledger: NodeLedger) -> None:
        self._policy, self._ledger = policy, ledger
        self._least("pld")  # refused now if no noise meets the budget

    def epsilon(self, further: privacy.DpEvent | None = None) -> float:
        """Epsilon of all charges for the protected unit, including one further release if given.

        Raises:
            LedgerError: charged releases protect less than the budget does.
        """
        budget = self._policy.privacy
        return self._ledger.epsilon(budget.delta, protected(budget), further)

    def price(self, run: str, round: int, request: Request) -> privacy.DpEvent:
        """The charge of a release, if the caps, the least separation of rounds and the budget allow
        it.

        Raises:
            Refusal: a cap, the least separation of rounds or the budget does not allow the release;
                the reason says which.
        """
        budget = self._policy.privacy
        self._check_caps(run)
        self._check_separation(run, round, request)
        self._check_alone(request)
        cost = self.cost(request)
        after = self.epsilon(cost)
        if not after <= budget.epsilon * _ROUNDING:
            raise Refusal(
                "budget-spent",
                f"the release would bring this node's epsilon to {after:.4g}; its policy allows "
                f"{self._allowed}",
            )
        return cost

    def affordable_releases(self, run: str, request: Request, asked: int) -> int:
        """Number of further releases like this one, at most `asked`, that budget and caps allow.

        Raises:
            Refusal: not one further release is allowed. It says whether the budget or a cap forbids
                it; for the budget, it states the epsilon with all `asked` releases.
        """
        budget = self._policy.privacy
        most = budget.epsilon * _ROUNDING
        self._check_caps(run)
        self._check_alone(request)
        cost = self.cost(request)
        if not self.epsilon(cost) <= most:
            after = self.epsilon(privacy.events.repeat_event(cost, asked))
            raise Refusal(
                "budget-spent",
                f"its budget has nothing left for such a run: {asked} more "
                f"release{'s' * (asked > 1)} would bring "
                f"its epsilon from {self.epsilon():.4g} to {after:.4g}; its policy allows "
                f"{self._allowed}",
            )
        # `low` releases fit, `high` + 1 do not
        low, high = 0, min([asked, *(allowed - count for count, allowed, _ in self._caps(run))])
        while low < high:
            middle = (low + high + 1) // 2
            within = self.epsilon(privacy.events.repeat_event(cost, middle)) <= most
            low, high = (middle, high) if within else (low, middle - 1)
        return low

    @property
    def _allowed(self) -> str:
        """The policy's budget in words."""
        budget = self._policy.privacy
        return f"{budget.epsilon:g} at delta {budget.delta:g} over its data set's life"

    def cost(self, request: Request) -> privacy.DpEvent:
        """The cost of a release, but at least the cost of one release if the policy's largest
        number of releases shared the whole budget equally.

        The time of an answer and a refusal reveal something that no noise covers, so no release may
        be almost free.
        """
        event = self.event(request)
        least = self._least(privacy.events.accountant_of([event]))
        return at_least(event, least, self._policy.privacy.delta)

    def event(self, request: Request) -> privacy.DpEvent:
        """The cost that follows from a plan's numbers, at all nodes of a person."""
        event: privacy.DpEvent = request.cost.event(request.plan, self._policy.privacy.nodes)
        return event

    def _least(self, accountant: str) -> float:
        """Noise multiplier at which as many releases as the policy allows together cost the whole
        budget.
        """
        budget, releases = self._policy.privacy, self._policy.ask.releases
        multiplier = privacy.calibrate(
            budget.epsilon, budget.delta, steps=releases, accountant=accountant
        )
        return multiplier * (1 + 1e-4)

    def _check_caps(self, run: str) -> None:
        for count, most, per in self._caps(run):
            if count >= most:
                raise Refusal(
                    "budget-spent",
                    f"this node makes at most {most} releases {per}, and has already made them",
                )

    def _check_alone(self, request: Request) -> None:
        """Refuse a release that alone costs more than the whole budget. Composing such a release
        would take time and memory in proportion to its cost.
        """
        budget = self._policy.privacy
        alone = request.cost.least_epsilon(request.plan, budget.delta)
        if not alone <= budget.epsilon * _ROUNDING:
            raise Refusal(
                "budget-spent",
                f"this single release has an epsilon of {alone:.4g} or more; the policy of this "
                f"node allows {self._allowed}",
            )

    def _check_separation(self, run: str, round: int, request: Request) -> None:
        """Refuse a round that is closer to an answered round of its run than policy or plan allow.

        If noise is correlated over rounds, a participation too soon costs more than the plan says.
        """
        apart = max(self._policy.ask.min_separation, request.plan.facts.sampling.separation or 1)
        near = self._ledger.nearest(run, round) if apart > 1 else None
        if near is not None and abs(round - near) < apart:
            raise Refusal(
                "separation",
                f"round {round} is {abs(round - near)} rounds from round {near} of its run, in "
                f"which this node took part; at least {apart} must lie between",
            )

    def _caps(self, run: str) -> tuple[tuple[int, int, str], ...]:
        """(number made, number allowed, period in words) of each cap on the number of releases."""
        limits, ledger, today = self._policy.ask, self._ledger, datetime.now(UTC).date().isoformat()
        return (
            (ledger.count(), limits.releases, "over its data set's life"),
            (ledger.count(run=run), limits.releases_per_run, "per run"),
            (ledger.count(since=today), limits.releases_per_day, "per day"),
        )


def affordable(cost: dict[str, Any], epsilon: float, delta: float) -> int:
    """Number of releases of a work that together cost at most `epsilon` at `delta`.

    Example:
        >>> event = privacy.events.encode(privacy.events.gaussian_event(4.0))
        >>> affordable(event, 1.0, 1e-5), affordable(event, 3.0, 1e-5)
        (1, 8)
    """

    def fits(count: int) -> bool:
        return epsilon_of(cost, count, delta) <= epsilon

    high = 1
    while fits(high) and high < 1 << 20:
        high *= 2
    low = high // 2 if high > 1 else 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def epsilon_of(cost: dict[str, Any], count: int, delta: float) -> float:
    """Epsilon at `delta` of `count` releases of one cost."""
    event = privacy.events.decode(cost)
    return Past().epsilon([(event, count)], delta, None, privacy.events.accountant_of([event]))
