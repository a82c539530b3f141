"""Contributions as integers, for sums under secure aggregation.

Each layer is divided by its noise scale and multiplied by a common factor, so that all coordinates
need the same noise under every allocation rule. `IntegerGrid.units` is the l2 bound of a
contribution in grid units. Integers are added modulo 2^32, so the order of addition does not matter
and masks cancel exactly.

Source: Kairouz, Liu and Steinke 2021. The paper bounds the norm of the integers by a formula; this
module checks the norm itself.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import scipy.special

from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.noise.integer_noise import IntegerNoise
from fedlgm.planning.views import Plan

BITS = 32
"""Number of bits of a word; sums are taken modulo 2^BITS."""
WRAP = 1e-9
"""Largest probability that a coordinate of a sum of honest nodes leaves the range of a word."""

_FINEST = 2**24
_LEAST_UNITS = 4
"""Least number of grid units in a bound, divided by the root of the number of coordinates. Rounding
to a coarser grid shortens a contribution by more than a hundredth. Such rounding takes minutes for
a contribution near the bound, but hardly any time for a short contribution.
"""
_ATTEMPTS = 20
_SHRINK = 1 - 2.0**-8
_ROUNDING = 1 + 1e-9


@dataclass(frozen=True)
class IntegerGrid:
    """Public conversion of a plan's contributions to integers, and of their sum back to numbers.

    Example:
        >>> from fedlgm import Guarantee, LayerTable, ReleasePlan, RunFacts, Sampling
        >>> from fedlgm.planning.distributed_trust import Shares
        >>> facts = RunFacts(
        ...     2.0, Sampling("fixed", 10, 1.0), "replace-one", "distributed", accountant="rdp", shares=Shares(7, 1)
        ... )
        >>> layers, proven = LayerTable.from_sizes({"a": 3, "b": 2}), Guarantee("proven", "an example")
        >>> plan = ReleasePlan(layers, [3.0, 4.0], [10.0, 10.0], facts, proven)
        >>> grid = IntegerGrid.of(plan)
        >>> grid.units == 2**24, grid.size, bool(grid.wrap_probability < 1e-9), round(grid.noise_over_central, 4)
        (True, 5, True, 1.291)

    Attributes:
        asked: number n of nodes that a round asks.
        threshold: number t of nodes that must answer.
        colluders: number m of nodes that may collude with the server.
        size: number d of coordinates of the sum.
        units: l2 bound c of one contribution, in grid units.
        noise: distribution of the nodes' noise.
        variance: variance of each node's noise, in squared grid units.
        scale: value of a grid unit in each part of the sum, as pairs (number of coordinates,
            value).
    """

    asked: int
    threshold: int
    colluders: int
    size: int
    units: int
    noise: IntegerNoise = field(repr=False)
    variance: int
    scale: tuple[tuple[int, float], ...] = field(repr=False)

    @classmethod
    def of(cls, plan: Plan) -> IntegerGrid:
        """The grid of a plan.

        Raises:
            ConfigError: no grid has both enough noise and sums that fit into words.
        """
        shares, multiplier = plan.facts.shares, plan.effective_multiplier
        if shares is None:
            raise ConfigError("only plans for trust 'distributed' are rounded to integers")
        asked, honest = round(plan.facts.sampling.expected), shares.honest
        reach = _deviations(plan.size) * multiplier * math.sqrt(asked / honest)
        # n c plus the reach of the noise must stay below 2^31, and n c below 2^30.
        units = min(_FINEST, 2 ** (BITS - 2) // asked, int((2 ** (BITS - 1) - 1) / (asked + reach)))
        law = shares.law
        if units * multiplier < law.least_deviation * math.sqrt(honest):
            raise ConfigError(
                f"each of {honest} honest nodes would add noise of "
                f"{units * multiplier / math.sqrt(honest):.2g} grid units, fewer than "
                f"{law.least_deviation}, or the sum of {asked} nodes would not fit into {BITS} "
                f"bits: the plan's noise multiplier is {multiplier:.3g}; change privacy.epsilon or "
                "federation.clients"
            )
        if units < _LEAST_UNITS * math.sqrt(plan.size):
            raise ConfigError(
                f"a bound of {units} grid units is too coarse for {plan.size} numbers, because a "
                f"sum with a noise multiplier of {multiplier:.3g} must fit into {BITS} bits: raise "
                "privacy.epsilon"
            )
        parts = tuple((part.size, part.sigma / (units * multiplier)) for part in plan.parts)
        # The honest nodes' noise alone has the planned variance (units * multiplier)^2.
        variance = law.variance((units * multiplier) ** 2, honest)
        return cls(
            asked, shares.threshold, shares.colluders, plan.size, units, law, variance, parts
        )

    @property
    def wrap_probability(self) -> float:
        """Largest probability that a coordinate of a sum of all nodes leaves a word's range, for
        any contributions.
        """
        return wrap_probability(
            BITS, math.sqrt(self.asked * self.variance), self.size, reach=self.asked * self.units
        )

    @property
    def bits_needed(self) -> int:
        """Number of bits of a word that a sum of all nodes needs, at most `BITS`."""
        return bits_needed(self.asked, self.units, math.sqrt(self.asked * self.variance), self.size)

    @property
    def noise_over_central(self) -> float:
        """Standard deviation of the noise in a sum of all nodes, divided by that of the noise which
        a trusted server would add at the same epsilon: sqrt(n / (t - m)).
        """
        return math.sqrt(self.asked / (self.threshold - self.colluders))

    def share(
        self, contribution: np.ndarray, rounding: np.random.Generator, noise: np.random.Generator
    ) -> np.ndarray:
        """One node's contribution, rounded to the grid, plus the node's noise.

        Args:
            contribution: the contribution, within the plan's bounds, float64 [size].
            rounding: stream of the rounding.
            noise: stream of the noise, which must not be used for another sum.

        Returns:
            int64 [size], not yet reduced to words.

        Raises:
            PrivacyError: the contribution exceeds the plan's bounds.
        """
        return self.round_to_grid(contribution, rounding) + self.noise.draw(
            self.variance, self.size, noise
        )

    def round_to_grid(self, contribution: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """A bounded contribution in grid units, rounded at random to an l2 norm of at most `units`;
        int64 [size].
        """
        with np.errstate(divide="ignore", invalid="ignore"):
            values = np.where(contribution == 0, 0.0, contribution / self._scales())
        return round_within(values, self.units, rng)

    def to_model_units(self, total: np.ndarray) -> np.ndarray:
        """The sum that the words represent, in the units of the model.

        Args:
            total: sum modulo 2^32, uint32 [size] (`words`).

        Returns:
            float64 [size].
        """
        return centred(total) * self._scales()

    def _scales(self) -> np.ndarray:
        if not self.scale:
            return np.zeros(0)
        sizes, values = zip(*self.scale, strict=True)
        return np.repeat(np.array(values), sizes)


def round_within(values: np.ndarray, bound: int, rng: np.random.Generator) -> np.ndarray:
    """Round values up or down at random so that sum x_i^2 <= bound^2 holds in integers. Apart from
    this condition, the rounding has no bias.

    A draw that violates the condition is repeated; after 20 failures the values are multiplied by
    255/256. If the grid is much finer than bound / sqrt(d), the first draw meets the condition.

    Args:
        values: float64 [d] of l2 norm at most the bound, up to the rounding of float64.
        bound: whole number.
        rng: stream to draw from.

    Returns:
        int64 [d].

    Raises:
        PrivacyError: the vector is longer than the bound, or not finite.

    Example:
        >>> round_within(np.array([0.6, 0.8]), 1, np.random.default_rng(1)).tolist() in ([1, 0], [0, 1], [0, 0])
        True
    """
    if not np.linalg.norm(values) <= bound * _ROUNDING:
        raise PrivacyError(
            "a contribution exceeds the bounds of its plan, so it cannot be rounded to integers"
        )
    while True:
        for _ in range(_ATTEMPTS):
            rounded = np.floor(values + rng.random(len(values))).astype(np.int64)
            if int(np.dot(rounded, rounded)) <= bound**2:
                return rounded
        values = values * _SHRINK


def words(values: np.ndarray) -> np.ndarray:
    """Reduce whole numbers, int64 or float64, modulo 2^32 to uint32. NumPy adds such words modulo
    2^32.

    Example:
        >>> words(np.array([-1, 2**32 + 5])).tolist()
        [4294967295, 5]
    """
    return (values.astype(np.int64) & (2**BITS - 1)).astype(np.uint32)


def centred(total: np.ndarray) -> np.ndarray:
    """Convert words to whole numbers in [-2^31, 2^31), int64.

    Example:
        >>> centred(words(np.array([-1, 7])) + words(np.array([-1, -9]))).tolist()
        [-2, -2]
    """
    return total.astype(np.uint32).view(np.int32).astype(np.int64)


def wrap_probability(bits: int, deviation: float, coordinates: int, reach: float = 0.0) -> float:
    """Probability that noise moves any of several coordinates of a sum outside [-2^(bits-1),
    2^(bits-1)).

    Args:
        bits: number of bits of a word.
        deviation: standard deviation of the noise in the sum, in grid units.
        coordinates: number of coordinates.
        reach: largest absolute value of the sum without noise.

    Example:
        >>> f"{wrap_probability(16, 5000.0, 1):.4e} {wrap_probability(16, 5000.0, 10**6):.4e}"
        '5.6166e-11 5.6165e-05'
    """
    # The probability of two Gaussian tails beyond the distance from the largest sum without noise
    # to the end of the range.
    each = 2 * float(scipy.special.ndtr(-max(0.0, 2.0 ** (bits - 1) - reach) / deviation))
    return -math.expm1(coordinates * math.log1p(-each)) if each < 1 else 1.0


def bits_needed(asked: int, units: int, deviation: float, coordinates: int) -> int:
    """Number of bits of the shortest words for which a sum of all nodes leaves the range of a word
    with probability at most `WRAP`.

    Args:
        asked: number of nodes.
        units: l2 bound of each contribution, in grid units.
        deviation: standard deviation of the noise in the sum, in grid units.
        coordinates: number of coordinates of the sum.

    Example:
        >>> bits_needed(100, 600, 600.0, 26_010), bits_needed(1000, 12_000, 12_000.0, 11_200_000)
        (17, 25)
    """
    return math.ceil(math.log2(2 * (asked * units + deviation * _deviations(coordinates)) + 1))


def _deviations(coordinates: int) -> float:
    """Number of standard deviations beyond which at least one coordinate of the noise lies with
    probability at most `WRAP`.
    """
    return -float(scipy.special.ndtri(WRAP / (2 * max(1, coordinates))))
