"""Shamir's secret sharing (1979) over the field of integers modulo the prime 2^521 - 1."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping
from itertools import accumulate

from fedlgm.errors import RunError

PRIME = 2**521 - 1
SHARE_BYTES = 66
SECRET_BYTES = 32


def split(secret: bytes, threshold: int, points: Iterable[int]) -> dict[int, bytes]:
    """Split a secret of 32 bytes into shares. Any `threshold` shares determine the secret, and
    fewer shares reveal nothing about it.

    Args:
        secret: 32 bytes.
        threshold: number of shares needed.
        points: distinct whole numbers of at least 0, one for each share.

    Returns:
        point -> share, 66 bytes.

    Example:
        >>> shares = split(b"s" * 32, 2, [0, 1, 2])
        >>> Weights([0, 2]).combine(shares) == b"s" * 32
        True
    """
    coefficients = [
        int.from_bytes(secret),
        *(secrets.randbelow(PRIME) for _ in range(threshold - 1)),
    ]
    shares = {}
    for point in points:
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * (point + 1) + coefficient) % PRIME
        shares[point] = value.to_bytes(SHARE_BYTES)
    return shares


class Weights:
    """Weights with which the shares at `points` add up to their secret. The same weights open all
    secrets that are split over these points.

    Args:
        points: points of as many shares as are needed, and no more.
    """

    def __init__(self, points: Iterable[int]) -> None:
        x = [point + 1 for point in points]
        product = math.prod(x) % PRIME
        # Weight i is the product of x_j / (x_j - x_i) over all other j. The numbers are small, so
        # exact products are faster than products modulo the prime.
        below = [xi * math.prod(xj - xi for xj in x if xj != xi) % PRIME for xi in x]
        self._weights = {
            xi - 1: product * inverse % PRIME
            for xi, inverse in zip(x, _inverses(below), strict=True)
        }

    @property
    def points(self) -> Iterable[int]:
        """Points of the shares."""
        return self._weights.keys()

    def combine(self, shares: Mapping[int, bytes]) -> bytes:
        """The secret of 32 bytes to which the shares at `points` add up.

        Raises:
            RunError: the result has more than 32 bytes, so the shares do not belong to one secret.
        """
        total = (
            sum(weight * int.from_bytes(shares[point]) for point, weight in self._weights.items())
            % PRIME
        )
        if total >> (8 * SECRET_BYTES):
            raise RunError("the shares of a secret do not belong together")
        return total.to_bytes(SECRET_BYTES)


def _inverses(numbers: list[int]) -> list[int]:
    """Inverses of numbers modulo the prime, computed with a single inversion."""
    ahead = [1, *accumulate(numbers, lambda product, other: product * other % PRIME)]
    rest, inverses = pow(ahead[-1], -1, PRIME), list[int]()
    for number, before in zip(reversed(numbers), reversed(ahead[:-1]), strict=True):
        inverses.append(rest * before % PRIME)
        rest = rest * number % PRIME
    return inverses[::-1]
