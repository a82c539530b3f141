"""Noise shares that follow what was released: the layers' weights, or their updates with the noise taken off.

sum_j s_j^2 / sigma_j^2 = 1 / sigma_*^2 in every round, whatever the shares are, so a round costs exactly one Gaussian
mechanism of the run's multiplier. Shares are functions of released models and updates: post-processing, which costs
nothing, and ordinary adaptive composition of releases of one fixed multiplier applies (docs/guarantees.md).

What it is worth, measured: docs/results/adaptive.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedlgm import clipping
from fedlgm.allocation import shares, spread
from fedlgm.errors import ConfigError
from fedlgm.facts import RunFacts
from fedlgm.layers import LayerTable
from fedlgm.mechanisms.base import Mechanism, check_positive
from fedlgm.plan import ReleasePlan
from fedlgm.privacy.guarantee import Guarantee
from fedlgm.transcript import Transcript

_PROVEN = (
    "every contribution is bounded, then noised; the noise's split over the layers comes from released models alone"
)


@dataclass(frozen=True)
class AdaptiveAllocation(Mechanism):
    """EqClip bounds s_j = S / sqrt(K) and shares p_j that move slowly towards a target t_j made of released outputs.

    In round t + 1, with p the shares of round t, p_j <- p_j^memory t_j^(1 - memory), normalised, and
    sigma_j = sigma_* s_j / sqrt(p_j). The targets are the optima of two objectives under the budget:

        follow = "weights"   t_j ~ s_j^2 d_j / ||x_j||^2      noise in proportion to the root mean square weight of the
                                                              layer in the released model x: equal relative noise
        follow = "updates"   t_j ~ s_j sqrt(d_j) / m_j        least sum of 1 / SNR_j, SNR_j = m_j^2 / (d_j sigma_j^2),
                                                              m_j the last released norm, noise taken off

    The first round knows the initial model, which is public, but no update: "weights" starts at its target, "updates"
    at the SNR-consistent rule, which is its target for m_j = s_j. Shares are slow because noise that is correlated over
    rounds cancels only between equal scales, and because one round's figures are mostly noise.

    Neighbouring relation, unit and trust are the run's, as for every rule of `fedlgm.allocation`.

    Attributes:
        bound: l2 bound S > 0 of one client's update.
        follow: "weights" or "updates".
        memory: weight of the last round's shares in [0, 1]; 1 keeps the first round's.
        span: >= 1; before it is averaged, a target is cut to within this factor of the targets' geometric mean.

    Example:
        >>> import torch
        >>> from fedlgm import LayerTable, RunFacts, Sampling, Transcript, mechanisms
        >>> layers = LayerTable.from_sizes({"wide": 8, "narrow": 2})
        >>> model = torch.cat([torch.full((8,), 0.1), torch.full((2,), 0.2)])
        >>> facts = RunFacts(1.5, Sampling("poisson", 100, 0.1))
        >>> plan = mechanisms.get("adaptive").plan(layers, facts, Transcript.start(model))
        >>> round(plan.sigma[1] / plan.sigma[0], 3), round(plan.effective_multiplier, 6)
        (2.0, 1.5)
    """

    bound: float = 1.0
    follow: Literal["weights", "updates"] = "weights"
    memory: float = 0.9
    span: float = 8.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self.name, bound=self.bound)
        if not 0 <= self.memory <= 1:
            raise ConfigError(f"{self.name}: memory must lie in [0, 1], got {self.memory}")
        if not (np.isfinite(self.span) and self.span >= 1):
            raise ConfigError(f"{self.name}: span must be finite and at least 1, got {self.span}")

    def plan(self, layers: LayerTable, facts: RunFacts, transcript: Transcript) -> ReleasePlan:
        """The round's plan: a function of public facts, released models and the last released update."""
        clip = clipping.eq_clip(self.bound, len(layers))
        target = self._target(layers, clip, transcript)
        if transcript.plan is not None:
            with np.errstate(divide="ignore"):
                target = np.exp(self.memory * np.log(transcript.plan.shares) + (1 - self.memory) * np.log(target))
        sigma = spread(target / target.sum(), clip, facts.noise_multiplier)
        return ReleasePlan(layers, clip, sigma, facts, Guarantee("proven", _PROVEN))

    def _target(self, layers: LayerTable, clip: np.ndarray, transcript: Transcript) -> np.ndarray:
        """Shares that the last released outputs ask for, normalised and positive, [K]."""
        if self.follow == "weights":
            norms = layers.norms(transcript.models[-1]).numpy().astype(np.float64)
            raw = self._cut((clip * np.sqrt(layers.sizes)) ** 2, norms**2)
        elif transcript.mean is None or transcript.plan is None:
            return shares("snr-consistent", clip, layers.sizes)
        else:
            norms = clipping.released_norms(transcript.mean, transcript.plan)
            raw = self._cut(clip * np.sqrt(layers.sizes), norms)
        return raw / raw.sum()

    def _cut(self, wanted: np.ndarray, known: np.ndarray) -> np.ndarray:
        """`wanted` / `known` within `span` of its geometric mean; 1 everywhere if nothing is known at all, [K]."""
        usable = (known > 0) & np.isfinite(known)
        if not usable.any():
            return np.ones(len(wanted))
        ratio = np.full(len(wanted), np.inf)
        ratio[usable] = wanted[usable] / known[usable]
        middle = np.exp(np.mean(np.log(ratio[usable])))
        return np.clip(ratio, middle / self.span, middle * self.span)
