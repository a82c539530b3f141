"""Full DP: the same Gaussian noise on the whole update in every round (NbAFL).

Source: Wei, Li, Ding, Ma, Yang, Farokhi, Jin, Quek and Poor, "Federated Learning with Differential
Privacy: Algorithms
    and Performance Analysis" (IEEE TIFS 2020), according to several independent descriptions of its
    formulas.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedlgm.papers.ladp.schedules import ScheduledGaussian


@dataclass(frozen=True)
class FullDP(ScheduledGaussian):
    """NbAFL: what a client uploads, which here is its update, is clipped to C and noised.

    The sensitivity is 2 C. The published value, 2 C / m (m: examples of the smallest client),
    treats the minimiser of an average as an average of minimisers, which is false for networks. The
    noise on the broadcast is omitted, because it adds nothing to the guarantee of the uploads.
    """

    reason = (
        "NbAFL as published but for cutting the update: the whole update is bounded, then noised"
    )
