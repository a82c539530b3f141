"""Drawing of a round's participants from a key, by their client numbers and not by Flower's random
node identifiers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from fedlgm.errors import PrivacyError
from fedlgm.noise.keys import KeyRing, Purpose
from fedlgm.planning.allocator import Allocator
from fedlgm.planning.plan import Sampling


@dataclass(frozen=True)
class CohortSampler:
    """Draws cohorts as pure functions of the keys and the round, so that a restart does not change
    them.

    The separation between two participations of a client is the number of rounds from one draw of
    the client to the next. A drawn client that does not answer is not replaced, and must wait as
    long as if it had answered.

    Attributes:
        sampling: scheme of the draw, with population, rate and separation.
        keys: key ring of the draw. It is secret, because amplification by sampling requires a
            secret draw.
        dropout_rate: probability with which a simulated client does not answer although it is
            drawn. The public denominator does not change.

    Example:
        >>> sampler = CohortSampler(Sampling("cyclic", 12, 0.25, 4), KeyRing.from_seed(1))
        >>> sorted(int(client) for round in (1, 2, 3, 4) for client in sampler.cohort(round)) == list(range(12))
        True
        >>> sampler.cohort(5).tolist() == sampler.cohort(1).tolist()
        True
    """

    sampling: Sampling
    keys: KeyRing
    dropout_rate: float = 0.0
    # cohorts of "min-separation", by round
    _invited: list[np.ndarray] = field(default_factory=list, repr=False, compare=False)

    def cohort(self, round: int, exclude: frozenset[int] = frozenset()) -> np.ndarray:
        """Draw the clients of a round; rounds are numbered from 1. The result is ascending, int64.
        Clients in `exclude`, which have reached their limit of participations, are left out.
        """
        sampling = self.sampling
        if sampling.scheme == "min-separation":
            drawn = self._draw_separated(round)
        elif sampling.block is not None:
            drawn = np.flatnonzero(self._allocator.draw(round))
        else:
            rng = self.keys.numpy_generator(Purpose.COHORT, round)
            if sampling.scheme == "fixed":
                size = round_half_up(sampling.expected)
                drawn = np.sort(rng.choice(sampling.population, size=size, replace=False))
            else:
                in_draw = rng.random(sampling.population) < sampling.within_group
                if sampling.separation is not None:
                    in_draw &= self.groups() == (round - 1) % sampling.separation
                drawn = np.flatnonzero(in_draw)
        if exclude:
            drawn = drawn[~np.isin(drawn, np.fromiter(exclude, dtype=np.int64))]
        return drawn.astype(np.int64)

    @cached_property
    def _allocator(self) -> Allocator:
        sampling = self.sampling
        return Allocator.of(
            sampling,
            lambda round: self.keys.numpy_generator(Purpose.COHORT, round).random(
                sampling.population
            ),
        )

    def groups(self) -> np.ndarray:
        """Return the group of every client, int64 [population]. The groups of the clients are drawn
        independently of each other, once for the run.
        """
        return self.keys.numpy_generator(Purpose.GROUP).integers(
            0, self.sampling.separation or 1, size=self.sampling.population
        )

    def _draw_separated(self, round: int) -> np.ndarray:
        """Draw clients from those that were not drawn in the last b - 1 rounds, where b is the
        separation. The cohorts of earlier rounds are drawn first.
        """
        population, size = self.sampling.population, round_half_up(self.sampling.expected)
        apart = (self.sampling.separation or 1) - 1
        while len(self._invited) < round:
            number = len(self._invited)
            free = np.ones(population, dtype=bool)
            for earlier in self._invited[max(0, number - apart) : number]:
                free[earlier] = False
            rng = self.keys.numpy_generator(Purpose.COHORT, number + 1)
            self._invited.append(
                np.sort(rng.choice(np.flatnonzero(free), size=size, replace=False))
            )
        return self._invited[round - 1]

    def present(self, round: int, cohort: np.ndarray) -> np.ndarray:
        """Return the clients of a cohort that do not drop out."""
        if self.dropout_rate == 0:
            return cohort
        clients = [
            c
            for c in cohort
            if self.keys.numpy_generator(Purpose.DROPOUT, round, int(c), 0).random()
            >= self.dropout_rate
        ]
        return np.array(clients, dtype=np.int64)


def require_once(cohort: np.ndarray, population: int) -> None:
    """Refuse a cohort that contains a client twice or an unknown client. A user's subclass of
    `CohortSampler` might draw such a cohort.

    Raises:
        PrivacyError: a client occurs twice or is unknown.

    Example:
        >>> require_once(np.array([2, 5]), population=6)
    """
    if len(np.unique(cohort)) < len(cohort) or ((cohort < 0) | (cohort >= population)).any():
        raise PrivacyError(
            f"a cohort may hold each of {population} participants only once, because each is "
            f"charged for one contribution; got {cohort.tolist()}"
        )


def round_half_up(value: float) -> int:
    """Round to the nearest integer, with halves rounded up; the result is at least 1.

    Example:
        >>> round_half_up(2.5), round_half_up(0.1)
        (3, 1)
    """
    return max(1, int(np.floor(value + 0.5)))


def blocks(cohort: np.ndarray, size: int, work: np.ndarray | None = None) -> list[np.ndarray]:
    """Divide a cohort into the blocks whose sums are added in order.

    Args:
        cohort: client numbers, ascending.
        size: largest number of clients in a block.
        work: expected effort of every client of the population (simulations only). The clients are
            then sorted by descending effort, so that the clients of a block take similar times and
            the last blocks of a round are short.

    Example:
        >>> [block.tolist() for block in blocks(np.array([1, 4, 6]), size=2)]
        [[1, 4], [6]]
    """
    if work is not None:
        cohort = cohort[np.argsort(-work[cohort], kind="stable")]
    return [cohort[i : i + size] for i in range(0, len(cohort), size)]
