"""The cost of a node's release, by the unit that it protects.

The cost follows from the plan's own numbers. The guarantee that a plan states is only the server's
claim, and this module does not read it. The module loads no torch, so that the service's own
process can use it.
"""

from __future__ import annotations

import math
from typing import Any, cast

from fedlgm import privacy
from fedlgm.planning.facts import LocalSteps
from fedlgm.planning.plan import ReleasePlan
from fedlgm.privacy.guarantee import CLIENT_DATA as CLIENT
from fedlgm.privacy.guarantee import ONE_EXAMPLE as EXAMPLE
from fedlgm.privacy.guarantee import Unit

_REPLACED = privacy.guarantee.SENSITIVITY_FACTOR["replace-one"]


class WholeDataCost:
    """The cost of a release that protects all of the node's data.

    The cost is computed for the relation replace-one and without amplification by sampling, since a
    reader of the reply knows that this node took part. With correlated noise, a participation
    affects the releases of later rounds, so the cost depends on the norm of the participation's
    column in the matrix C of the noise.

    Attributes:
        name: the unit's name.
        protects: unit and neighbouring relation of the cost.
    """

    name: Unit = "client"
    protects = CLIENT

    def event(self, plan: ReleasePlan, nodes: int = 1) -> Any:
        """The cost of a release, computed from the bounds and the noise that this node applies.

        Args:
            plan: the release.
            nodes: number of nodes at which one person may have rows. This node charges the other
                nodes' releases, too. If each node adds its own noise, they are further releases of
                equal cost. Otherwise they are further terms of the same sum.
        """
        noise, copies = plan.facts.noise, _copies(plan, nodes)
        moved = _REPLACED if noise is None else _REPLACED * noise.amplified_column_norm()
        multiplier = plan.effective_multiplier / (moved * (nodes // copies))
        if plan.family == "laplace":
            event = privacy.events.laplace_event(1.0 / multiplier, 1.0, "replace-one")
        else:
            event = plan.facts.noised_by.event(multiplier, 1.0)
        return privacy.events.repeat_event(event, copies)

    def least_epsilon(self, plan: ReleasePlan, delta: float) -> float:
        """A lower bound on a release's epsilon in closed form, or 0 for noise with which the
        accountant is always fast.

        Laplace noise whose total shift is a times its scale has delta(epsilon) = 1 - exp((epsilon -
        a) / 2).
        """
        if plan.family != "laplace":
            return 0.0
        multiplier = plan.effective_multiplier
        return (
            max(0.0, _REPLACED / multiplier + 2 * math.log1p(-delta))
            if multiplier > 0
            else math.inf
        )


class SingleExamplesCost:
    """The cost of a release that protects single examples, which is the cost of its steps for the
    relation add-or-remove-one.

    The cost is amplified by sampling, since the node keeps secret which examples a step samples.
    """

    name: Unit = "example"
    protects = EXAMPLE

    def event(self, plan: ReleasePlan, nodes: int = 1) -> Any:
        """See `WholeDataCost.event`. Each node draws its own examples for its own steps."""
        steps = cast(LocalSteps, plan.facts.steps)  # the policy admits no plan without them
        step = privacy.events.gaussian_event(plan.effective_multiplier, steps.rate)
        return privacy.events.repeat_event(step, steps.count * nodes)

    def least_epsilon(self, plan: ReleasePlan, delta: float) -> float:
        """Zero, because steps have Gaussian noise."""
        return 0.0


def _copies(plan: ReleasePlan, nodes: int) -> int:
    """Number of separate releases that are charged for one release, if a person has rows at this
    many nodes.
    """
    return nodes if plan.facts.noised_by.uploads_released else 1


UnitCost = WholeDataCost | SingleExamplesCost

COST_BY_BOUND: dict[str, UnitCost] = {
    "aggregator": WholeDataCost(),
    "trainer": SingleExamplesCost(),
}
"""The cost of a plan, by the party that bounds the contributions. The policy admits only plans with
these parties.
"""
