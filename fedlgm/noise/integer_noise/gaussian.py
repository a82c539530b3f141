"""Discrete Gaussian noise, sampled exactly (Canonne, Kamath and Steinke 2020, section 5)."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from fedlgm import privacy
from fedlgm.errors import ConfigError
from fedlgm.noise.integer_noise.exact import discrete_laplace, happens, rejection_sample
from fedlgm.noise.integer_noise.law import IntegerNoise

_LARGEST = 2**80


def discrete_gaussian(variance: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """Independent draws with probabilities proportional to exp(-x^2 / (2 variance)) on the
    integers.

    Args:
        variance: parameter sigma^2, a whole number in [1, 2^80]. It differs from the variance of
            the draws by about exp(-2 pi^2 sigma^2).
        size: number of draws.
        rng: stream to draw from.

    Returns:
        int64 [size].

    Raises:
        ConfigError: the variance is outside its range.

    Example:
        >>> draws = discrete_gaussian(36, 100_000, np.random.default_rng(1))
        >>> draws.dtype, bool(abs(draws.var() / 36 - 1) < 0.02)
        (dtype('int64'), True)
    """
    if not 1 <= variance <= _LARGEST:
        raise ConfigError(
            f"the variance of discrete Gaussian noise must lie in [1, 2^80], got {variance}"
        )
    return rejection_sample(size, lambda count: _candidates(variance, count, rng))


def _candidates(variance: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """The accepted values among `count` discrete Laplace proposals."""
    scale = math.isqrt(variance) + 1
    proposed = discrete_laplace(scale, count, rng)
    size = np.abs(proposed)

    def exactly(lane: int, _: int) -> Fraction:
        return Fraction((int(size[lane]) * scale - variance) ** 2, 2 * variance * scale**2)

    # A proposal x is accepted with probability exp(-(|x| - sigma^2 / t)^2 / (2 sigma^2)), t = scale
    # (Algorithm 3).
    exponents = (size - variance / scale) ** 2 / (2 * variance)
    return proposed[happens(exponents, exactly, rng)]


def discrete_gaussian_tau(deviation: float, parties: int) -> float:
    """Bound tau for a sum of discrete Gaussians; see `fedlgm.privacy.discrete_gaussian_tau`."""
    k = np.arange(1, int(parties))
    return 10.0 * math.fsum(np.exp(-2 * math.pi**2 * deviation**2 * k / (k + 1)))


class DiscreteGaussian(IntegerNoise):
    """The distribution with the least cost. If the standard deviation is at least 4 grid units,
    sums of several draws are discrete Gaussian to within 1e-60.

    Example:
        >>> DiscreteGaussian().variance(100.0, 7)
        15
    """

    name = "discrete-gaussian"
    least_deviation = 4

    def variance(self, wanted: float, parties: int) -> int:
        """An equal share of the wanted variance, rounded up."""
        return math.ceil(wanted / parties)

    def draw(self, variance: int, size: int, rng: np.random.Generator) -> np.ndarray:
        """One party's noise, drawn by `discrete_gaussian`."""
        return discrete_gaussian(variance, size, rng)

    def event(self, multiplier: float) -> privacy.DpEvent:
        """Event of zero-concentrated differential privacy with rho = 1 / (2 multiplier^2).

        By Kairouz, Liu and Steinke 2021, Proposition 14, rho is (1 / multiplier + sqrt(d) tau)^2 /
        2 for d coordinates. If the standard deviation of a party's noise is at least 4 grid units,
        tau is below 1e-60, which is less than the rounding error of rho.
        """
        from dp_accounting import dp_event

        return dp_event.ZCDpEvent(0.5 / multiplier**2)

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
        """Bounds by Kairouz, Liu and Steinke 2021, Proposition 14; `deviation` is the deviation of
        each party's noise.
        """
        # The sum has variance n sigma^2; tau bounds its distance from one discrete Gaussian.
        total, tau = math.sqrt(parties) * deviation, discrete_gaussian_tau(deviation, parties)
        moved = l2 / total
        return np.minimum.reduce(
            [
                orders / 2 * moved**2 + tau * dimension,
                orders / 2 * (moved**2 + 2 * l1 / total * tau + tau**2 * dimension),
                orders / 2 * (moved + math.sqrt(dimension) * tau) ** 2,
            ]
        )
