"""The cost of a run whose rounds cannot be charged one by one: correlated noise, restricted
participation, or both.

Releases y_t = x_t + s w_t with C w = z are equivalent to the Gaussian mechanism that publishes C x
+ s z. Let 1 / sigma_eff be the bound on one client's contribution in units of s, over all layers
and auxiliary queries. It is the same in every round.

* Without amplification the run is one Gaussian mechanism of multiplier sigma_eff / sens(C). Round t
  is charged a Gaussian mechanism of multiplier sigma_eff / sqrt(sens_{t+1}^2 - sens_t^2), where
  sens_t is the sensitivity of the first t rounds. The charges of the first rounds compose to the
  cost of these rounds, and the charges of all rounds compose to the cost of the run.
* With secret draws within groups ("grouped-poisson" sampling) the run costs no more than ceil(T /
  b) Poisson-sampled Gaussian mechanisms of multiplier sigma_eff / (largest column norm of C). The
  rounds 0, b, 2b, ... are each charged one of these mechanisms, before the next turns of the b
  groups; the rounds in between cost nothing.

Proofs: docs/proofs/correlated-noise.md. Rounds count from 0 here.

Sources: Denisov et al. 2022 (adaptive streams); Choquette-Choo et al. 2023 (arXiv 2306.08153,
Theorem 4).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from dp_accounting.dp_event import DpEvent

from fedlgm.errors import PrivacyError
from fedlgm.noise import correlation
from fedlgm.noise.correlation import Correlation
from fedlgm.planning.allocation import floor_digits
from fedlgm.planning.facts import RunFacts, Sampling
from fedlgm.privacy import accounting
from fedlgm.privacy.events import gaussian_event
from fedlgm.privacy.guarantee import SENSITIVITY_FACTOR, Relation

MARGIN = 1e-7
"""Relative margin of the calibrated multiplier. It covers the rounding in plans and in events."""


@dataclass(frozen=True)
class WholeRun:
    """A run as one mechanism: its correlated noise, its sampling and its neighbouring relation.

    Example:
        >>> from fedlgm import correlation
        >>> from fedlgm.planning.facts import Sampling
        >>> run = WholeRun(correlation.get("banded", 16, bands=4), Sampling("cyclic", 400, 0.25, 4), "add-remove")
        >>> round(run.sensitivity, 6)
        2.0
        >>> run.event(0, 1.0), run.event(4, 1.0) == run.event(0, 1.0)
        (GaussianDpEvent(noise_multiplier=1.25805...), True)

    Attributes:
        noise: matrix C, which is the identity for independent noise.
        sampling: a scheme with a minimum separation between participations.
        relation: neighbouring relation.

    Raises:
        ConfigError: the scheme keeps no rounds between participations, or the combination is not
            proven: more bands than groups, buffers under secret draws, or a relation that does not
            fit the scheme.
    """

    noise: Correlation
    sampling: Sampling
    relation: Relation

    def __post_init__(self) -> None:
        RunFacts(0.0, self.sampling, self.relation, rounds=self.noise.rounds, noise=self.noise)

    @property
    def separation(self) -> int:
        """Smallest number b of rounds from one participation of a client to the next."""
        return self.sampling.separation or 1

    @property
    def participations(self) -> int:
        """Largest number of participations of one client, ceil(T / b)."""
        return -(-self.noise.rounds // self.separation)

    @cached_property
    def sensitivity(self) -> float:
        """Sensitivity sens(C) under the sampling: how far one client can move C x, as a multiple of
        the client's bound.
        """
        return self.noise.sensitivity(self.separation)

    @cached_property
    def growth(self) -> float:
        """Multiplier sigma_eff of a round divided by the multiplier of the accounted mechanism,
        without the factor of the relation.
        """
        return self.noise.amplified_column_norm() if self.sampling.amplifies else self.sensitivity

    def calibrate(self, epsilon: float, delta: float, accountant: str) -> float:
        """Smallest sigma_*, the same in every round, at which the run stays within (epsilon,
        delta).

        Raises:
            ConfigError, PrivacyError: see `privacy.accounting.calibrate`.
        """
        sampled = self.sampling.amplifies
        multiplier = accounting.calibrate(
            epsilon,
            delta,
            steps=self.participations if sampled else 1,
            sampling_rate=self.sampling.within_group if sampled else 1.0,
            relation=self.relation,
            accountant=accountant,
        )
        return multiplier * self.growth * (1 + MARGIN)

    def event(self, position: int, multiplier: float) -> DpEvent:
        """Cost that round `position` adds to the cost of the rounds before it.

        Args:
            position: number of rounds before this one, 0 to T - 1.
            multiplier: least effective noise multiplier of all rounds, see
                `RunFacts.least_multiplier`.

        Raises:
            PrivacyError: the run has no such round.
        """
        self._check(position)
        if self.sampling.amplifies:
            if position % self.separation:
                return gaussian_event(math.inf)
            return self._gaussian(self.growth, multiplier, self.sampling.within_group)
        return self._gaussian(float(self._increments[position]), multiplier)

    def repeated_event(self, position: int, multiplier: float) -> DpEvent:
        """Event of one more release of round `position`, with independent noise for that round.

        The release is a further row of C, with the same coefficients for earlier rounds and an
        independent z. A client moves the release by at most the row's bound, whichever rounds were
        drawn for the client, so the release is charged without amplification. Arguments and errors
        are those of `event`.
        """
        self._check(position)
        return self._gaussian(self.noise.row_bound(position, self.separation), multiplier)

    def events(self, multiplier: float, rounds: int | None = None) -> list[tuple[DpEvent, int]]:
        """Events of the first rounds (default: all), for `accounting.composed_epsilon`."""
        last = self.noise.rounds if rounds is None else rounds
        return [(self.event(position, multiplier), 1) for position in range(last)]

    @cached_property
    def noise_std(self) -> np.ndarray:
        """Standard deviation of w_t for z of standard deviation 1, float64 [T]."""
        return self.noise.noise_std()

    @cached_property
    def _increments(self) -> np.ndarray:
        return self.noise.round_sensitivities(self.separation)

    def _check(self, position: int) -> None:
        if not 0 <= position < self.noise.rounds:
            raise PrivacyError(
                f"the run was made for {self.noise.rounds} rounds: there is no round {position + 1}"
            )

    def _gaussian(self, moved: float, multiplier: float, rate: float = 1.0) -> DpEvent:
        if moved == 0:
            return gaussian_event(math.inf)
        shift = moved * SENSITIVITY_FACTOR[self.relation]
        return gaussian_event(floor_digits(multiplier / shift, 9), rate)


@lru_cache(maxsize=64)
def _whole_run(noise: Correlation, sampling: Sampling, relation: Relation) -> WholeRun:
    return WholeRun(noise, sampling, relation)


def whole_run(facts: RunFacts) -> WholeRun:
    """The run of `facts` as one mechanism; see `fedlgm.planning.charging.of`.

    Example:
        >>> from fedlgm.planning.facts import RunFacts, Sampling
        >>> run = whole_run(RunFacts(1.0, Sampling("cyclic", 400, 0.25, 4), rounds=16))
        >>> run.participations, round(run.sensitivity, 6)  # independent noise: sqrt(4)
        (4, 2.0)
    """
    noise = facts.noise if facts.noise is not None else correlation.get("identity", facts.rounds)
    return _whole_run(noise, facts.sampling, facts.relation)
