"""Time-Varying DP: noise that falls geometrically over the rounds. A RECONSTRUCTION.

Source: Yuan, Ni, Ding, Wei, Li and Poor, "Amplitude-Varying Perturbation for Balancing Privacy and
Utility in Federated Learning" (IEEE TIFS 2023). The abstract mentions a geometric series over the
rounds; the paper's formulas were not available. The paper's online refinement of the number of
rounds is omitted, because it needs a loss that is not released.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedlgm.papers.ladp.schedules import ScheduledGaussian


@dataclass(frozen=True)
class TimeVaryingDP(ScheduledGaussian):
    """Noise sigma_t = sigma_1 theta^(t - 1) on the whole update.

    The LaDP-FL paper states that the naive epsilon of this mechanism exceeds the naive epsilon of
    Full DP by 57.3 %. sigma_T / sigma_1 = exp(-0.847) = 0.43 matches this statement. The totals of
    noise that the paper reports imply other ratios.
    """

    reason = "a reconstruction of Time-Varying DP: the whole update is bounded, then noised by a public schedule"

    def schedule(self, rounds: int) -> np.ndarray:
        """Return geometric noise from 1 / 0.43 down to 1, float64 [rounds]."""
        return np.asarray(0.43 ** np.linspace(-1.0, 0.0, rounds)) if rounds > 1 else np.ones(rounds)
