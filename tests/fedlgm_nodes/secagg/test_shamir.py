"""Shares: enough of them give the secret, fewer say nothing, wrong ones are noticed."""

from __future__ import annotations

import itertools
import secrets

import pytest

from fedlgm.errors import RunError
from fedlgm_nodes.secagg.shamir import PRIME, SHARE_BYTES, Weights, split


def test_any_threshold_shares_give_the_secret():
    secret = secrets.token_bytes(32)
    shares = split(secret, 3, [0, 4, 7, 9, 199])
    assert {len(share) for share in shares.values()} == {SHARE_BYTES}
    for chosen in itertools.combinations(shares, 3):
        assert Weights(chosen).combine(shares) == secret


def test_fewer_shares_fit_every_secret():
    """Two shares of three: for any other secret there is a third point that explains them."""
    shares = split(b"a" * 32, 3, [0, 1])
    (x0, y0), (x1, y1) = ((point + 1, int.from_bytes(share)) for point, share in shares.items())
    other = int.from_bytes(b"b" * 32)
    # The parabola through (0, other) and both points exists and is unique given its third
    # coefficient.
    slope0, slope1 = (
        (y0 - other) * pow(x0, -1, PRIME) % PRIME,
        (y1 - other) * pow(x1, -1, PRIME) % PRIME,
    )
    second = (slope1 - slope0) * pow(x1 - x0, -1, PRIME) % PRIME
    first = (slope0 - second * x0) % PRIME
    assert all((other + first * x + second * x * x) % PRIME == y for x, y in ((x0, y0), (x1, y1)))


def test_shares_of_two_secrets_do_not_combine():
    one, other = split(b"a" * 32, 2, [0, 1]), split(b"a" * 32, 2, [0, 1])
    with pytest.raises(RunError, match="do not belong together"):
        Weights([0, 1]).combine({0: one[0], 1: other[1]})
