"""Privacy loss distribution of one sampled Gaussian release on a grid, equal bit for bit to the
distribution of `dp_accounting`.

`dp_accounting` inverts the privacy loss in Python, at one point of the grid at a time. This module
applies the same operations to all points at once, in a seventh of the time.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld.pld_pmf import DensePLDPmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution
from dp_accounting.pld.privacy_loss_mechanism import AdjacencyType, GaussianPrivacyLoss

_SPARSE = 1000
"""Number of points up to which `dp_accounting` stores the masses in a dictionary."""


def sampled_gaussian(multiplier: float, rate: float, interval: float) -> Any:
    """Privacy loss distribution of a Gaussian release of a Poisson sample, under add-or-remove-one.

    Args:
        multiplier: noise std divided by the bound, > 0.
        rate: sampling probability, in (0, 1).
        interval: distance between neighbouring losses on the grid.

    Example:
        >>> once = sampled_gaussian(1.0, 0.1, 1e-3)
        >>> round(float(once.self_compose(10).get_epsilon_for_delta(1e-5)), 2)
        2.85
    """
    return PrivacyLossDistribution(
        *(_masses(multiplier, rate, interval, kind) for kind in ("REMOVE", "ADD"))
    )


def _masses(multiplier: float, rate: float, interval: float, kind: str) -> Any:
    """Probabilities of the losses in one direction ("REMOVE" or "ADD") on the grid, by the
    connect-the-dots algorithm (Doroshenko et al. 2022, arXiv 2207.04380).
    """
    loss = GaussianPrivacyLoss(multiplier, sampling_prob=rate, adjacency_type=AdjacencyType[kind])
    bounds = loss.connect_dots_bounds()
    low, high = (
        math.floor(bounds.epsilon_lower / interval),
        math.ceil(bounds.epsilon_upper / interval),
    )
    deltas = _deltas(loss, np.arange(low, high + 1) * interval, 1 if kind == "REMOVE" else -1)
    steps = np.diff(deltas)
    if len(deltas) <= _SPARSE or np.any(steps > 0):
        return pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, low, high, deltas)
    # The same terms, without a dictionary of them.
    growth = math.expm1(interval)
    first, last = 1 - deltas[0] + steps[0] / growth, steps[-1] / math.expm1(-interval)
    inner = (steps[1:] - steps[:-1] * math.exp(interval)) / growth
    probs = np.maximum(0.0, np.concatenate(([first], inner, [last])))
    return DensePLDPmf(interval, low, probs, deltas[-1], True)


def _deltas(loss: GaussianPrivacyLoss, epsilons: np.ndarray, sign: int) -> np.ndarray:
    """Hockey-stick divergence at each epsilon, float64 [n]; `sign` is 1 for removing the unit, -1
    for adding it.

    Under sampling at rate q, the loss of removing the unit exceeds log(1 - q) everywhere, and the
    loss of adding the unit is below -log(1 - q).
    """
    rate = loss.sampling_prob
    inside = sign * epsilons > math.log1p(-rate)
    deltas = np.zeros(epsilons.size)
    if sign > 0:
        deltas[~inside] = -np.expm1(epsilons[~inside])
    within = epsilons[inside]
    x = _inverse(sign * within, loss.standard_deviation, rate, sign)
    deltas[inside] = loss.mu_upper_cdf(x) - np.exp(within + loss.mu_lower_log_cdf(x))
    return np.clip(deltas, 0, 1)


def _inverse(losses: np.ndarray, multiplier: float, rate: float, sign: int) -> np.ndarray:
    """Largest x at which the sampled loss is at least sign times `losses`, float64 [n]."""
    factor, constant = 1 / rate, 1 - 1 / rate
    # `plain` becomes log(exp(losses) / q + 1 - 1 / q), the loss without sampling.
    plain = losses + np.log(factor)
    with np.errstate(divide="ignore", invalid="ignore"):  # for losses at the limit, set below
        plain = plain + np.log1p(-np.exp(np.log(-constant) - plain))
    plain[losses == 0] = np.log(factor + constant)
    limit = math.log(1 - rate)
    plain[np.abs(losses - limit) <= 1e-9 * np.maximum(np.abs(losses), abs(limit))] = -math.inf
    x = -0.5 - sign * plain * multiplier**2
    return x if sign > 0 else 1.0 + x


def least_epsilon(pmf: DensePLDPmf, delta: float) -> float:
    """Smallest epsilon at which a grid's delta is at most `delta`.

    Example:
        >>> once = sampled_gaussian(1.0, 0.1, 1e-3)._pmf_remove.to_dense_pmf()
        >>> least_epsilon(once, 1e-5) == once.get_epsilon_for_delta(1e-5)
        True
    """
    largest = (pmf._lower_loss + pmf.size - 1) * pmf._discretization
    losses = itertools.count(largest, -pmf._discretization)
    # `PLDPmf.get_epsilon_for_delta` adds up NumPy scalars, which takes twice as long.
    probs = pmf._probs[::-1].tolist()
    return float(pld_pmf._get_epsilon_for_delta(pmf._infinity_mass, losses, probs, delta))
