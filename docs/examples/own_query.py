"""An auxiliary query and a mechanism that uses it. A recipe names the mechanism
"own_query:FallingBound"."""

from dataclasses import dataclass

import numpy as np
import torch

from fedlgm import Guarantee, Mechanism, ReleasePlan
from fedlgm.planning.queries import AuxiliaryQuery, NoisyQuery, register


@register  # clients look up the query by its name
class Short(AuxiliaryQuery):
    """The share of clients whose update is at most half as long as the bound."""

    name, size, bound = "short", 1, 0.5

    def encode(self, norms, clip):  # [b, layers] and [layers] -> [b, size]
        length = torch.linalg.vector_norm(norms, dim=1, keepdim=True)
        return (length <= torch.linalg.vector_norm(clip) / 2).float() - 0.5

    def decode(self, mean):
        return mean.double().numpy() + 0.5


@dataclass(frozen=True)
class FallingBound(Mechanism):
    """Halves the bound after a round in which most updates were short. The query takes a tenth of
    the budget."""

    bound: float = 1.0

    def plan(self, layers, facts, transcript):
        short, z = transcript.answer("short"), facts.noise_multiplier
        bound = (
            self.bound if transcript.plan is None else float(np.linalg.norm(transcript.plan.clip))
        )
        bound /= 2 if short is not None and short[0] > 0.5 else 1
        clip, sigma = (
            np.full(len(layers), value)
            for value in (bound / len(layers) ** 0.5, bound * z / 0.9**0.5)
        )
        query = NoisyQuery(Short(tuple(layers.sizes.tolist())), Short.bound * z / 0.1**0.5)
        return ReleasePlan(
            layers,
            clip,
            sigma,
            facts,
            Guarantee("proven", "bounded, then noised"),
            queries=(query,),
        )
