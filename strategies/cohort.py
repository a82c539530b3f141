"""Who takes part in a round: a keyed draw over client numbers, never over Flower's random node ids."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedlgm.keys import KeyRing, Purpose
from fedlgm.plan import Sampling


@dataclass(frozen=True)
class CohortSampler:
    """Draws cohorts.

    Attributes:
        sampling: scheme, population and rate.
        keys: secret ring: amplification by sampling needs the draw to stay secret.
        dropout_rate: probability that a drawn client does not answer (simulated; the public denominator stays).
    """

    sampling: Sampling
    keys: KeyRing
    dropout_rate: float = 0.0

    def cohort(self, round: int, exclude: frozenset[int] = frozenset()) -> np.ndarray:
        """Client numbers of a round, ascending int64; never one of `exclude` (clients at their participation cap)."""
        rng = self.keys.numpy_generator(Purpose.COHORT, round)
        population = self.sampling.population
        if self.sampling.scheme == "poisson":
            drawn = np.flatnonzero(rng.random(population) < self.sampling.rate)
        else:
            size = round_half_up(self.sampling.expected)
            drawn = np.sort(rng.choice(population, size=size, replace=False))
        if exclude:
            drawn = drawn[~np.isin(drawn, np.fromiter(exclude, dtype=np.int64))]
        return drawn.astype(np.int64)

    def present(self, round: int, cohort: np.ndarray) -> np.ndarray:
        """The part of a cohort that answers."""
        if self.dropout_rate == 0:
            return cohort
        kept = [
            c
            for c in cohort
            if self.keys.numpy_generator(Purpose.DROPOUT, round, int(c), 0).random() >= self.dropout_rate
        ]
        return np.array(kept, dtype=np.int64)


def round_half_up(value: float) -> int:
    """Nearest integer, halves up, at least 1."""
    return max(1, int(np.floor(value + 0.5)))


def blocks(cohort: np.ndarray, size: int, work: np.ndarray | None = None) -> list[np.ndarray]:
    """Cut a cohort into the blocks whose sums are added up in order.

    Args:
        cohort: client numbers, ascending.
        size: clients in a block.
        work: expected effort of every client of the population (simulations only). Longest clients then come first, so
            that a block holds equally long ones and the last blocks of a round are short.
    """
    if work is not None:
        cohort = cohort[np.argsort(-work[cohort], kind="stable")]
    return [cohort[i : i + size] for i in range(0, len(cohort), size)]
