"""Random allocation: a secret draw, without replacement, of the rounds in which each unit takes
part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from fedlgm.planning.records import Sampling


@dataclass
class Allocator:
    """Draws the units of each round, so that every unit takes part in exactly k rounds of a block.

    A unit that took part c times in the block's rounds so far takes part in the next round with
    probability (k - c) / (rounds left). So its k rounds are uniform among all sets of k rounds, and
    independent of other units' rounds. A round's draw depends only on the uniform numbers of its
    block, so every process draws the same units, in any order of the rounds.

    Attributes:
        participations: number k of rounds of a block in which a unit takes part.
        block: number of rounds of a block.
        uniform: function that returns, for a round (from 1), a uniform number in [0, 1) for each
            unit, float64 [units]. The numbers are equal at every call, independent between rounds,
            and secret.

    Example:
        >>> numbers = lambda round: np.random.default_rng(round).random(4)
        >>> allocator = Allocator(2, 5, numbers)
        >>> sum(allocator.draw(round).astype(int) for round in range(1, 6)).tolist()
        [2, 2, 2, 2]
        >>> allocator.draw(3).tolist() == Allocator(2, 5, numbers).draw(3).tolist()
        True
    """

    participations: int
    block: int
    uniform: Callable[[int], np.ndarray]
    _after: int = field(default=0, repr=False)  # the last round that is counted in `_taken`
    _taken: np.ndarray | None = field(default=None, repr=False)

    @classmethod
    def of(cls, sampling: Sampling, uniform: Callable[[int], np.ndarray]) -> Allocator:
        """The allocator of a sampling scheme with random allocation."""
        return cls(sampling.participations or 0, sampling.block or 1, uniform)

    def draw(self, round: int) -> np.ndarray:
        """For each unit, whether it takes part in a round (from 1), bool [units]."""
        first = round - (round - 1) % self.block
        if self._taken is None or not first - 1 < self._after < round:
            self._after, self._taken = first - 1, None
        drawn = np.zeros(0, dtype=bool)
        for number in range(self._after + 1, round + 1):
            numbers = self.uniform(number)
            taken = np.zeros(len(numbers), dtype=np.int64) if self._taken is None else self._taken
            left = self.block - (number - first)
            drawn = numbers < (self.participations - taken) / left
            self._after, self._taken = number, taken + drawn
        return drawn
