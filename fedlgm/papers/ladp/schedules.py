"""Noise that may change over the rounds for a given budget: the common code of Full DP,
Time-Varying DP and DPA.

A schedule gives the noise of each round relative to the smallest noise of a round. `calibration =
"equal-total"` scales the whole schedule so that, by the run's accountant, all rounds together meet
the run's (epsilon, delta). Mechanisms are then compared at equal proven cost. `calibration =
"matched"` is the LaDP-FL paper's setting: every schedule starts at the noise of Full DP, and the
recipe's epsilon is the epsilon of one release. The paper's sum of q epsilon_t is recorded as a
claim next to the proven epsilon.

Under Poisson sampling, the accountant must compose each distinct noise level separately. A schedule
is therefore replaced by a staircase of a few levels, and the noise that is added has exactly the
levels that are accounted for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from typing_extensions import override

from fedlgm.checks import Positive
from fedlgm.mechanisms.ladp_frame import Constant, bound_by_training, noise_constant, require
from fedlgm.mechanisms.mechanism import Bounded
from fedlgm.planning import charging
from fedlgm.planning.facts import RunFacts
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.guarantee import Claim, Guarantee

Calibration = Literal["equal-total", "matched"]
_LEVELS = 5  # noise levels of the staircase that approximates a schedule


@dataclass(frozen=True)
class PaperBaseline(Bounded):
    """Base of the mechanisms with which the LaDP-FL paper compares its method.

    Attributes:
        bound: l2 bound C of one client's update. Under calibration = "matched" this option is not
            used, because C follows from the local training (half of the paper's Delta_f = 2 eta E
            G_c).
        calibration: "equal-total" (one proven (epsilon, delta) for the whole run) or "matched" (the
            paper's frame; local trust; the recipe's epsilon and delta are the budget of one
            release).
        constant: for "matched", the constant c of sigma = c Delta_f / epsilon: "theorem3" or
            "classical".
        batch_share: for "matched", q in the paper's q T epsilon: batch size divided by the number
            of local examples, 50 / 500 in the paper.

    Example:
        >>> from fedlgm import LocalTraining, Sampling
        >>> budget = {"epsilon": 1.0, "delta": 1e-5, "training": LocalTraining(lr=0.1, epochs=5, gradient_clip=2.0)}
        >>> facts = RunFacts(0.0, Sampling("poisson", 10, 1.0), "replace-one", "local", **budget)
        >>> baseline = PaperBaseline("full-dp", calibration="matched")
        >>> baseline.client_bound(facts), baseline.matched_claim(facts)  # eta E G_c, and 50 / 500 of epsilon
        (1.0, {'epsilon': 0.1})
    """

    calibration: Calibration = "equal-total"
    constant: Constant = "theorem3"
    batch_share: Positive = 0.1

    def client_bound(self, facts: RunFacts) -> float:
        """Return the l2 bound C of a client's update."""
        if self.calibration == "equal-total":
            return self.bound
        return bound_by_training(require(facts, self.name).training)

    def calibrate(self, facts: RunFacts) -> float:
        """Compute sigma_* of every round ("equal-total"), or the paper's noise divided by C
        ("matched").
        """
        return (
            self.matched_multiplier(facts)
            if self.calibration == "matched"
            else super().calibrate(facts)
        )

    def matched_multiplier(self, facts: RunFacts) -> float:
        """Return the noise of the first round divided by C: 2 c / epsilon, because the paper's
        sensitivity is 2 C.

        Raises:
            ConfigError: the facts do not fit the paper's setting.
        """
        epsilon, delta = require(facts, self.name).budget()
        bound_by_training(facts.training)
        return 2 * noise_constant(self.constant, epsilon, delta) / epsilon

    def matched_claim(self, facts: RunFacts, noise: float = 1.0) -> Claim | None:
        """Return the paper's charge q epsilon_t for a participation with `noise` times the noise of
        the first round; None for "equal-total".
        """
        if self.calibration == "equal-total":
            return None
        epsilon, _ = require(facts, self.name).budget()
        return {"epsilon": self.batch_share * epsilon / noise}

    @staticmethod
    def guarantee(reason: str) -> Guarantee:
        """Make a proven guarantee, because every contribution is clipped to C before noise of a
        public scale is added.
        """
        return Guarantee("proven", reason)


