"""A node's account, which prices each release and compares it with the budget and with the caps on
the number of releases.
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
    """The budget and caps of a policy, and how much of them the ledger's releases have used.

    Args:
        policy: the node's policy.
        ledger: the data set's ledger.
    """

    def __init__(self, policy: Policy, ledger: NodeLedger) -> None:
        self._policy, self._ledger = policy, ledger
        self._least("pld")  # refused now if no noise meets the budget

    def epsilon(self, further: privacy.DpEvent | None = None) -> float:
        """Epsilon of all charges for the unit that the budget protects, including one further
        release if given.

        Raises:
            LedgerError: a charged release does not protect the unit that the budget protects.
        """
        budget = self._policy.privacy
        return self._ledger.epsilon(budget.delta, protected(budget), further)

    def price(self, run: str, round: int, request: Request) -> privacy.DpEvent:
        """The cost to charge for a release, if the caps, the smallest distance between rounds and
        the budget allow the release.

        Raises:
            Refusal: a cap, the smallest distance between rounds or the budget does not allow the
                release. The reason says which.
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
            Refusal: not even one further release is allowed. The reason says whether the budget or
                a cap forbids it; for the budget, it states the epsilon after all `asked` releases.
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
        """The policy's budget, in words."""
        budget = self._policy.privacy
        return f"{budget.epsilon:g} at delta {budget.delta:g} over its data set's life"

    def cost(self, request: Request) -> privacy.DpEvent:
        """The cost that is charged for a release. It is at least the cost of one release if the
        largest number of releases that the policy allows shared the budget equally.

        The time at which an answer is sent, and whether a question is refused, may reveal something
        that no noise hides, so no release may be almost free.
        """
        event = self.event(request)
        least = self._least(privacy.events.accountant_of([event]))
        return at_least(event, least, self._policy.privacy.delta)

    def event(self, request: Request) -> privacy.DpEvent:
        """The cost of a release that follows from its plan's numbers, for all nodes at which one
        person may have rows.
        """
        event: privacy.DpEvent = request.cost.event(request.plan, self._policy.privacy.nodes)
        return event

    def _least(self, accountant: str) -> float:
        """The noise multiplier at which the largest number of releases that the policy allows costs
        the whole budget.
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
        """Refuse a release that alone costs more than the whole budget, before the accountant would
        need time and memory in proportion to the cost.
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
        """Refuse a round that is closer to an answered round of its run than the policy or the plan
        allows.

        If noise is correlated over rounds, a node that takes part again too soon incurs a higher
        cost than the plan says.
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
        """For each cap on the number of releases, (number made, number allowed, scope of the cap in
        words).
        """
        limits, ledger, today = self._policy.ask, self._ledger, datetime.now(UTC).date().isoformat()
        return (
            (ledger.count(), limits.releases, "over its data set's life"),
            (ledger.count(run=run), limits.releases_per_run, "per run"),
            (ledger.count(since=today), limits.releases_per_day, "per day"),
        )


def affordable(cost: dict[str, Any], epsilon: float, delta: float) -> int:
    """Largest number of releases with this cost that together have at most `epsilon` at `delta`.
    The search ends at about a million.

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
    """Epsilon at `delta` of `count` releases that each have this cost."""
    event = privacy.events.decode(cost)
    return Past().epsilon([(event, count)], delta, None, privacy.events.accountant_of([event]))
