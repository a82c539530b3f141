"""Noise that changes over the rounds at one budget: what Full DP, Time-Varying DP and DPA have in common.

A schedule gives each round's noise relative to the least one. `budget = "equal-total"` scales the whole schedule so
that all rounds together meet the run's (epsilon, delta) by the run's accountant: the fair comparison. `budget =
"matched"` is the LaDP-FL paper's frame: every schedule starts at the noise of Full DP, the recipe's epsilon is that of
one release, and the paper's sum of q epsilon_t is recorded as the claim beside what is proven.

Under Poisson sampling the accountant composes every distinct noise level, so a schedule is a staircase of a few levels:
the noise that is added has exactly the levels that are accounted for.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, Self

import numpy as np

from fedlgm import privacy
from fedlgm.errors import ConfigError
from fedlgm.layers import LayerTable
from fedlgm.mechanisms.base import Mechanism, Setting, check_positive
from fedlgm.mechanisms.ladp_frame import CONSTANTS, Constant, bound_by_training, noise_constant, require
from fedlgm.plan import Budget, ReleasePlan
from fedlgm.privacy.guarantee import Guarantee, Relation
from fedlgm.transcript import Transcript

BudgetRule = Literal["equal-total", "matched"]


@dataclass(frozen=True)
class PaperBaseline(Mechanism):
    """A mechanism that the LaDP-FL paper compares itself with.

    Attributes:
        bound: l2 bound C of one client's update; under budget = "matched" it follows from the local training (half of
            the paper's Delta_f = 2 eta E G_c) and this option is not used.
        budget: "equal-total" (one proven (epsilon, delta) for the whole run) or "matched" (the paper's frame; local
            trust; the recipe's epsilon and delta are those of one release).
        constant: for "matched", the constant c of sigma = c Delta_f / epsilon: "theorem3" or "classical".
        batch_share: for "matched", q = batch size / local examples of the paper's q T epsilon; its 50 / 500.
    """

    bound: float = 1.0
    budget: BudgetRule = "equal-total"
    constant: Constant = "theorem3"
    batch_share: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self.name, bound=self.bound, batch_share=self.batch_share)
        for option, value, known in (
            ("budget", self.budget, ("equal-total", "matched")),
            ("constant", self.constant, CONSTANTS),
        ):
            if value not in known:
                raise ConfigError(f"{self.name}: unknown {option} {value!r}; known: {', '.join(known)}")

    def under(self, setting: Setting) -> Self:
        """See `Mechanism.under`; the paper's frame is checked here, before anything runs."""
        told = super().under(setting)
        if self.budget == "matched":
            require(setting, self.name)
            bound_by_training(setting.training)
        return told

    @property
    def client_bound(self) -> float:
        """The l2 bound C that the noise is made for."""
        if self.budget == "equal-total":
            return self.bound
        return bound_by_training(require(self.setting, self.name).training)

    def matched_multiplier(self, epsilon: float, delta: float) -> float:
        """Noise of the first round over C: 2 c / epsilon, since the paper's sensitivity is 2 C."""
        return 2 * noise_constant(self.constant, epsilon, delta) / epsilon

    def matched_claim(self, noise: float = 1.0) -> dict[str, Any] | None:
        """What the paper charges a participation whose noise is `noise` times that of the first round: q epsilon_t."""
        if self.budget == "equal-total":
            return None
        return {"epsilon": self.batch_share * require(self.setting, self.name).epsilon / noise}

    def guarantee(self, budget: Budget, reason: str) -> Guarantee:
        """A proven guarantee: every contribution is cut to C before noise of a public scale is added."""
        return Guarantee("proven", reason, budget.relation, budget.trust)


@dataclass(frozen=True)
class ScheduledGaussian(PaperBaseline):
    """Gaussian noise on the whole update, its level following a schedule over the rounds.

    Attributes:
        levels: noise levels of the staircase that stands for the schedule.
    """

    levels: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.levels < 1 or int(self.levels) != self.levels:
            raise ConfigError(f"{self.name}: levels must be a whole number of at least 1, got {self.levels}")

    def table(self, layers: LayerTable) -> LayerTable:
        """All layers merged into one: the whole update is bounded and noised alike."""
        return layers.merged()

    def schedule(self, rounds: int) -> np.ndarray:
        """Noise of each round relative to any unit, before it is made a staircase, float64 [rounds]."""
        raise NotImplementedError

    def shape(self, rounds: int) -> np.ndarray:
        """Noise of each round over the least one, as a staircase, float64 [rounds]."""
        return staircase(self.schedule(rounds), self.levels)

    def calibrate(
        self, epsilon: float, delta: float, *, steps: int, sampling_rate: float, relation: Relation, accountant: str
    ) -> float:
        """Noise over C of the least noisy round ("equal-total") or of the first round ("matched").

        Under local trust a client may be drawn in any rounds: its releases are taken to be the least noisy ones. Where
        the run is not known (see `Mechanism.under`) and the rate does not rule local trust out, all of them are taken
        to have the least noise of all.
        """
        if self.budget == "matched":
            return self.matched_multiplier(epsilon, delta)
        if self.setting is not None:
            least = np.sort(self.shape(self.setting.rounds))[:steps]
        else:
            least = self.shape(steps) if sampling_rate < 1 else np.ones(steps)
        levels = {float(level): int(count) for level, count in zip(*np.unique(least, return_counts=True), strict=True)}
        return privacy.accounting.calibrate_levels(
            levels, epsilon, delta, sampling_rate=sampling_rate, relation=relation, accountant=accountant
        )

    def costs(self, layers: LayerTable, rounds: int) -> np.ndarray:
        """See `Mechanism.costs`."""
        return np.asarray(self._levels(rounds) ** -2.0)

    def plan(self, layers: LayerTable, budget: Budget, transcript: Transcript) -> ReleasePlan:
        """The round's place in the schedule."""
        level = float(self._levels(budget.rounds)[min(transcript.rounds, budget.rounds - 1)])
        clip = np.full(len(layers), self.client_bound / math.sqrt(len(layers)))
        sigma = np.full(len(layers), self.client_bound * budget.noise_multiplier * level)
        claim = self.matched_claim(level)
        return ReleasePlan(layers, clip, sigma, budget, self.guarantee(budget, self.reason), claim=claim)

    def _levels(self, rounds: int) -> np.ndarray:
        """Noise of each round over that which `calibrate` gives, float64 [rounds]."""
        shape = self.shape(rounds)
        return shape / shape[0] if self.budget == "matched" else shape

    @property
    def reason(self) -> str:
        """Why the release is private, and how near to its source the mechanism is."""
        raise NotImplementedError


def staircase(schedule: np.ndarray, levels: int) -> np.ndarray:
    """A schedule of at most `levels` equally long steps that spends as much zCDP in each step, least noise 1.

    Args:
        schedule: positive noise levels, [rounds].
        levels: number of steps.
    """
    steps = np.array_split(np.asarray(schedule, dtype=np.float64), min(levels, len(schedule)))
    flat = np.concatenate([np.full(len(step), np.mean(step**-2.0) ** -0.5) for step in steps])
    return flat / flat.min()
