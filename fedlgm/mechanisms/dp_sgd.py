"""DP-SGD: one step is one release of clipped per-example gradients; the unit of privacy is an example.

These mechanisms plan the steps of `fedlgm.example_level.train`: a round is a step, the population is the training set
and the sampling rate is that of the batch. They bound examples, not clients, so a federation's aggregator refuses them.

Source: Abadi et al. (CCS 2016); Bu et al. (NeurIPS 2023) for Auto-S, equal to NSGD; Xia et al. (AAAI 2023) for DP-PSAC;
SNR-consistent allocation paper, Table 2, for the allocations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedlgm import clipping
from fedlgm.allocation import names as allocations
from fedlgm.allocation import shares, spread
from fedlgm.errors import ConfigError
from fedlgm.example_level.scaling import PSAC, AutoS, FlatClip, PerLayerClip, Scaling
from fedlgm.facts import RunFacts
from fedlgm.layers import LayerTable
from fedlgm.mechanisms.base import Mechanism, check_positive
from fedlgm.plan import ReleasePlan
from fedlgm.privacy.guarantee import Guarantee
from fedlgm.transcript import Transcript

_PROVEN = "every example's gradient is bounded before noise of a public scale is added to the sum"


@dataclass(frozen=True)
class DPSGD(Mechanism):
    """Clipped or normalised per-example gradients with Gaussian noise on their sum.

    Attributes:
        bound: l2 bound C of one example's contribution.
        style: "flat" (the whole gradient is clipped), "per-layer" (EqClip, s_j = C / sqrt(K)), "auto-s" or "dp-psac"
            (the whole gradient is normalised).
        allocation: how the noise is spread over the layers for "per-layer"; see `fedlgm.allocation`.
        stabiliser: gamma of "auto-s", r of "dp-psac".
    """

    bound: float = 1.0
    style: Literal["flat", "per-layer", "auto-s", "dp-psac"] = "flat"
    allocation: str = "uniform"
    stabiliser: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self.name, bound=self.bound, stabiliser=self.stabiliser)
        if self.style not in ("flat", "per-layer", "auto-s", "dp-psac"):
            raise ConfigError(f"{self.name}: unknown style {self.style!r}; known: flat, per-layer, auto-s, dp-psac")
        if self.allocation not in allocations() or (self.style != "per-layer" and self.allocation != "uniform"):
            known = ", ".join(allocations()) if self.style == "per-layer" else "uniform"
            raise ConfigError(f"{self.name}: allocation of style {self.style!r} must be one of {known}")

    def table(self, layers: LayerTable) -> LayerTable:
        """The layers, or all merged into one where the gradient is bounded as a whole."""
        return layers if self.style == "per-layer" else layers.merged()

    def plan(self, layers: LayerTable, facts: RunFacts, transcript: Transcript) -> ReleasePlan:
        """The same plan in every step."""
        if facts.trust != "central" or facts.sampling.scheme != "poisson":
            raise ConfigError(f"{self.name}: a step samples examples by Poisson and adds its noise centrally")
        clip = clipping.eq_clip(self.bound, len(layers))
        sigma = spread(shares(self.allocation, clip, layers.sizes), clip, facts.noise_multiplier)
        guarantee = Guarantee("proven", _PROVEN, unit="example")
        return ReleasePlan(layers, clip, sigma, facts, guarantee, bounded_by="trainer")

    def scaling(self, plan: ReleasePlan) -> Scaling:
        """How the step's gradients are counted so that they keep the plan's bounds; a layer without noise counts 0."""
        if self.style == "per-layer":
            return PerLayerClip(tuple(np.where(plan.released, plan.clip, 0.0).tolist()))
        if self.style == "auto-s":
            return AutoS(self.bound, self.stabiliser)
        return PSAC(self.bound, self.stabiliser) if self.style == "dp-psac" else FlatClip(self.bound)
