"""Sensitive DP: bounds and noise that follow each layer's estimated sensitivity. A RECONSTRUCTION.

Source: Xue et al., "Differentially Private Federated Learning with an Adaptive Noise Mechanism"
(IEEE TIFS 2023). The abstract mentions a sensitivity that is estimated from local and global
history. The paper's estimator was not available. Here the sensitivity is estimated from past
releases alone, so the noise scale reveals nothing new. A client's own history would have to be
protected, so the released mean is used instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from typing_extensions import override

from fedlgm.papers.ladp.schedules import PaperBaseline
from fedlgm.planning import clipping
from fedlgm.planning.facts import RunFacts
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.transcript import Transcript


@dataclass(frozen=True)
class SensitiveDP(PaperBaseline):
    """Layer j is clipped to S_j = clamp(kappa h_j, S_min, S_max) and noised by sigma_j = sigma_*
    sqrt(K) S_j.

    Here h_j is the norm of layer j in the last released mean update, corrected for the noise. The
    factor kappa = 1.5 allows a client's update to exceed the mean update. The limits are S_max = C
    / sqrt(K) and S_min = S_max / 10. Both bound and noise follow S_j, so every round costs the
    same: one Gaussian release over all layers.
    """

    @override
    def costs(self, layers: LayerTable, rounds: int) -> np.ndarray:
        """Return equal costs; under "matched", every layer costs as much as a whole release."""
        return np.full(rounds, float(len(layers) if self.calibration == "matched" else 1))

    def plan(self, layers: LayerTable, facts: RunFacts, transcript: Transcript) -> ReleasePlan:
        """Make the round's plan with bounds and noise from the last released mean, or with S_max in
        the first round.
        """
        clip = self._sensitivities(layers, facts, transcript)
        joint = math.sqrt(len(layers))
        if self.calibration == "matched":
            # In the paper's setting, every layer gets the noise of a separate release, and the
            # event counts all K layers.
            joint = 1.0
        reason = "a reconstruction of Sensitive DP: layers are bounded and noised by norms of released updates"
        sigma = facts.noise_multiplier * joint * clip
        guarantee = self.guarantee(reason)
        notes = {"score": clip}
        return ReleasePlan(
            layers, clip, sigma, facts, guarantee, claim=self.matched_claim(facts), notes=notes
        )

    def _sensitivities(
        self, layers: LayerTable, facts: RunFacts, transcript: Transcript
    ) -> np.ndarray:
        largest = clipping.eq_clip(self.client_bound(facts), len(layers))
        if transcript.mean is None or transcript.plan is None:
            return largest
        history = clipping.released_norms(transcript.mean, transcript.plan)
        return np.clip(1.5 * history, 0.1 * largest, largest)