@dataclass(frozen=True)
class ScheduledGaussian(PaperBaseline):
    """Gaussian noise on the whole update, at a level that follows a schedule over the rounds.

    Example:
        >>> class Halving(ScheduledGaussian):
        ...     reason = "every update is bounded before noise of a public scale is added to the sum"
        ...
        ...     def schedule(self, rounds):
        ...         return np.linspace(2.0, 1.0, rounds)
        >>> Halving("halving").shape(4).round(3).tolist()
        [2.0, 1.667, 1.333, 1.0]
    """

    reason: ClassVar[str]
    """The reason why the release is private, and how closely the mechanism follows its source."""

    def table(self, layers: LayerTable) -> LayerTable:
        """Merge all layers into one, because the whole update has one bound and one noise scale."""
        return layers.as_single_layer()

    def schedule(self, rounds: int) -> np.ndarray:
        """Return the noise of each round up to a common factor, before it is replaced by a
        staircase, float64 [rounds]; constant by default.
        """
        return np.ones(rounds)

    def shape(self, rounds: int) -> np.ndarray:
        """Return the noise of each round divided by the least noise of a round, as a staircase,
        float64 [rounds].
        """
        return staircase(self.schedule(rounds), _LEVELS)

    def calibrate(self, facts: RunFacts) -> float:
        """Compute the noise divided by C, in the round with the least noise ("equal-total") or in
        the first round ("matched").

        Under local trust a client may be drawn in any rounds, so the calculation assumes that its
        releases are in the rounds with the least noise.
        """
        if self.calibration == "matched":
            return self.matched_multiplier(facts)
        least = np.sort(self.shape(facts.rounds))[: facts.releases]
        levels = {
            float(level): int(count)
            for level, count in zip(*np.unique(least, return_counts=True), strict=True)
        }
        return charging.of(facts).calibrate(levels)

    @override
    def costs(self, layers: LayerTable, rounds: int) -> np.ndarray:
        return np.asarray(self._levels(rounds) ** -2.0)

    def plan(self, layers: LayerTable, facts: RunFacts, transcript: Transcript) -> ReleasePlan:
        """Make the round's plan, with the noise level that the schedule has for this round."""
        level = float(self._levels(facts.rounds)[min(transcript.rounds, facts.rounds - 1)])
        bound = self.client_bound(facts)
        clip = np.full(len(layers), bound / math.sqrt(len(layers)))
        sigma = np.full(len(layers), bound * facts.noise_multiplier * level)
        claim = self.matched_claim(facts, level)
        return ReleasePlan(layers, clip, sigma, facts, self.guarantee(self.reason), claim=claim)

    def _levels(self, rounds: int) -> np.ndarray:
        """Return the noise of each round relative to the calibrated noise, float64 [rounds]."""
        shape = self.shape(rounds)
        return shape / shape[0] if self.calibration == "matched" else shape


def staircase(schedule: np.ndarray, levels: int) -> np.ndarray:
    """Replace a schedule by at most `levels` steps of about equal length, each of which spends the
    same zCDP as its part of the schedule. Then scale the result so that its least noise is 1.

    Args:
        schedule: positive noise levels, [rounds].
        levels: number of steps.

    Example:
        >>> staircase(np.array([4.0, 4.0, 2.0, 2.0]), levels=2).tolist()
        [2.0, 2.0, 1.0, 1.0]
    """
    steps = np.array_split(np.asarray(schedule, dtype=np.float64), min(levels, len(schedule)))
    flat = np.concatenate([np.full(len(step), np.mean(step**-2.0) ** -0.5) for step in steps])
    return flat / flat.min()
