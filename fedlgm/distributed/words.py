"""Sums modulo a power of two: how often noise wraps around, and how much of it there is."""

from __future__ import annotations

import math

from scipy.special import ndtr

from fedlgm.errors import ConfigError


def wrap_probability(bits: int, *, largest: float, deviation: float, dimension: int) -> float:
    """Bound on the probability that any coordinate of a noised integer sum wraps around.

    Coordinates are taken as independent; the noise is taken as Gaussian. Wrap-around cannot be detected afterwards.

    Args:
        bits: width of a word; sums are centred to [-2^(bits - 1), 2^(bits - 1)).
        largest: largest magnitude of a coordinate of the sum before noise.
        deviation: standard deviation of the noise of the sum.
        dimension: coordinates of the sum.

    Raises:
        ConfigError: an argument outside its range.

    Example:
        >>> f"{wrap_probability(16, largest=0, deviation=5000, dimension=1_000_000):.4e}"
        '5.6165e-05'
    """
    for name, value in (("bits", bits), ("dimension", dimension)):
        if value < 1 or int(value) != value:
            raise ConfigError(f"{name} must be a whole number of at least 1, got {value}")
    if not (math.isfinite(largest) and largest >= 0):
        raise ConfigError(f"largest must be finite and not negative, got {largest}")
    if not (math.isfinite(deviation) and deviation > 0):
        raise ConfigError(f"deviation must be finite and positive, got {deviation}")
    margin = 2.0 ** (bits - 1) - largest
    if margin <= 0:
        return 1.0
    return -math.expm1(dimension * math.log1p(-2 * float(ndtr(-margin / deviation))))


def noise_over_central(asked: int, threshold: int, colluders: int) -> float:
    """Noise of the sum over that of a trusted server where every client answers: sqrt(n / (t - m)).

    Raises:
        ConfigError: not 0 <= colluders < threshold <= asked.

    Example:
        >>> round(noise_over_central(100, 67, 10), 4)
        1.3245
    """
    if not 0 <= colluders < threshold <= asked:
        raise ConfigError(f"0 <= colluders < threshold <= asked must hold, got {colluders}, {threshold}, {asked}")
    return math.sqrt(asked / (threshold - colluders))
