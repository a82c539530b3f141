"""AdapLDP: per-tensor bounds and nearly static noise that depends on a scaler. A RECONSTRUCTION.

Source: Yue, Yan, Kang and Shen, "AdapLDP-FL: An Adaptive Local Differential Privacy for Federated Learning" (IEEE TMC
    2025), following its authors' code. Two parts of that code are omitted:

    * the scaler c_i follows the client's private update norm and is not accounted for; here it is a public constant. It
      sits inside a logarithm, sigma = sqrt(2 ln(1.25 / (delta c))) Delta / epsilon, so the noise is almost static
      either way, as the LaDP-FL paper notes;
    * the direction term multiplies coordinate i of an upload by 1 + 0.02 a_i b_i / (||a|| ||b||) for two update
      directions a and b. The factors differ from 1 by at most 0.02 in sum over a whole tensor (Cauchy-Schwarz).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedlgm import clipping
from fedlgm.errors import check_rate
from fedlgm.facts import RunFacts
from fedlgm.layers import LayerTable
from fedlgm.papers.ladp.schedules import PaperBaseline
from fedlgm.plan import ReleasePlan
from fedlgm.transcript import Transcript


@dataclass(frozen=True)
class AdapLDP(PaperBaseline):
    """Every layer is clipped to C / sqrt(K); all get the same static noise.

    Attributes:
        scaler: c in (0, 1] of sigma = sqrt(2 ln(1.25 / (delta c))) Delta / epsilon. Under calibration = "matched" the
            noise is that of Full DP times sqrt(ln(1.25 / (delta c)) / ln(1.25 / delta)); the authors start at 0.001;
            the default 1 follows the LaDP-FL paper's statement that both methods spend the same.
    """

    scaler: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rate(self.name, scaler=self.scaler)

    def calibrate(self, facts: RunFacts) -> float:
        """sigma_* of every round ("equal-total") or the code's noise over C ("matched")."""
        if self.calibration == "matched":
            _, delta = facts.budget()
            scale = math.sqrt(math.log(1.25 / (delta * self.scaler)) / math.log(1.25 / delta))
            return scale * self.matched_multiplier(facts)
        return super().calibrate(facts)

    def plan(self, layers: LayerTable, facts: RunFacts, transcript: Transcript) -> ReleasePlan:
        """The same plan in every round."""
        reason = "a reconstruction of AdapLDP without its private scaler: layers are bounded, then noised alike"
        clip = clipping.eq_clip(self.client_bound(facts), len(layers))
        sigma = np.full(len(layers), self.client_bound(facts) * facts.noise_multiplier)
        return ReleasePlan(layers, clip, sigma, facts, self.guarantee(reason), claim=self.matched_claim(facts))
