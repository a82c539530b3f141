"""Interface of a law of integer noise."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from dp_accounting import dp_event


class IntegerNoise(ABC):
    """A symmetric law on the integers that nodes draw their shares of the noise from.

    A new law is a subclass in its own file, listed in `fedlgm.integer_noise.LAWS`.

    Attributes:
        name: the law, as recipes and `distributed_epsilon` name it.
        words: the law in a guarantee's sentence. Empty for the default, since plans' texts key their noise.
        least_deviation: least standard deviation of a node's noise, in grid units, that its bounds are stated for.
    """

    name: str
    words: str = ""
    least_deviation: int

    @abstractmethod
    def variance(self, wanted: float, parties: int) -> int:
        """Variance of each party's noise, with which the sum costs no more than Gaussian noise does.

        Args:
            wanted: variance of that Gaussian noise, in squared grid units.
            parties: number of honest parties whose noise is in the sum.
        """

    @abstractmethod
    def draw(self, variance: int, size: int, rng: np.random.Generator) -> np.ndarray:
        """One party's noise, int64 [size]."""

    @abstractmethod
    def event(self, multiplier: float) -> dp_event.DpEvent:
        """Cost of one sum whose noise has the parties' variances of `variance`.

        Args:
            multiplier: std of the Gaussian noise that was wanted over the largest l2 change of the sum by a neighbour.
        """

    @abstractmethod
    def divergences(
        self, orders: np.ndarray, *, deviation: float, parties: int, l2: float, l1: float, dimension: int
    ) -> np.ndarray:
        """Bounds on the Renyi divergences of one sum from a neighbour's; see `privacy.distributed_epsilon`.

        Args:
            orders: above 1, [n].
            deviation: as there.
            parties: as there.
            l2: largest l2 change of the integer sum by a neighbour.
            l1: largest l1 change.
            dimension: coordinates of the sum.

        Returns:
            [n].
        """
