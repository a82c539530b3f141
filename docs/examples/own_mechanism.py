"""A mechanism in 20 lines. A recipe names it "own_mechanism:InverseSize"."""

from dataclasses import dataclass

import numpy as np

from fedlgm import Guarantee, Mechanism, ReleasePlan
from fedlgm.planning import allocation


@dataclass(frozen=True)
class InverseSize(Mechanism):
    """Budget shares in inverse proportion to the layers' sizes."""

    bound: float = 1.0

    def plan(self, layers, facts, transcript):
        clip = np.full(len(layers), self.bound / len(layers) ** 0.5)
        shares = 1 / layers.sizes
        sigma = allocation.spread(shares / shares.sum(), clip, facts.noise_multiplier)
        return ReleasePlan(layers, clip, sigma, facts, Guarantee("proven", "bounded, then noised"))
