"""DPA: the noise schedule that minimises a bound on the final error at one total budget. A
RECONSTRUCTION.

Source: Zhang, Fay and Johansson, "Dynamic Privacy Allocation for Locally Differentially Private
Federated Learning with Composite Objectives" (ICASSP 2024). Its abstract states the problem; its
solution was not available and is derived here. If the error contracts as e_(t+1) <= g e_t + const
sigma_t^2, the weighted sum sum_t g^(T-1-t) sigma_t^2 under sum_t 1 / sigma_t^2 = const is least at

    sigma_t^2 proportional to g^(-(T-1-t) / 2).

Noise falls geometrically, by g^(1/4) per round, as in `TimeVaryingDP`; only the derivation of the
rate differs. The proximal step of composite objectives is the identity for networks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedlgm.papers.ladp.schedules import ScheduledGaussian


@dataclass(frozen=True)
class DynamicPrivacyAllocation(ScheduledGaussian):
    """sigma_t^2 proportional to g^(-(T - 1 - t) / 2) on the whole update.

    The allocation is optimal for unsampled Gaussian noise (one zCDP budget); under Poisson sampling
    it is the same schedule, scaled to the accountant's total.

    g matches the LaDP-FL paper's statement that this mechanism's naive epsilon exceeds Full DP's by
    26.04 %: sigma_T / sigma_1 = exp(-0.446) over any number of rounds.
    """

    reason = (
        "a reconstruction of DPA: the whole update is bounded, then noised by a public schedule"
    )

    def schedule(self, rounds: int) -> np.ndarray:
        """Noise of each round relative to the last round's, float64 [rounds]."""
        left = np.arange(rounds - 1, -1, -1)
        return np.asarray(np.exp(_MATCHED_DECAY * left / max(rounds - 1, 1)))


_MATCHED_DECAY = 0.446
