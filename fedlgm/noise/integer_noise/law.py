"""Interface of a distribution of integer noise."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from fedlgm import privacy


class IntegerNoise(ABC):
    """A symmetric distribution on the integers, from which nodes draw their shares of the noise.

    A new distribution is a subclass in a separate file, and is listed in
    `fedlgm.noise.integer_noise.LAWS`.

    Attributes:
        name: name of the distribution in recipes and in `distributed_epsilon`.
        words: name of the distribution in a guarantee's sentence. It is empty for the default
            distribution, so that the plan's text, by which noise is keyed, stays the same.
        least_deviation: least standard deviation of a node's noise, in grid units, for which the
            bounds are stated.
    """

    name: str
    words: str = ""
    least_deviation: int

    @abstractmethod
    def variance(self, wanted: float, parties: int) -> int:
        """Variance of each party's noise at which the sum costs no more than Gaussian noise of a
        given variance.

        Args:
            wanted: variance of this Gaussian noise, in squared grid units.
            parties: number of honest parties whose noise is in the sum.
        """

    @abstractmethod
    def draw(self, variance: int, size: int, rng: np.random.Generator) -> np.ndarray:
        """One party's noise, int64 [size]."""

    @abstractmethod
    def event(self, multiplier: float) -> privacy.DpEvent:
        """Event of one sum in which each party's noise has the variance that `variance` returns.

        Args:
            multiplier: std of the wanted Gaussian noise divided by the largest l2 change of the sum
                between neighbouring data sets.
        """

    @abstractmethod
    def divergences(
        self,
        orders: np.ndarray,
        *,
        deviation: float,
        parties: int,
        l2: float,
        l1: float,
        dimension: int,
    ) -> np.ndarray:
        """Bounds on the Renyi divergences between one sum and the sum of a neighbouring data set
        (see `privacy.distributed_epsilon`).

        Args:
            orders: Renyi orders above 1, [n].
            deviation: see `privacy.distributed_epsilon`.
            parties: see `privacy.distributed_epsilon`.
            l2: largest l2 distance between the integer sums of neighbouring data sets.
            l1: largest l1 change of the sum.
            dimension: number of coordinates of the sum.

        Returns:
            The bound at each order, [n].
        """
