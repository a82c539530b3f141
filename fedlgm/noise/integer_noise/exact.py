"""Exact rejection sampling over whole vectors. Each acceptance is decided with as many digits as
the decision needs.

To decide an event of probability exp(-g), a uniform number is compared with exp(-g) in float64. If
their difference is smaller than the error of float64, the uniform number gets more random bits, and
exp(-g) gets more digits. Rounding therefore adds no delta.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction
from functools import partial

import numpy as np

MARGIN = 2.0**-44
"""A hundred times the float64 error of an acceptance probability; one acceptance in 10^13 needs
more digits."""
_BITS = 53
_CHUNK = 1 << 18


def rejection_sample(size: int, candidates: Callable[[int], np.ndarray]) -> np.ndarray:
    """The first `size` proposals that are accepted, int64 [size].

    Args:
        size: number of draws.
        candidates: function that makes a given number of proposals and returns the accepted ones.
    """
    out, filled = np.empty(size, dtype=np.int64), 0
    while filled < size:
        draws = candidates(min(_CHUNK, int(1.5 * (size - filled)) + 64))[: size - filled]
        out[filled : filled + len(draws)] = draws
        filled += len(draws)
    return out


def discrete_laplace(scale: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Up to `count` draws with probabilities proportional to exp(-|x| / scale), int64.

    Source: Canonne, Kamath and Steinke 2020, Algorithm 2.
    """
    rest = rng.integers(0, scale, count)
    rest = rest[happens(rest / scale, lambda lane, _: Fraction(int(rest[lane]), scale), rng)]
    # A geometric number of whole scales: each further scale has probability exp(-1).
    wholes, going = np.zeros(len(rest), dtype=np.int64), np.arange(len(rest))
    while len(going):
        going = going[happens(np.ones(len(going)), lambda *_: Fraction(1), rng)]
        wholes[going] += 1
    size, negative = rest + scale * wholes, rng.integers(0, 2, len(rest), dtype=np.int64) == 1
    # Without this filter, zero would be counted with both signs.
    return np.where(negative, -size, size)[~(negative & (size == 0))]


def happens(
    exponents: np.ndarray,
    exactly: Callable[[int, int], Fraction],
    rng: np.random.Generator,
    margin: float | None = None,
) -> np.ndarray:
    """Whether each of n independent events of probability exp(-g) happens, decided exactly.

    Args:
        exponents: g >= 0 in float64, exact enough that the error of exp(-g) is below the margin,
            [n].
        exactly: function from an index and a number of digits to g at this index, with an error of
            at most 10^-digits.
        rng: stream to draw from.
        margin: largest error of exp(-g) in float64; default: `MARGIN`.

    Returns:
        bool [n].

    Example:
        >>> share = happens(np.full(100_000, 1.0), lambda *_: Fraction(1), np.random.default_rng(1)).mean()
        >>> round(float(share), 2)  # exp(-1) = 0.368
        0.37
    """
    uniform, chance = rng.random(len(exponents)), np.exp(-exponents)
    out = uniform < chance
    for lane in np.flatnonzero(np.abs(uniform - chance) <= (MARGIN if margin is None else margin)):
        out[lane] = is_below_exp(int(uniform[lane] * 2**_BITS), partial(exactly, int(lane)), rng)
    return out


def is_below_exp(
    leading: int, exactly: Callable[[int], Fraction], rng: np.random.Generator
) -> bool:
    """Whether a uniform number with these leading 53 bits lies below exp(-g).

    Args:
        leading: the leading bits.
        exactly: function from a number of digits to g, with an error of at most 10^-digits.
        rng: stream of further bits.
    """
    bits, digits = _BITS, 40
    while True:
        context, exponent = Context(prec=digits), exactly(digits)
        ratio = context.divide(Decimal(exponent.numerator), Decimal(exponent.denominator))
        chance = Fraction(context.exp(ratio.copy_negate()))
        # Error of exp(-g): the error of g times exp(-g), plus the error of the last digit.
        off = (exponent + 2) * chance * Fraction(10) ** (2 - digits)
        if Fraction(leading + 1, 2**bits) <= chance - off:
            return True
        if Fraction(leading, 2**bits) >= chance + off:
            return False
        # The uniform number is too close to exp(-g) to decide, so both get more digits.
        leading = (leading << 64) + int(rng.integers(0, 2**64, dtype=np.uint64))
        bits, digits = bits + 64, digits + 20
