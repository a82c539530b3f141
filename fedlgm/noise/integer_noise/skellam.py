"""Skellam noise, the difference of two Poisson variables, sampled exactly. Sums of Skellam
variables are Skellam.
"""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np

from fedlgm import privacy
from fedlgm.errors import ConfigError
from fedlgm.noise.integer_noise.exact import discrete_laplace, happens, rejection_sample
from fedlgm.noise.integer_noise.law import IntegerNoise

_LARGEST = 2**64
_MARGIN = 2.0**-38
"""Margin of an acceptance, far above the float64 error of the exponents in `_candidates`. About one
acceptance in 10^11 needs more digits.
"""
_SLACK = 4
"""Difference, in squared grid units, between the variances of Skellam noise and of Gaussian noise
of the same cost."""
_NEAR = 0.1
_SMALL = 16
_SMALL_ERRORS = np.array(
    [0.0]
    + [
        math.lgamma(j + 1) - (j + 0.5) * math.log(j) + j - 0.5 * math.log(2 * math.pi)
        for j in range(1, _SMALL)
    ]
)
_TERMS = 9


def skellam(variance: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """Independent draws, each the difference of two Poisson variables of mean variance / 2.

    Args:
        variance: variance of a draw, an even number in [2, 2^64].
        size: number of draws.
        rng: stream to draw from.

    Returns:
        int64 [size], of that variance and excess kurtosis 1 / variance.

    Raises:
        ConfigError: the variance is outside its range, or odd.

    Example:
        >>> draws = skellam(36, 100_000, np.random.default_rng(1))
        >>> draws.dtype, bool(abs(draws.var() / 36 - 1) < 0.02)
        (dtype('int64'), True)
    """
    if not (2 <= variance <= _LARGEST and variance % 2 == 0):
        raise ConfigError(
            f"the variance of Skellam noise must be an even number in [2, 2^64], got {variance}"
        )
    first, second = (
        rejection_sample(size, lambda count: _candidates(variance // 2, count, rng))
        for _ in range(2)
    )
    return first - second


def _candidates(mean: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """The accepted values among `count` proposals for a Poisson variable minus its mean.

    Proposals x are discrete Laplace of scale s = floor(sqrt(mean)) + 1. Let p be the Poisson
    probabilities and h(x) = ln p(mean) - ln p(mean + x). The acceptance probability is exp(-g) with
    g = h(x) - |x| / s + C, which needs C >= |x| / s - h(x) everywhere:

    * x > 0: h(x) = sum_{i <= x} ln(1 + i / mean) >= mean phi(x / mean), phi(u) = (1 + u) ln(1 + u)
      - u, whose conjugate gives mean (exp(1 / s) - 1 - 1 / s) <= mean / (2 s^2) + mean / (4 s^3);
    * x = -y < 0: h(x) >= y (y - 1) / (2 mean), which gives mean / (2 s^2) + 1 / (2 s) + 1 / (8
      mean).
    """
    scale = math.isqrt(mean) + 1
    proposed = discrete_laplace(scale, count, rng)
    # A Poisson variable is not negative, so x >= -mean.
    proposed = proposed[proposed >= -mean]
    above = (
        Fraction(mean, 2 * scale**2)
        + Fraction(1, 2 * scale)
        + Fraction(mean, 4 * scale**3)
        + Fraction(1, 8 * mean)
    )

    def exactly(lane: int, digits: int) -> Fraction:
        x = int(proposed[lane])
        return _log_ratio(mean, x, digits) - Fraction(abs(x), scale) + above

    exponents = _log_ratios(mean, proposed) - np.abs(proposed) / scale + float(above)
    return proposed[happens(exponents, exactly, rng, _MARGIN)]


def _log_ratios(mean: int, x: np.ndarray) -> np.ndarray:
    """The log ratio h(x) = ln(p(mean) / p(mean + x)) of Poisson probabilities in float64, computed
    without cancellation (Loader 2000).
    """
    middle, k = float(mean), mean + x.astype(np.float64)
    # With m the mean, ln(k / m) = 2 atanh(v), so
    # k ln(k / m) - x = x v + 2 k (v^3 / 3 + v^5 / 5 + ...).
    v = x / (middle + k)
    square, series = v * v, np.zeros(len(v))
    for j in range(_TERMS, 0, -1):
        series = (series + 1 / (2 * j + 1)) * square
    out = v * (x + 2 * k * series)
    # The series converges slowly for large |v|, where the direct formula does not cancel.
    far = np.abs(v) >= _NEAR
    with np.errstate(divide="ignore", invalid="ignore"):
        out[far] = np.where(k[far] > 0, k[far] * np.log(k[far] / middle), 0.0) - x[far]
        half = np.where(k > 0, 0.5 * np.log1p(x / middle), -0.5 * math.log(2 * math.pi * middle))
    return out + half + _stirling(k) - _stirling(np.array([middle]))


def _stirling(k: np.ndarray) -> np.ndarray:
    """Error of Stirling's formula: ln k! - (k ln k - k + ln(2 pi k) / 2), and 0 for k = 0."""
    large = np.maximum(k, _SMALL)
    square = 1 / (large * large)
    out = (1 / 12 - (1 / 360 - (1 / 1260 - square / 1680) * square) * square) / large
    # The asymptotic series is not accurate for small k, so the errors at small k are tabulated.
    small = k < _SMALL
    out[small] = _SMALL_ERRORS[k[small].astype(np.int64)]
    return out


def _log_ratio(mean: int, x: int, digits: int) -> Fraction:
    """The log ratio h(x) with an error of at most 10^-digits."""
    import mpmath

    with mpmath.workdps(digits + 40):  # the terms have up to 25 digits before the point
        value = mpmath.loggamma(mean + x + 1) - mpmath.loggamma(mean + 1) - x * mpmath.log(mean)
        mantissa, exponent = value.man_exp
    return (-1 if value < 0 else 1) * Fraction(abs(int(mantissa))) * Fraction(2) ** exponent


class Skellam(IntegerNoise):
    """Skellam noise. The sum of the noise of any number of parties is exactly Skellam noise.

    For noise of variance mu in the sum, Agarwal, Kairouz and Liu 2021 bound the divergence of every
    whole order a >= 2 by a d2^2 / (2 mu) (1 + (1 + 1.5 d1 / d2^2) / mu), where d1 and d2 are the l1
    and l2 norms of the change of the sum. As d1 <= d2^2 for integers, noise of variance mu = v + 4
    costs at most as much as Gaussian noise of variance v.

    Example:
        >>> Skellam().variance(100.0, 7)
        16
    """

    name = "skellam"
    words = ", by Skellam noise"
    least_deviation = (
        32  # then values beyond nine deviations are as rare as normal ones, to within a third
    )

    def variance(self, wanted: float, parties: int) -> int:
        """An equal share of the wanted variance plus `_SLACK`, rounded up to an even number."""
        return 2 * math.ceil((wanted + _SLACK) / (2 * parties))

    def draw(self, variance: int, size: int, rng: np.random.Generator) -> np.ndarray:
        """One party's noise, drawn by `skellam`."""
        return skellam(variance, size, rng)

    def event(self, multiplier: float) -> privacy.DpEvent:
        """The event of Gaussian noise at whole orders. A fractional order is charged at the next
        whole order.
        """
        from fedlgm.privacy.events import WholeOrdersDpEvent

        return WholeOrdersDpEvent(0.5 / multiplier**2)

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
        """Bounds by Agarwal, Kairouz and Liu 2021, Corollary 3.6; `deviation` is the deviation of
        the whole sum's noise.

        The corollary is proven for whole orders. A fractional order gets the bound of the next
        whole order, because divergences do not fall with the order.
        """
        # a d2^2 / (2 mu) + min(((2 a - 1) d2^2 + 6 d1) / (4 mu^2), 3 d1 / (2 mu)), for order a.
        orders = np.ceil(orders)
        variance = deviation**2
        rest = np.minimum(
            ((2 * orders - 1) * l2**2 + 6 * l1) / (4 * variance**2), 3 * l1 / (2 * variance)
        )
        return orders * l2**2 / (2 * variance) + rest
