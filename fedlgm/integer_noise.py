"""Discrete Gaussian noise, sampled exactly: rejection with acceptances that are decided in as many digits as they need.

The sampler is that of Canonne, Kamath and Steinke (2020), section 5, over whole vectors. An event of probability
exp(-g) compares a uniform number with exp(-g) in float64; where the two lie closer together than float64 is known to
err, the number gets more random bits and exp(-g), for a rational g, more digits. So no delta is left for rounding.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction

import numpy as np

from fedlgm.errors import ConfigError

_MARGIN = 2.0**-44
"""A hundred times the error of an acceptance probability in float64; one acceptance in 10^13 is decided otherwise."""
_BITS = 53
_CHUNK = 1 << 18
_LARGEST = 2**80


def discrete_gaussian(variance: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """Independent draws with probabilities proportional to exp(-x^2 / (2 variance)) on the integers.

    Args:
        variance: parameter sigma^2, a whole number in [1, 2^80]. It is the variance up to exp(-2 pi^2 sigma^2).
        size: number of draws.
        rng: stream to draw from.

    Returns:
        int64 [size].

    Raises:
        ConfigError: a variance outside its range.

    Example:
        >>> draws = discrete_gaussian(36, 100_000, np.random.default_rng(1))
        >>> draws.dtype, bool(abs(draws.var() / 36 - 1) < 0.02)
        (dtype('int64'), True)
    """
    if not 1 <= variance <= _LARGEST:
        raise ConfigError(f"the variance of discrete Gaussian noise must lie in [1, 2^80], got {variance}")
    out, filled = np.empty(size, dtype=np.int64), 0
    while filled < size:
        found = _candidates(variance, min(_CHUNK, int(1.5 * (size - filled)) + 64), rng)[: size - filled]
        out[filled : filled + len(found)] = found
        filled += len(found)
    return out


def _candidates(variance: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """What is accepted of `count` discrete Laplace proposals."""
    scale = math.isqrt(variance) + 1
    proposed = _discrete_laplace(scale, count, rng)
    size = np.abs(proposed)

    def exactly(lane: int) -> Fraction:
        return Fraction((int(size[lane]) * scale - variance) ** 2, 2 * variance * scale**2)

    exponents = (size - variance / scale) ** 2 / (2 * variance)
    return proposed[happens(exponents, exactly, rng)]


def _discrete_laplace(scale: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Up to `count` draws with probabilities proportional to exp(-|x| / scale)."""
    rest = rng.integers(0, scale, count)
    rest = rest[happens(rest / scale, lambda lane: Fraction(int(rest[lane]), scale), rng)]
    wholes, going = np.zeros(len(rest), dtype=np.int64), np.arange(len(rest))
    while len(going):
        going = going[happens(np.ones(len(going)), lambda _: Fraction(1), rng)]
        wholes[going] += 1
    size, negative = rest + scale * wholes, rng.integers(0, 2, len(rest), dtype=np.int64) == 1
    return np.where(negative, -size, size)[~(negative & (size == 0))]  # else zero would come up twice


def happens(exponents: np.ndarray, exactly: Callable[[int], Fraction], rng: np.random.Generator) -> np.ndarray:
    """Independent events of probabilities exp(-g), exactly.

    Args:
        exponents: g >= 0 in float64, off by so little that exp(-g) errs by less than 2^-50, [n].
        exactly: g of a place.
        rng: stream to draw from.

    Returns:
        bool [n].

    Example:
        >>> share = happens(np.full(100_000, 1.0), lambda _: Fraction(1), np.random.default_rng(1)).mean()
        >>> round(float(share), 2)  # exp(-1) = 0.368
        0.37
    """
    uniform, chance = rng.random(len(exponents)), np.exp(-exponents)
    out = uniform < chance
    for lane in np.flatnonzero(np.abs(uniform - chance) <= _MARGIN):
        out[lane] = _decided(int(uniform[lane] * 2**_BITS), exactly(int(lane)), rng)
    return out


def _decided(leading: int, exponent: Fraction, rng: np.random.Generator) -> bool:
    """Whether a uniform number with these leading 53 bits lies below exp(-exponent)."""
    bits, digits = _BITS, 40
    while True:
        context = Context(prec=digits)
        ratio = context.divide(Decimal(exponent.numerator), Decimal(exponent.denominator))
        chance = Fraction(context.exp(ratio.copy_negate()))
        off = (exponent + 2) * chance * Fraction(10) ** (2 - digits)
        if Fraction(leading + 1, 2**bits) <= chance - off:
            return True
        if Fraction(leading, 2**bits) >= chance + off:
            return False
        leading = (leading << 64) + int(rng.integers(0, 2**64, dtype=np.uint64))
        bits, digits = bits + 64, digits + 20
