"""AdapLDP: per-tensor bounds and nearly static noise that depends on a scaler. A RECONSTRUCTION.

Source: Yue, Yan, Kang and Shen, "AdapLDP-FL: An Adaptive Local Differential Privacy for Federated
Learning" (IEEE TMC 2025), following its authors' code. Two parts of that code are omitted:

* The scaler c_i follows the norm of the client's unprotected update and is not accounted for. Here
  it is 1, because the LaDP-FL paper states that AdapLDP and Full DP spend equal budgets. The scaler
  is inside a logarithm, sigma = sqrt(2 ln(1.25 / (delta c))) Delta / epsilon, so the noise is
  almost static with any scaler, as the paper notes.
* The direction term multiplies coordinate i of an upload by 1 + 0.02 a_i b_i / (||a|| ||b||) for
  two update directions a and b. Over a whole tensor, the differences of these factors from 1 add up
  to at most 0.02 (Cauchy-Schwarz).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedlgm.papers.ladp.schedules import PaperBaseline
from fedlgm.planning import clipping
from fedlgm.planning.facts import RunFacts
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.transcript import Transcript


@dataclass(frozen=True)
class AdapLDP(PaperBaseline):
    """Every layer is clipped to C / sqrt(K), and all layers get the same static noise."""

    def plan(self, layers: LayerTable, facts: RunFacts, transcript: Transcript) -> ReleasePlan:
        """Make the round's plan, which is the same in every round."""
        reason = "a reconstruction of AdapLDP without its private scaler: layers are bounded, then noised alike"
        clip = clipping.eq_clip(self.client_bound(facts), len(layers))
        sigma = np.full(len(layers), self.client_bound(facts) * facts.noise_multiplier)
        return ReleasePlan(
            layers, clip, sigma, facts, self.guarantee(reason), claim=self.matched_claim(facts)
        )
