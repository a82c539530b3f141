"""Lower bounds on epsilon from canary scores with Gaussian noise.

These bounds are tighter than bounds from counted guesses.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import scipy.optimize
import scipy.special
import scipy.stats

from fedlgm.errors import ConfigError
from fedlgm_lab.audits.scores import CONFIDENCE, Array, Counts, Scores, check


@dataclass(frozen=True)
class NoiseSeen:
    """What is known of the noise in canary-aligned sums, in addition to the sums themselves.

    Attributes:
        degrees: degrees of freedom of the estimate of the noise's variance.
        variance: the noise's variance divided by the planned variance, if the noise was measured
            separately; None estimates the variance from the sums.
        length: length of the sum of all planned contributions in units of the noise; None uses the
            value for orthogonal canaries.
    """

    degrees: float
    variance: float | None = None
    length: float | None = None

    @classmethod
    def of_layers(
        cls,
        energy: Array,
        weights: Array,
        sizes: Counts,
        length: float | None = None,
    ) -> NoiseSeen:
        """Describe noise of which every value was observed in T rounds, by its variance along a
        canary's direction over several layers.

        The weighted mean of chi-square variables is replaced by a chi-square variable of the same
        mean and variance (Satterthwaite). The lower tail of the replacement's law is heavier, so
        the bounds err on the low side.

        Args:
            energy: mean square of the noise in each layer divided by the planned mean square, [T,
                K].
            weights: weight of each layer in a canary-aligned sum, with squares that add up to 1 in
                a round, [T, K]; a layer of weight 0 does not count.
            sizes: number of coordinates of each layer, [K].
            length: see `NoiseSeen`.

        Example:
            >>> seen = NoiseSeen.of_layers(np.ones((3, 2)), np.full((3, 2), 0.5**0.5), np.array([10, 10]))
            >>> round(seen.degrees, 9), round(seen.variance, 9)
            (60.0, 1.0)
        """
        shares = weights**2
        variance = float(np.sum(shares * np.where(shares > 0, energy, 0.0))) / len(shares)
        # Satterthwaite: the degrees of freedom are 2 E^2 / Var, and a layer of d coordinates has
        # variance 2 / d.
        degrees = len(shares) ** 2 / float(np.sum(shares**2 / sizes))
        return cls(degrees, variance, length)


def noise_ratio(
    observed: Array, planned: Array, confidence: float = CONFIDENCE, noise: NoiseSeen | None = None
) -> float:
    """Compute a lower bound on the true signal-to-noise ratio divided by the planned ratio, from
    one run of Gaussian releases.

    Observation i is ratio * planned_i + Gaussian noise. The variance of this noise is unknown and
    the same for all observations. The bounded quantity is `ratio` divided by the noise's standard
    deviation. The planned signals are in units of the planned noise, so a release exactly as
    planned has the value 1. A release with the value r costs as much as the planned release with
    its noise divided by r.

    The ratio of the least-squares slope to its standard error has a noncentral t law, which the
    bound inverts. The bound is exact for independent Gaussian noise.

    Args:
        observed: canary-aligned sums in units of the planned noise, [n].
        planned: planned signal of each observation, 0 for a canary that is left out, [n].
        confidence: in (0.5, 1).
        noise: what else is known of the noise; by default the sums are assumed to be independent.

    Returns:
        The bound, at least 0; `inf` if there is no noise at all.

    Raises:
        ConfigError: there are too few observations, or no included canary.

    Source: Agrawal, Wei, Singh, Magdon-Ismail and Zikas, "Let's Ask Gauss: Improved One-Run Privacy
        Auditing" (2026), for canary-aligned sums as Gaussian scores. The paper's bound compares two
        fitted Gaussians. This bound is exact in finite samples and applies to single rounds, whose
        sums are exactly Gaussian.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> planned = 0.5 * rng.integers(0, 2, 20_000)
        >>> 0.9 < noise_ratio(planned + rng.normal(size=20_000), planned) < 1.0
        True
    """
    check(0.0, confidence)
    x, a = np.asarray(observed, dtype=np.float64), np.asarray(planned, dtype=np.float64)
    if x.shape != a.shape or x.ndim != 1:
        raise ConfigError(
            f"observed and planned must be lists of equal length, got {x.shape} and {a.shape}"
        )
    signal = float(a @ a)
    noise = noise or NoiseSeen(len(x) - 1.0)
    freedom = noise.degrees if noise.variance is not None else min(noise.degrees, len(x) - 1.0)
    if signal == 0 or freedom < 1:
        raise ConfigError(
            f"too few canaries: {int(np.count_nonzero(a))} of {len(x)} observations have a signal"
        )
    # Least squares of x = slope a + noise. slope / error has a noncentral t law.
    slope = float(a @ x) / signal
    variance = noise.variance
    if variance is None:
        variance = float(np.sum((x - slope * a) ** 2)) / (len(x) - 1)
    # There is no noise: the residuals are rounding errors.
    if variance <= 1e-12 * slope**2:
        return math.inf
    error = (
        math.sqrt(signal) if noise.length is None else noise.length
    ) / signal  # standard error of the slope, in units of the planned noise
    return (
        max(0.0, noncentral_t_lower(slope / (math.sqrt(variance) * error), freedom, confidence))
        * error
    )


def seen_degrees(overlap: Array, canaries: int) -> float:
    """Compute the degrees of freedom of a noise variance that is estimated from canaries whose
    directions need not be orthogonal.

    Args:
        overlap: mean squared cosine between two canaries' directions in each round, [T].
        canaries: number m of canaries.

    Example:
        >>> seen_degrees(np.zeros(3), canaries=10)  # three rounds, orthogonal directions
        29.0
    """
    return float(np.sum(1.0 / (1.0 / canaries + overlap))) - 1.0


def gaussian_shift(scores: Scores, confidence: float = CONFIDENCE) -> float:
    """Compute a lower bound on mu, the distance between the mean scores of included and of left-out
    canaries, in standard deviations of the scores' Gaussian noise.

    The noise has the same unknown variance for included and for left-out canaries. The bound
    therefore inverts the noncentral t law of the two-sample t statistic. A release with such a mu
    has epsilon = `privacy.gaussian_epsilon(mu, delta)`.

    Args:
        scores: independent scores with Gaussian noise.
        confidence: in (0.5, 1).

    Returns:
        The bound, at least 0; `inf` where there is no noise at all.

    Raises:
        ConfigError: the confidence is outside its range, or there are fewer than two included or
            two left-out canaries.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> 0.9 < gaussian_shift(Scores(rng.normal(1.0, size=20_000), rng.normal(size=20_000))) < 1.0
        True
    """
    check(0.0, confidence)
    n, k = scores.inside.size, scores.outside.size
    if min(n, k) < 2:
        raise ConfigError(f"too few scores: {n} in and {k} out")
    shift = float(scores.inside.mean() - scores.outside.mean())
    squares = float(np.sum((scores.inside - scores.inside.mean()) ** 2))
    squares += float(np.sum((scores.outside - scores.outside.mean()) ** 2))
    # The pooled variance of the two samples.
    variance = squares / (n + k - 2)
    if variance <= 1e-12 * shift**2:
        return math.inf if shift > 0 else 0.0
    root = math.sqrt(1 / n + 1 / k)
    return max(
        0.0, noncentral_t_lower(shift / (math.sqrt(variance) * root), n + k - 2, confidence) * root
    )


def noncentral_t_lower(t: float, degrees: float, confidence: float) -> float:
    """Compute a lower confidence limit of the noncentrality from an observed t statistic.

    Example:
        >>> round(noncentral_t_lower(3.0, degrees=1e6, confidence=0.95), 2)  # that of a normal law: 3 - 1.645
        1.36
    """

    def excess(noncentrality: float) -> float:
        return float(scipy.stats.nct.sf(t, degrees, noncentrality)) - (1 - confidence)

    spread = math.sqrt(1 + t * t / (2 * degrees))
    guess = t + float(scipy.special.ndtri(1 - confidence)) * spread
    if degrees > 1e5 or abs(t) > 1e3:  # the normal approximation is as good as exact here
        return guess
    low, high = guess - 6 * spread, t
    while excess(low) > 0:
        low -= 6 * spread
    while excess(high) < 0:
        high += spread
    return float(scipy.optimize.brentq(excess, low, high, xtol=1e-10))
