"""The flat Gaussian mechanism after water-filling: the large layers of an update are first cut to
one common level.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedlgm.mechanisms.layerwise_gaussian import FlatGaussian
from fedlgm.planning.facts import RunFacts
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.transcript import Transcript


@dataclass(frozen=True)
class WaterFilling(FlatGaussian):
    """One bound S and equal noise for the whole update. An update whose norm exceeds S is shortened
    in its largest layers first.

    Each client shortens all layers with norms above a level c to norm c, where sum_j min(||g_j||,
    c)^2 = S^2 determines c (see `fedlgm.planning.filling`). The sum then bounds the whole update by
    S, as for `gaussian`, so noise and charge are the same as for `gaussian`. If all layers have
    large norms, they are clipped as by `uniform`. An update whose norm is at most S is not changed.

    Attributes:
        bound: l2 bound S of one client's update.

    Example:
        >>> from fedlgm import Sampling
        >>> mechanism, facts = WaterFilling("water-filling"), RunFacts(2.0, Sampling("poisson", 100, 0.1))
        >>> layers = mechanism.table(LayerTable.from_sizes({"a": 3, "b": 2}))
        >>> plan = mechanism.plan(layers, facts, Transcript(0, ()))
        >>> plan.fills, plan.clip.tolist(), plan.effective_multiplier
        ((3, 2), [1.0], 2.0)
    """

    def plan(self, layers: LayerTable, facts: RunFacts, transcript: Transcript) -> ReleasePlan:
        """Make the round's plan, which is the same in every round. If the model has one layer, it
        is the plan of `gaussian`.
        """
        flat, parts = super().plan(layers, facts, transcript), layers.layers[0].parts
        return replace(flat, fills=parts) if len(parts) > 1 else flat
