"""Alternating low-rank factors: each round trains and releases only one factor of every adapter,
and spends the whole budget of the round on it.

Source: RoLoRA (Chen et al. 2024, arXiv 2409.02346), to which this module adds noise on the released
factor.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedlgm.errors import ConfigError
from fedlgm.mechanisms.mechanism import Bounded, released_scales
from fedlgm.planning.allocation import shares
from fedlgm.planning.facts import RunFacts
from fedlgm.planning.layers import Layer, LayerTable, factor_of
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.guarantee import Guarantee

_PROVEN = "the order of releases is public; every contribution is bounded, then noised or not sent"


@dataclass(frozen=True)
class Alternate(Bounded):
    """Odd rounds release the factors B of all adapters, and even rounds release the factors A.

    B comes first, because B is zero in the initial model, so that the gradient of A is zero. Layers
    that belong to no adapter, such as a new head, are released in every round. A factor that is not
    released is not trained. The budget of a round is spread over the layers that it releases. If
    the model does not train both factors, every round releases all layers.

    Attributes:
        bound: l2 bound S of one client's update; each of n released layers has S / sqrt(n).
        rule: allocation rule of the noise, one of `fedlgm.planning.allocation.names()`.

    Raises:
        ConfigError: the rule is unknown; in `plan`, a layer holds both factors, or one factor and
            other parameters.

    Example:
        >>> from torch import nn
        >>> from fedlgm import Sampling
        >>> from fedlgm.training.models.adapters import LowRank
        >>> layers = LayerTable.from_module(LowRank(nn.Linear(6, 4), rank=2), "factor")
        >>> plan = Alternate("alternate").plan(layers, RunFacts(1.0, Sampling("poisson", 100, 0.1)), Transcript(0, ()))
        >>> plan.released.tolist(), plan.sigma.tolist(), plan.freezes
        ([False, True], [inf, 1.0], True)
    """

    rule: str = "snr-consistent"

    def __post_init__(self) -> None:
        super().__post_init__()
        shares(self.rule, [1.0], [1])

    def plan(self, layers: LayerTable, facts: RunFacts, transcript: Transcript) -> ReleasePlan:
        """Make the round's plan, which depends on the past only through the number of the round."""
        factors = [self._factor(layer) for layer in layers.layers]
        both = {"A", "B"} <= set(factors)
        released = np.array(
            [not both or factor in (None, "BA"[transcript.rounds % 2]) for factor in factors]
        )
        clip, sigma = released_scales(
            self.rule, self.bound, layers, released, facts.noise_multiplier
        )
        return ReleasePlan(layers, clip, sigma, facts, Guarantee("proven", _PROVEN), freezes=True)

    def _factor(self, layer: Layer) -> str | None:
        factors = {factor_of(slot.name) for slot in layer.slots}
        if len(factors) > 1:
            raise ConfigError(
                f"{self.name}: layer {layer.name!r} holds both factors of an adapter, or one "
                "factor and other parameters: use mechanism.group_by = 'factor', 'kind' or "
                "'tensor'"
            )
        return factors.pop()
