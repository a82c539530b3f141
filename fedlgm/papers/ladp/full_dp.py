"""Full DP: the same Gaussian noise on the whole update in every round (NbAFL).

Source: Wei, Li, Ding, Ma, Yang, Farokhi, Jin, Quek and Poor, "Federated Learning with Differential Privacy: Algorithms
    and Performance Analysis" (IEEE TIFS 2020), according to several independent descriptions of its formulas.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedlgm import privacy
from fedlgm.errors import ConfigError
from fedlgm.facts import RunFacts
from fedlgm.layers import LayerTable
from fedlgm.mechanisms.ladp_frame import require
from fedlgm.papers.ladp.schedules import ScheduledGaussian
from fedlgm.plan import ReleasePlan
from fedlgm.privacy.guarantee import SENSITIVITY_FACTOR
from fedlgm.transcript import Transcript


@dataclass(frozen=True)
class FullDP(ScheduledGaussian):
    """NbAFL: a client's model is clipped to C and noised in the upload and, for broadcasts, in the download.

    The published sensitivity 2 C / m (m: examples of the smallest client) treats the minimiser of an average as an
    average of minimisers, which is false for networks: a changed data set may move a clipped model by 2 C. "safe" is 2
    C. The clipped vector here is the update, the model's difference from the public global one.

    Attributes:
        sensitivity: "safe" (2 C) or "paper" (2 C / m; the noise is m times smaller, the claim is as published, and the
            ledger charges the cost of 2 C; local trust only).
        smallest_client: m, a public number; needed for "paper".
        exposures: L, number of a client's uploads that the noise of one upload must cover; sigma grows with L as
            published ("matched" only).
        downlink: whether the server adds the published broadcast noise (`downlink_sigma`; "matched" only).
    """

    sensitivity: Literal["safe", "paper"] = "safe"
    smallest_client: int = 0
    exposures: int = 1
    downlink: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sensitivity == "paper" and self.smallest_client < 1:
            raise ConfigError(f"{self.name}: sensitivity = 'paper' needs smallest_client, that client's examples m")
        if self.exposures < 1:
            raise ConfigError(f"{self.name}: exposures must be at least 1, got {self.exposures}")
        if self.calibration != "matched" and (self.downlink or self.exposures != 1):
            raise ConfigError(f"{self.name}: downlink and exposures belong to calibration = 'matched'")

    def schedule(self, rounds: int) -> np.ndarray:
        """The same noise in every round."""
        return np.ones(rounds)

    def calibrate(self, facts: RunFacts) -> float:
        """Noise over C of every round."""
        if self.sensitivity == "paper":
            require(facts, self.name)
        return super().calibrate(facts) * self.exposures / self._shrink

    def plan(self, layers: LayerTable, facts: RunFacts, transcript: Transcript) -> ReleasePlan:
        """The same plan in every round."""
        plan = super().plan(layers, facts, transcript)
        claim = plan.claim
        if claim is None and self._shrink > 1:
            claimed = facts.noise_multiplier * self._shrink / SENSITIVITY_FACTOR[facts.relation]
            claim = {"event": privacy.events.encode(privacy.events.gaussian_event(claimed))}
        return dataclasses.replace(plan, claim=claim, downlink=self._downlink(facts))

    @property
    def reason(self) -> str:
        """See `ScheduledGaussian.reason`."""
        text = "NbAFL as published but for cutting the update: the whole update is bounded, then noised"
        if self.sensitivity == "paper":
            text += "; the noise was made for the published sensitivity 2C/m, the cost is that of the true one, 2C"
        return text

    @property
    def _shrink(self) -> int:
        return self.smallest_client if self.sensitivity == "paper" else 1

    def _downlink(self, facts: RunFacts) -> float:
        if not self.downlink:
            return 0.0
        epsilon, _ = require(facts, self.name).budget()
        unit = facts.noise_multiplier / self.exposures * self.client_bound(facts)  # 2 c C / (m epsilon)
        return unit * downlink_factor(
            epsilon, facts.rounds, self.exposures, facts.sampling.population, facts.sampling.expected
        )


def downlink_factor(epsilon: float, rounds: int, exposures: int, clients: int, cohort: float) -> float:
    """sigma_D over 2 c C / (m epsilon): the part of the broadcast's noise that the uploads' noise does not yet cover.

    With all N clients in every round sqrt(T^2 - L^2 N) / N if T > L sqrt(N), else 0; with K < N of them
    sqrt(T^2 / b^2 - L^2 K) / K if T > epsilon / gamma, where

        b     = -(T / epsilon) ln(1 - N/K + (N/K) exp(-epsilon / T))
        gamma = -ln(1 - K/N + (K/N) exp(-epsilon / (L sqrt(K)))).

    Args:
        epsilon: budget of the published accounting, > 0.
        rounds: T.
        exposures: L, number of a client's uploads.
        clients: N.
        cohort: K, expected clients of a round.

    Source: NbAFL, Theorem 1 and Lemma 1 on K-random scheduling.
    """
    share = cohort / clients
    if share == 1:
        return math.sqrt(max(rounds**2 - exposures**2 * clients, 0)) / clients
    gamma = -math.log1p(share * math.expm1(-epsilon / (exposures * math.sqrt(cohort))))
    if rounds <= epsilon / gamma:
        return 0.0
    b = -(rounds / epsilon) * math.log1p(math.expm1(-epsilon / rounds) / share)
    return math.sqrt(max(rounds**2 / b**2 - exposures**2 * cohort, 0.0)) / cohort
