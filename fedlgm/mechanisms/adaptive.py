"""An allocation that follows past releases: each layer's noise is proportional to the root mean
square of its released weights.

Whatever the layers' shares of the budget are, sum_j s_j^2 / sigma_j^2 = 1 / sigma_*^2 in every
round, so a round costs exactly one Gaussian mechanism with the run's multiplier. The shares depend
only on released models, and post-processing costs nothing, so ordinary adaptive composition of
releases with one fixed multiplier applies (docs/guarantees.md).

docs/results/adaptive.md has measurements of this allocation and of others that were tried.
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
    """EqClip bounds s_j = S / sqrt(K), with noise scales that slowly become proportional to the
    root mean square of each layer's weights.

    With x the last released model and d_j the size of layer j, the target of the shares is

        t_j ~ s_j^2 d_j / ||x_j||^2,    that is sigma_j in proportion to ||x_j|| / sqrt(d_j).

    With these shares the noise is equally large relative to every layer's weights. Let p be the
    last round's shares. The next shares q_j are p_j^memory t_j^(1 - memory), normalised, and
    sigma_j = sigma_* s_j / sqrt(q_j). The first round uses the target of the initial model, which
    is public. If all weights are equal, this target is the "uniform" rule. Shares change slowly
    because correlated noise cancels only between equal scales, and because a split that jumps from
    round to round costs accuracy. Noise enlarges the weights of a layer, but this does not increase
    its noise further: if the layers held only noise, the target would equal the present shares.

    The neighbouring relation, the unit of privacy and the trust model are those of the run, as for
    every rule of `fedlgm.planning.allocation`.

    Attributes:
        bound: l2 bound S > 0 of one client's update.
        memory: weight of the last round's shares in [0, 1]; 1 keeps the first round's shares.
        span: factor >= 1; before averaging, each layer's target is limited to within this factor of
            the geometric mean of all targets. With a factor of 8, small layers get so little of the
            budget that the accuracy is lower than with fixed rules.

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
        """Make the round's plan, a function of public facts, the last released model and the last
        plan.
        """
        clip = clipping.eq_clip(self.bound, len(layers))
        share = self._target(layers, clip, transcript)
        if transcript.plan is not None:
            share = transcript.plan.shares**self.memory * share ** (1 - self.memory)
        sigma = spread(share / share.sum(), clip, facts.noise_multiplier)
        return ReleasePlan(layers, clip, sigma, facts, Guarantee("proven", _PROVEN))

    def _target(self, layers: LayerTable, clip: np.ndarray, transcript: Transcript) -> np.ndarray:
        """Compute the target shares from the last released model, positive, [K]."""
        weights = layers.squared_norms(transcript.models[-1]).numpy() / layers.sizes
        target = within(clip**2, weights, self.span)
        return np.asarray(target / target.sum())


def within(wanted: np.ndarray, known: np.ndarray, span: float) -> np.ndarray:
    """Return the ratios `wanted` / `known`, limited to within a factor of their geometric mean,
    [K].

    Where `known` is 0 or not finite, the ratio is as large as the limit permits. If every entry of
    `known` is 0 or not finite, all ratios are 1.

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
