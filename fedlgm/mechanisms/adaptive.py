"""An allocation that follows past releases: noise in proportion to the released model's weights.

For all shares sum_j s_j^2 / sigma_j^2 = 1 / sigma_*^2 in every round, so a round costs exactly one
Gaussian mechanism of the run's multiplier. Shares are functions of released models. Post-processing
costs nothing, so ordinary adaptive composition of releases of one fixed multiplier applies
(docs/guarantees.md).

docs/results/adaptive.md has measurements and other attempts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedlgm.checks import AtLeastOne, Fraction, check_at_least_one
from fedlgm.mechanisms.mechanism import Bounded
from fedlgm.planning import clipping
from fedlgm.planning.allocation import spread
from fedlgm.planning.facts import RunFacts
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.guarantee import Guarantee

_PROVEN = "every contribution is bounded, then noised; the noise's split over the layers follows released models alone"


@dataclass(frozen=True)
class AdaptiveAllocation(Bounded):
    """EqClip bounds s_j = S / sqrt(K), and noise that moves slowly towards the layers' root mean
    square weights.

    With x the last released model and d_j the size of layer j, the target of the shares is

        t_j ~ s_j^2 d_j / ||x_j||^2,    that is sigma_j in proportion to ||x_j|| / sqrt(d_j).

    The noise is then equally large relative to every layer's weights. Let p be the last round's
    shares. The next shares are p_j^memory t_j^(1 - memory), normalised, and sigma_j = sigma_* s_j /
    sqrt(p_j). The first round uses the target of the initial model, which is public. If all weights
    are equal, this target is the "uniform" rule. Shares change slowly because correlated noise
    cancels only between equal scales, and because a split that jumps from round to round costs
    accuracy. Noise enlarges weights, but this effect does not reinforce itself: if the layers held
    only noise, the target would equal the present split.

    Neighbouring relation, unit and trust are those of the run, as for every rule of
    `fedlgm.planning.allocation`.

    Attributes:
        bound: l2 bound S > 0 of one client's update.
        memory: weight of the last round's shares in [0, 1]; 1 keeps the first round's shares.
        span: >= 1; before averaging, a target is limited to within this factor of the targets'
            geometric mean. With a factor of 8, small layers get so little of the budget that the
            accuracy is lower than with fixed rules.

    Example:
        >>> import torch
        >>> from fedlgm import LayerTable, RunFacts, Sampling, Transcript, mechanisms
        >>> layers = LayerTable.from_sizes({"wide": 8, "narrow": 2})
        >>> model = torch.cat([torch.full((8,), 0.1), torch.full((2,), 0.2)])
        >>> facts = RunFacts(1.5, Sampling("poisson", 100, 0.1))
        >>> plan = mechanisms.get("adaptive").plan(layers, facts, Transcript.start(model))
        >>> round(float(plan.sigma[1] / plan.sigma[0]), 3), round(plan.effective_multiplier, 6)
        (2.0, 1.5)
    """

    memory: Fraction = 0.9
    span: AtLeastOne = 2.0

    def plan(self, layers: LayerTable, facts: RunFacts, transcript: Transcript) -> ReleasePlan:
        """The round's plan: a function of public facts, the last released model and the last
        plan.
        """
        clip = clipping.eq_clip(self.bound, len(layers))
        share = self._target(layers, clip, transcript)
        if transcript.plan is not None:
            share = transcript.plan.shares**self.memory * share ** (1 - self.memory)
        sigma = spread(share / share.sum(), clip, facts.noise_multiplier)
        return ReleasePlan(layers, clip, sigma, facts, Guarantee("proven", _PROVEN))

    def _target(self, layers: LayerTable, clip: np.ndarray, transcript: Transcript) -> np.ndarray:
        """Target shares from the last released model, positive, [K]."""
        weights = layers.squared_norms(transcript.models[-1]).numpy() / layers.sizes
        target = within(clip**2, weights, self.span)
        return np.asarray(target / target.sum())


def within(wanted: np.ndarray, known: np.ndarray, span: float) -> np.ndarray:
    """The ratios `wanted` / `known`, limited to within a factor of their geometric mean, [K].

    If `known` is 0 or not finite, the ratio is as large as the limit permits. If `known` is so for
    all entries, all ratios are 1.

    Args:
        wanted: positive, [K].
        known: at least 0, [K].
        span: the factor, at least 1.

    Raises:
        ConfigError: the factor is below 1 or not finite.

    Example:
        >>> within(np.ones(2), np.array([1.0, 4.0]), span=8.0).tolist()
        [1.0, 0.25]
        >>> within(np.ones(2), np.array([0.01, 1.0]), span=2.0).round(6).tolist()  # to within a factor of 2 of 10
        [20.0, 5.0]
    """
    check_at_least_one(span=span)
    usable = (known > 0) & np.isfinite(known)
    if not usable.any():
        return np.ones(len(wanted))
    ratio = np.full(len(wanted), np.inf)
    ratio[usable] = wanted[usable] / known[usable]
    middle = np.exp(np.mean(np.log(ratio[usable])))
    return np.asarray(np.clip(ratio, middle / span, middle * span))
