"""Exact privacy of one Gaussian release: conversions between epsilon, delta and mu.

`mu` is the l2 distance between the means of two neighbouring releases, in standard deviations of
the noise. It is the parameter of mu-Gaussian differential privacy (Dong, Roth and Su 2022). One
release with noise multiplier z has mu = 1/z, and k of them without subsampling have mu = sqrt(k)/z.
The neighbouring relation is the relation of the sensitivity from which mu was computed. Privacy
profile: Balle and Wang 2018, Theorem 8; i.n.i.d. noise paper, Lemma 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import scipy

from fedlgm.checks import check_at_least_zero, check_non_negative, check_positive, check_share
from fedlgm.privacy.plain import plain_numbers

_RTOL = 1e-14


@plain_numbers
def gaussian_mu(epsilon: float, delta: float) -> float:
    """Largest mu whose Gaussian release is (epsilon, delta)-DP.

    It is the root mu_0 of Q(epsilon/mu - mu/2) - e^epsilon Q(epsilon/mu + mu/2) = delta, where Q is
    the standard normal survival function (i.n.i.d. noise paper, problem P2 and appendix B). The
    noise multiplier of one release is 1/mu_0.

    Args:
        epsilon: privacy budget, > 0.
        delta: target delta, in (0, 1).

    Returns:
        mu_0 with a relative error of about 1e-13, rounded so that the budget holds.

    Raises:
        ConfigError: `epsilon` or `delta` is out of range.

    >>> round(1 / gaussian_mu(1.0, 1e-5), 4)  # noise multiplier of one release
    3.7306
    """
    check_positive(epsilon=epsilon)
    check_share(delta=delta)
    target = math.log(delta)
    low = _one_term_root(epsilon, delta)
    # The profile's second term is at most its value at mu = sqrt(2 epsilon). This brackets mu_0.
    slack = _mills(math.sqrt(2 * epsilon)) / math.sqrt(2 * math.pi)  # e^epsilon Q(sqrt(2 epsilon))
    high = _one_term_root(epsilon, delta + slack) if delta + slack < 1 else 2 * low
    while _log_delta(high, epsilon) <= target:
        high *= 2
    while _log_delta(low, epsilon) > target:  # needed only because of rounding errors
        low *= 1 - 1e-12
    mu = _root(lambda m: _log_delta(m, epsilon) - target, low, high)
    return mu if _log_delta(mu, epsilon) <= target else mu * (1 - 2 * _RTOL)


@plain_numbers
def gaussian_delta(mu: float, epsilon: float) -> float:
    """Smallest delta for which a release of parameter mu is (epsilon, delta)-DP.

    Args:
        mu: see the module's docstring; >= 0, and infinite without noise.
        epsilon: privacy budget, >= 0.

    Returns:
        delta in [0, 1]; values below the smallest double become 0.

    Raises:
        ConfigError: `mu` or `epsilon` is out of range.

    >>> round(gaussian_delta(1.0, 1.0), 4)
    0.1269
    """
    check_at_least_zero(mu=mu)
    check_non_negative(epsilon=epsilon)
    if mu == 0 or math.isinf(mu):
        return 0.0 if mu == 0 else 1.0
    return math.exp(_log_delta(mu, epsilon))


@plain_numbers
def gaussian_epsilon(mu: float, delta: float) -> float:
    """Smallest epsilon for which a release of parameter mu is (epsilon, delta)-DP.

    Args:
        mu: see the module's docstring; >= 0, and infinite without noise.
        delta: target delta, in (0, 1).

    Returns:
        epsilon >= 0; 0 if the total variation distance is already below delta, infinite if mu is
        infinite.

    Raises:
        ConfigError: `mu` or `delta` is out of range.

    >>> round(gaussian_epsilon(1.0, 1e-5), 4)
    4.3772
    """
    check_at_least_zero(mu=mu)
    check_share(delta=delta)
    if math.isinf(mu):
        return math.inf
    if math.erf(mu / math.sqrt(8)) <= delta:
        return 0.0
    target = math.log(delta)
    # Dropping the second term of the profile bounds delta from above.
    high = mu * (mu / 2 - float(scipy.special.ndtri(delta)))
    high = max(high, math.ulp(1.0))
    while _log_delta(mu, high) > target:
        high *= 1 + 1e-12
    return _root(lambda e: _log_delta(mu, e) - target, 0.0, high)


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    # The absolute tolerance is negligible, so that tiny roots keep all their digits.
    return float(scipy.optimize.brentq(function, low, high, xtol=1e-300, rtol=_RTOL, maxiter=500))


def _log_delta(mu: float, epsilon: float) -> float:
    """Log of Q(a) - e^epsilon Q(b), with a = epsilon/mu - mu/2 and b = epsilon/mu + mu/2.

    e^epsilon times the normal density at b equals the density at a, so the second term is
    computed as density(a) * mills(b), without a large exponential.
    """
    a, b = epsilon / mu - mu / 2, epsilon / mu + mu / 2
    log_density = -a * a / 2 - math.log(2 * math.pi) / 2
    # For a > 0 both terms are small tails, so subtract their Mills ratios, which share one density.
    if a > 0:
        gap = _mills(a) - _mills(b)
        return log_density + math.log(gap) if gap > 0 else -math.inf
    first = float(scipy.special.log_ndtr(-a))
    ratio = math.exp(log_density + math.log(_mills(b)) - first)
    return first + math.log1p(-ratio) if ratio < 1 else -math.inf


def _mills(x: float) -> float:
    """Mills ratio Q(x) / density(x) of the standard normal distribution, for x >= 0."""
    return math.sqrt(math.pi / 2) * float(scipy.special.erfcx(x / math.sqrt(2)))


def _one_term_root(epsilon: float, tail: float) -> float:
    """Root in mu of Q(epsilon/mu - mu/2) = tail, computed without cancellation for small tails."""
    q = -float(scipy.special.ndtri(tail))
    root = math.sqrt(q * q + 2 * epsilon)
    return 2 * epsilon / (root + q) if q > 0 else root - q
