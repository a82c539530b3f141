"""The request, which is the parsed content of a question, and the plain values that pass a table of
layers between processes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedlgm.planning.layers import Layer, LayerTable, Slot
from fedlgm.planning.plan import ReleasePlan
from fedlgm_nodes.policy import Policy, Refusal
from fedlgm_nodes.service.costs import COST_BY_BOUND, UnitCost
from fedlgm_nodes.service.work import Work


@dataclass(frozen=True)
class Request:
    """A parsed question for a release, whose plan the policy admits.

    Attributes:
        round: round of the run that asks.
        plan: plan of the release.
        text: JSON text of the plan, as it was received.
        model: the global model, float32 [D].
        work: the requested work.
        data: digest of the examples for which the question was parsed.
    """

    round: int
    plan: ReleasePlan
    text: str
    model: np.ndarray
    work: Work
    data: str = ""

    @property
    def cost(self) -> UnitCost:
        """The cost of the release, by the unit that it protects."""
        return COST_BY_BOUND[self.plan.bounded_by]


def parse_plan(layers: LayerTable, text: str, policy: Policy) -> ReleasePlan:
    """Parse the plan of a release and check it against the policy.

    Raises:
        Refusal: the plan is malformed or not allowed.
    """
    try:
        plan = ReleasePlan.from_json(layers, text)
    except Exception as error:  # a crafted plan may fail anywhere in being parsed
        raise Refusal("plan", f"the plan cannot be read: {error!r}"[:300]) from error
    policy.admit(plan)
    return plan


def layer_values(layers: LayerTable) -> list[Any]:
    """Convert a table of layers to plain values, from which `layers_of` makes an equal table.

    Example:
        >>> layers_of(layer_values(LayerTable.from_sizes({"wide": 8, "narrow": 2}))).offsets
        array([ 0,  8, 10])
    """
    return [
        [layer.name, list(layer.parts), [[slot.name, *slot.shape] for slot in layer.slots]]
        for layer in layers.layers
    ]


def layers_of(values: list[Any]) -> LayerTable:
    """Make a table of layers from the plain values that `layer_values` returns."""
    layers, end = [], 0
    for name, parts, slots in values:
        start, rows = end, []
        for slot, *shape in slots:
            rows.append(Slot(slot, tuple(shape), end, math.prod(shape)))
            end += rows[-1].size
        layers.append(Layer(name, tuple(rows), start, end - start, tuple(parts)))
    return LayerTable(tuple(layers))
