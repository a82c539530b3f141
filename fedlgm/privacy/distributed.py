"""Accounting of integer noise that several parties add in shares. The server sees only the sum.

Every party adds its share of the noise to its integers before they are summed under secure
aggregation. A party that colludes with the server or drops out contributes no noise. The accounted
noise is therefore only the sum of the honest parties' shares.
"""

from __future__ import annotations

import math

import numpy as np
from dp_accounting.rdp import compute_epsilon

from fedlgm.checks import check_count, check_positive, check_share
from fedlgm.noise import integer_noise
from fedlgm.noise.integer_noise import gaussian
from fedlgm.privacy.accountants import quiet
from fedlgm.privacy.plain import plain_numbers

_ORDERS = np.concatenate(
    [1 + np.arange(1, 100) / 10, np.arange(11, 64), [80, 96, 128, 192, 256, 512, 1024, 2048]]
)


@plain_numbers
def discrete_gaussian_tau(deviation: float, parties: int) -> float:
    """Bound on the largest absolute log ratio between the probabilities of a sum of discrete
    Gaussians and those of one discrete Gaussian.

    Args:
        deviation: standard deviation parameter of each party's discrete Gaussian.
        parties: number of parties N >= 1 whose noise adds up.

    Returns:
        tau = 10 sum_{k=1}^{N-1} exp(-2 pi^2 deviation^2 k / (k + 1)) (Kairouz, Liu and Steinke
        2021, Theorem 1).

    Raises:
        ConfigError: the deviation is not positive, or there is no party.

    Example:
        >>> round(discrete_gaussian_tau(0.5, 100), 6)
        9.701158
    """
    _check_noise(deviation, parties)
    return gaussian.discrete_gaussian_tau(deviation, parties)


@plain_numbers
def distributed_epsilon(
    noise: str,
    *,
    deviation: float,
    parties: int,
    sensitivity: float,
    dimension: int,
    rounds: int,
    delta: float,
) -> float:
    """Epsilon against a server that sees the noisy integer sum and the participants of every round.

    Sampling does not amplify, because the server knows the cohort. An integer vector of l2 norm d2
    has an l1 norm of at most d2 min(sqrt(d), d2), where d is the dimension.

    Args:
        noise: distribution, "discrete-gaussian" or "skellam" (`fedlgm.noise.integer_noise.LAWS`).
        deviation: standard deviation of the noise of each honest party (discrete Gaussian), or of
            the noise of all honest parties together (Skellam).
        parties: number of honest parties whose noise is in the sum.
        sensitivity: l2 distance by which a neighbouring data set moves the integer sum: the bound
            in grid units (zero-out or add-remove), or twice the bound (replace-one).
        dimension: number of coordinates of the sum.
        rounds: number of releases.
        delta: target delta in (0, 1).

    Returns:
        Epsilon by Renyi accounting: Kairouz, Liu and Steinke 2021, Proposition 14, for the discrete
        Gaussian; Agarwal, Kairouz and Liu 2021 for Skellam, also at fractional orders, for which
        the bound is not proven.

    Raises:
        ConfigError: an argument is outside its range.

    Example:
        >>> setting = {"parties": 100, "sensitivity": 60, "dimension": 26_010, "rounds": 1, "delta": 1e-5}
        >>> round(distributed_epsilon("discrete-gaussian", deviation=6, **setting), 4)
        4.7285
    """
    _check_noise(deviation, parties)
    check_positive(sensitivity=sensitivity)
    for name, value in (("dimension", dimension), ("rounds", rounds)):
        check_count(name, value)
    check_share(delta=delta)
    l1 = sensitivity * min(math.sqrt(dimension), sensitivity)
    curve = integer_noise.get(noise).divergences(
        _ORDERS, deviation=deviation, parties=parties, l2=sensitivity, l1=l1, dimension=dimension
    )
    with quiet():
        return float(compute_epsilon(_ORDERS, rounds * curve, delta)[0])


def _check_noise(deviation: float, parties: int) -> None:
    check_positive(deviation=deviation)
    check_count("parties", parties)
