"""From canary scores to lower bounds on epsilon: pure functions of NumPy arrays.

A score is any number that tends to be higher for canaries that were in than for those that were left out. Every bound
holds with probability `confidence` over the canaries' fair coins and the mechanism's noise, under the neighbouring
relation by which in and out differ. What each of them assumes:

    epsilon_clopper_pearson   many independent trials; any (epsilon, delta)-DP release
    epsilon_one_run           one run, canaries in by independent fair coins; any (epsilon, delta)-DP release
    epsilon_one_run_fdp       the same, for releases that are Gaussian-DP
    epsilon_from_rates        many independent trials of a Gaussian-DP release
    noise_ratio               one run of a release with Gaussian noise, scores whose noise is Gaussian
    epsilon_one_shot          nothing that it could be held to: an ESTIMATE

A bound is taken at one threshold. "split" chooses it on one half of the scores and evaluates it on the other;
"frontier" corrects for as many thresholds as the scores' concave hull has corners, as jax_privacy does.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import scipy.optimize
import scipy.special
import scipy.stats

from fedlgm.errors import ConfigError
from fedlgm.privacy.gaussian import gaussian_epsilon, gaussian_mu

Array = npt.NDArray[np.float64]
ThresholdRule = Literal["split", "frontier"]
CONFIDENCE = 0.999
"""Default confidence: of a thousand audits of sound releases at most one, on average, raises a false alarm."""
COARSE_ERROR = 1e-3  # relative, of the accountant's coarse grid: ten times what it is
_XTOL = 1e-9


@dataclass(frozen=True)
class Scores:
    """Scores of canaries.

    Attributes:
        inside: of those that were in, [n].
        outside: of those that were left out, [k].
    """

    inside: Array
    outside: Array

    def __post_init__(self) -> None:
        for name in ("inside", "outside"):
            values = np.asarray(getattr(self, name), dtype=np.float64)
            if values.ndim != 1 or values.size == 0 or np.isnan(values).any():
                raise ConfigError(f"scores {name} must be a non-empty list of numbers, got shape {values.shape}")
            object.__setattr__(self, name, values)

    @property
    def count(self) -> int:
        """Number m of canaries, in and out."""
        return self.inside.size + self.outside.size

    def split(self, seed: int | None = None, share: float = 0.5) -> tuple[Scores, Scores]:
        """Two parts drawn at random, the first of which holds `share` of the scores in and out."""
        rng = np.random.default_rng(seed)
        halves = []
        for values in (self.inside, self.outside):
            order, cut = rng.permutation(values.size), int(values.size * share)
            halves.append((values[order[:cut]], values[order[cut:]]))
        if any(part.size == 0 for half in halves for part in half):
            raise ConfigError(f"too few scores to split: {self.inside.size} in and {self.outside.size} out")
        return Scores(halves[0][0], halves[1][0]), Scores(halves[0][1], halves[1][1])

    def frontier(self) -> tuple[Array, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Thresholds at the corners of the concave hull of the ROC curve, and scores out and in below each."""
        thresholds = np.append(np.union1d(self.inside, self.outside), np.inf)
        missed = np.searchsorted(np.sort(self.inside), thresholds, side="left")
        rejected = np.searchsorted(np.sort(self.outside), thresholds, side="left")
        corners = _hull(missed, rejected)
        return thresholds[corners], rejected[corners], missed[corners]

    def auc(self) -> float:
        """Area under the ROC curve of the concave hull."""
        _, rejected, missed = self.frontier()
        return float(np.trapezoid(rejected / rejected[-1], missed / missed[-1]))


def _hull(x: npt.NDArray[np.int64], y: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Indices of points that lie on no segment, or below one, between two others; x ascending."""
    indices = np.arange(len(x))
    while len(indices) > 2:
        dx, dy = np.diff(x[indices]), np.diff(y[indices])
        inner = dy[:-1] * dx[1:] - dy[1:] * dx[:-1] > 0
        if inner.all():
            break
        indices = indices[np.r_[True, inner, True]]
    return indices


# -- bounds at one threshold -------------------------------------------------------------------------------------------


def clopper_pearson_upper(count: npt.ArrayLike, trials: npt.ArrayLike, significance: float) -> Array:
    """Upper limits of a binomial probability, one-sided at level `significance`, for `count` successes of `trials`."""
    count, trials = np.asarray(count), np.asarray(trials)
    with np.errstate(invalid="ignore"):
        upper = scipy.stats.beta.ppf(1 - significance, count + 1, np.maximum(trials - count, 1))
    return np.where(count < trials, upper, 1.0)


def _rates(missed: Array, false_alarms: Array, delta: float) -> Array:
    """ln((TPR - delta) / FPR) from upper limits of FNR and FPR; -inf where TPR <= delta."""
    gain = 1 - missed - delta
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(gain > 0, np.log(np.maximum(gain, 1e-300)) - np.log(false_alarms), -np.inf)


def one_run_p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Bound on the probability of that many correct guesses under (epsilon, delta)-DP.

    Args:
        canaries: m, each in by a fair coin of its own.
        guesses: r <= m canaries that a guess is made for.
        correct: v correct guesses.
        epsilon: epsilon >= 0 of the hypothesis.
        delta: its delta.

    Source: Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run" (NeurIPS 2023), Theorem 5.2.
    """
    right = float(scipy.special.expit(epsilon))
    tail = float(scipy.stats.binom.sf(correct - 1, guesses, right))
    if delta == 0 or correct == 0:
        return tail
    steps = np.arange(1, correct + 1)
    slope = np.max((scipy.stats.binom.sf(correct - steps - 1, guesses, right) - tail) / steps, initial=0.0)
    return min(1.0, tail + float(slope) * delta * 2 * canaries)


def _one_run_excess(
    canaries: int, guesses: int, correct: int, significance: float, delta: float
) -> Callable[[float], float]:
    return lambda epsilon: significance - one_run_p_value(canaries, guesses, correct, epsilon, delta)


def _fdp_excess(
    canaries: int, guesses: int, correct: int, significance: float, delta: float
) -> Callable[[float], float]:
    """Positive where the counts refute Gaussian DP at (epsilon, delta).

    Source: Mahloujifar, Melis and Chaudhuri, "Auditing f-Differential Privacy in One Run" (2024), Algorithm 3.
    """

    def excess(epsilon: float) -> float:
        mu = gaussian_mu(epsilon, delta) if epsilon > 0 else math.sqrt(8) * float(scipy.special.erfinv(delta))
        right, wrong = significance * correct / canaries, significance * (guesses - correct) / canaries
        for i in range(correct - 1, -1, -1):
            more = max(wrong, float(scipy.special.ndtr(scipy.special.ndtri(min(right, 1.0)) - mu)))
            if more == wrong:
                break  # neither number changes any more
            right = min(right + i / (guesses - i) * (more - wrong), 1.0)
            wrong = more
        return right + wrong - guesses / canaries

    return excess


def _largest_refuted(excess: Callable[[float], float], low: float) -> float:
    """Largest epsilon >= low whose excess is positive; `low` if there is none."""
    if excess(low) <= 0:
        return low
    high = max(1.0, 2 * low)
    while excess(high) > 0:
        low, high = high, 2 * high
        if high > 1e4:
            return low
    return float(scipy.optimize.brentq(excess, low, high, xtol=_XTOL))


# -- bounds from scores ------------------------------------------------------------------------------------------------


def epsilon_clopper_pearson(
    scores: Scores,
    delta: float,
    confidence: float = CONFIDENCE,
    *,
    rule: ThresholdRule | float = "split",
    two_sided: bool = False,
    seed: int | None = 0,
) -> float:
    """Lower bound on epsilon from many independent trials: max of ln((TPR - delta) / FPR) at Clopper-Pearson limits.

    Args:
        scores: of trials with and without the canary.
        delta: delta in [0, 1).
        confidence: in (0.5, 1).
        rule: how the threshold is chosen (see the module), or the threshold itself.
        two_sided: whether ln((TNR - delta) / FNR) counts, too.
        seed: of the split.

    Raises:
        ConfigError: an argument outside its range, or too few scores.

    Source: Jagielski, Ullman and Oprea, "Auditing Differentially Private Machine Learning" (NeurIPS 2020).

    Example:
        >>> rng = np.random.default_rng(0)
        >>> scores = Scores(rng.normal(1.0, size=4000), rng.normal(size=4000))
        >>> 0.8 < epsilon_clopper_pearson(scores, 1e-5) < 4.38  # a Gaussian release with mu = 1
        True
    """
    _check(delta, confidence)

    def at(part: Scores, significance: float, threshold: float | None) -> tuple[float, float]:
        if threshold is None:
            thresholds, rejected, missed = part.frontier()
        else:
            thresholds = np.array([threshold])
            missed = np.array([int(np.sum(part.inside < threshold))])
            rejected = np.array([int(np.sum(part.outside < threshold))])
        fnr = clopper_pearson_upper(missed, part.inside.size, significance / 2)
        fpr = clopper_pearson_upper(part.outside.size - rejected, part.outside.size, significance / 2)
        values = _rates(fnr, fpr, delta)
        if two_sided:
            values = np.maximum(values, _rates(fpr, fnr, delta))
        best = int(np.argmax(values))
        return max(0.0, float(values[best])), float(thresholds[best])

    return _at_rule(at, scores, 1 - confidence, rule, seed)


def epsilon_one_run(
    scores: Scores,
    delta: float,
    confidence: float = CONFIDENCE,
    *,
    rule: ThresholdRule | float = "split",
    seed: int | None = 0,
) -> float:
    """Lower bound on epsilon from one run: canaries that score at least the threshold are guessed to be in.

    Args:
        scores: of m canaries, each in by a fair coin of its own; a score is a function of the release alone.
        delta: delta in [0, 1).
        confidence: in (0.5, 1).
        rule: how the threshold is chosen (see the module), or the threshold itself.
        seed: of the split.

    Raises:
        ConfigError: an argument outside its range, or too few scores.

    Source: Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run" (NeurIPS 2023).
    """
    _check(delta, confidence)
    return _one_run(_one_run_excess, scores, delta, confidence, rule, seed)


def epsilon_one_run_fdp(
    scores: Scores,
    delta: float,
    confidence: float = CONFIDENCE,
    *,
    rule: ThresholdRule | float = "split",
    seed: int | None = 0,
) -> float:
    """Lower bound on epsilon from one run of a release that is Gaussian-DP; see `epsilon_one_run` for the arguments.

    Nearer to the truth than `epsilon_one_run`, which allows for every (epsilon, delta)-DP release. Releases sampled
    with a rate below 1 are not Gaussian-DP: for them it is no bound.

    Source: Mahloujifar, Melis and Chaudhuri, "Auditing f-Differential Privacy in One Run" (2024).
    """
    _check(delta, confidence)
    if delta == 0:
        raise ConfigError("delta must be positive: no Gaussian release has delta = 0")
    return _one_run(_fdp_excess, scores, delta, confidence, rule, seed)


def _one_run(
    family: Callable[[int, int, int, float, float], Callable[[float], float]],
    scores: Scores,
    delta: float,
    confidence: float,
    rule: ThresholdRule | float,
    seed: int | None,
) -> float:
    def at(part: Scores, significance: float, threshold: float | None) -> tuple[float, float]:
        if threshold is not None:
            right, wrong = int(np.sum(part.inside >= threshold)), int(np.sum(part.outside >= threshold))
            excess = family(part.count, right + wrong, right, significance, delta)
            return (_largest_refuted(excess, 0.0) if right + wrong else 0.0), threshold
        thresholds, rejected, missed = part.frontier()
        hits, slips = part.inside.size - missed, part.outside.size - rejected
        guesses = hits + slips
        # The most promising first: the others are then mostly ruled out at a glance.
        promise = 1 - clopper_pearson_upper(slips, guesses, significance)
        best, chosen, precision = 0.0, math.inf, 0.5
        for i in np.argsort(-promise):
            if guesses[i] == 0 or hits[i] / guesses[i] <= precision:
                continue
            found = _largest_refuted(family(part.count, int(guesses[i]), int(hits[i]), significance, delta), best)
            if found > best:
                best, chosen, precision = found, float(thresholds[i]), float(scipy.special.expit(found))
        return best, chosen

    return _at_rule(at, scores, 1 - confidence, rule, seed)


def epsilon_from_rates(scores: Scores, delta: float, confidence: float = CONFIDENCE) -> float:
    """Lower bound on epsilon from many trials of a Gaussian-DP release, by mu at each threshold's error rates.

    Args:
        scores: of independent trials with and without the canary.
        delta: delta in (0, 1).
        confidence: in (0.5, 1), shared among all thresholds of the frontier.

    Source: Nasr, Hayes, Steinke, Balle, Tramer, Jagielski, Carlini and Terzis, "Tight Auditing of Differentially
        Private Machine Learning" (USENIX Security 2023), Section 4. Error rates whose limits add up to more than 1
        count for nothing here; jax_privacy takes the absolute value of the mu that they would give.
    """
    _check(delta, confidence)
    _, rejected, missed = scores.frontier()
    level = (1 - confidence) / (2 * len(missed))
    fnr = clopper_pearson_upper(missed, scores.inside.size, level)
    fpr = clopper_pearson_upper(scores.outside.size - rejected, scores.outside.size, level)
    kept = np.maximum(fnr, fpr) < 1 - delta
    mu = float(np.max(scipy.stats.norm.isf(fpr[kept]) - scipy.stats.norm.ppf(fnr[kept]), initial=0.0))
    return gaussian_epsilon(mu, delta) if mu > 0 else 0.0


@dataclass(frozen=True)
class NoiseSeen:
    """What is known of the noise of canary-aligned sums besides the sums themselves.

    Attributes:
        degrees: degrees of freedom of its variance.
        variance: its variance over the planned one, where it was measured by itself; None: that of the sums.
        length: length of the sum of all planned contributions in units of the noise; None: as of orthogonal canaries.
    """

    degrees: float
    variance: float | None = None
    length: float | None = None

    @classmethod
    def of_layers(
        cls,
        energy: npt.NDArray[np.float64],
        weights: npt.NDArray[np.float64],
        sizes: npt.NDArray[np.int64],
        length: float | None = None,
    ) -> NoiseSeen:
        """Noise that was seen as a whole in T rounds: the variance of what a canary over several layers sees of it.

        The mean of chi-square variables with different weights is taken to have the chi-square law of the same mean
        and variance (Satterthwaite), whose lower tail is heavier: bounds err on the low side.

        Args:
            energy: mean square of the noise in each layer over the planned one, [T, K].
            weights: of each layer in a canary-aligned sum, whose squares add up to 1 in a round, [T, K]; a layer of
                weight 0 does not count.
            sizes: coordinates of the layers, [K].
            length: see `NoiseSeen`.

        Example:
            >>> seen = NoiseSeen.of_layers(np.ones((3, 2)), np.full((3, 2), 0.5**0.5), np.array([10, 10]))
            >>> round(seen.degrees, 9), round(seen.variance, 9)
            (60.0, 1.0)
        """
        shares = weights**2
        variance = float(np.sum(shares * np.where(shares > 0, energy, 0.0))) / len(shares)
        degrees = len(shares) ** 2 / float(np.sum(shares**2 / sizes))
        return cls(degrees, variance, length)


def noise_ratio(
    observed: Array, planned: Array, confidence: float = CONFIDENCE, noise: NoiseSeen | None = None
) -> float:
    """Lower bound on the true signal-to-noise ratio over the planned one, from one run of a Gaussian release.

    Observation i is ratio * planned_i + Gaussian noise of one common, unknown variance, which is part of what is
    tested; the planned signals are in units of the planned noise, so a release exactly as planned has the ratio 1. A
    release in which the ratio is r costs what the planned one with its noise divided by r costs.

    The least-squares slope over its standard error has a noncentral t law, which is inverted: exact for independent
    Gaussian noise, in all coordinates where it was seen as a whole.

    Args:
        observed: canary-aligned sums in units of the planned noise, [n].
        planned: signal of each by the plan, 0 for a canary that is out, [n].
        confidence: in (0.5, 1).
        noise: what else is known of the noise; by default the sums are taken to be independent.

    Returns:
        The bound, at least 0; `inf` where there is no noise at all.

    Raises:
        ConfigError: too few observations, or no canary that is in.

    Source: canary-aligned sums as Gaussian scores: Agrawal, Wei, Singh, Magdon-Ismail and Zikas, "Let's Ask Gauss:
        Improved One-Run Privacy Auditing" (2026). The paper's bound compares two fitted Gaussians; this one is exact in
        finite samples, and follows the sums to where they are exactly Gaussian, a round's release.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> planned = 0.5 * rng.integers(0, 2, 20_000)
        >>> 0.9 < noise_ratio(planned + rng.normal(size=20_000), planned) < 1.0
        True
    """
    _check(0.0, confidence)
    x, a = np.asarray(observed, dtype=np.float64), np.asarray(planned, dtype=np.float64)
    if x.shape != a.shape or x.ndim != 1:
        raise ConfigError(f"observed and planned must be lists of equal length, got {x.shape} and {a.shape}")
    signal = float(a @ a)
    noise = noise or NoiseSeen(len(x) - 1.0)
    freedom = noise.degrees if noise.variance is not None else min(noise.degrees, len(x) - 1.0)
    if signal == 0 or freedom < 1:
        raise ConfigError(f"too few canaries: {int(np.count_nonzero(a))} of {len(x)} observations have a signal")
    slope = float(a @ x) / signal
    variance = noise.variance
    if variance is None:
        variance = float(np.sum((x - slope * a) ** 2)) / (len(x) - 1)
    if variance <= 1e-12 * slope**2:
        return math.inf
    error = (math.sqrt(signal) if noise.length is None else noise.length) / signal  # of the slope, in planned noise
    return max(0.0, noncentral_t_lower(slope / (math.sqrt(variance) * error), freedom, confidence)) * error


def seen_degrees(overlap: Array, canaries: int) -> float:
    """Degrees of freedom of the noise variance that canaries see whose directions are not orthogonal.

    Args:
        overlap: mean square of the cosine of two canaries in each round, [T].
        canaries: number m of them.
    """
    return float(np.sum(1.0 / (1.0 / canaries + overlap))) - 1.0


def gaussian_shift(scores: Scores, confidence: float = CONFIDENCE) -> float:
    """Lower bound on mu, the distance of the means in standard deviations, of scores with Gaussian noise.

    The noise has one common, unknown variance in and out; two-sample t statistic, noncentral t law inverted. A release
    with such a mu has epsilon = `privacy.gaussian_epsilon(mu, delta)`.

    Args:
        scores: independent, with Gaussian noise.
        confidence: in (0.5, 1).

    Returns:
        The bound, at least 0; `inf` where there is no noise at all.
    """
    _check(0.0, confidence)
    n, k = scores.inside.size, scores.outside.size
    if min(n, k) < 2:
        raise ConfigError(f"too few scores: {n} in and {k} out")
    shift = float(scores.inside.mean() - scores.outside.mean())
    squares = float(np.sum((scores.inside - scores.inside.mean()) ** 2))
    squares += float(np.sum((scores.outside - scores.outside.mean()) ** 2))
    variance = squares / (n + k - 2)
    if variance <= 1e-12 * shift**2:
        return math.inf if shift > 0 else 0.0
    root = math.sqrt(1 / n + 1 / k)
    return max(0.0, noncentral_t_lower(shift / (math.sqrt(variance) * root), n + k - 2, confidence) * root)


def noncentral_t_lower(t: float, degrees: float, confidence: float) -> float:
    """Lower confidence limit of the noncentrality of an observed t statistic with that many degrees of freedom."""

    def excess(noncentrality: float) -> float:
        return float(scipy.stats.nct.sf(t, degrees, noncentrality)) - (1 - confidence)

    spread = math.sqrt(1 + t * t / (2 * degrees))
    guess = t + float(scipy.special.ndtri(1 - confidence)) * spread
    if degrees > 1e5 or abs(t) > 1e3:  # the normal approximation, as good as exact there
        return guess
    low, high = guess - 6 * spread, t
    while excess(low) > 0:
        low -= 6 * spread
    while excess(high) < 0:
        high += spread
    return float(scipy.optimize.brentq(excess, low, high, xtol=1e-10))


def epsilon_two_gaussians(mean: float, std: float, other_mean: float, other_std: float, delta: float) -> float:
    """Smallest epsilon for which two normal laws are (epsilon, delta)-indistinguishable in both directions.

    Args:
        mean: of the first law.
        std: its standard deviation, > 0.
        other_mean: of the second law.
        other_std: its standard deviation, > 0.
        delta: delta in (0, 1).

    Source: Andrew, Kairouz, Oh, Oprea, McMahan and Suriyakumar, "One-shot Empirical Privacy Estimation for Federated
        Learning" (ICLR 2024), Section 3.
    """
    _check(delta, CONFIDENCE)
    if not (std > 0 and other_std > 0):
        raise ConfigError(f"standard deviations must be positive, got {std} and {other_std}")
    forward, backward = (mean, std, other_mean, other_std), (other_mean, other_std, mean, std)

    def excess(epsilon: float) -> float:
        return max(_hockey_stick(epsilon, *forward), _hockey_stick(epsilon, *backward)) - delta

    if excess(0.0) <= 0:
        return 0.0
    high = 1.0
    while excess(high) > 0:
        high *= 2
        if high > 1e6:
            return math.inf
    return float(scipy.optimize.brentq(excess, 0.0, high, xtol=_XTOL))


def _hockey_stick(epsilon: float, m1: float, s1: float, m0: float, s0: float) -> float:
    """sup_A P(A) - e^epsilon Q(A) for P = N(m1, s1^2), Q = N(m0, s0^2): the set where p > e^epsilon q."""
    # ln p - ln q - epsilon = a x^2 + b x + c
    a = 0.5 / s0**2 - 0.5 / s1**2
    b = m1 / s1**2 - m0 / s0**2
    c = 0.5 * (m0 / s0) ** 2 - 0.5 * (m1 / s1) ** 2 + math.log(s0 / s1) - epsilon
    norm = scipy.stats.norm

    def mass(low: float, high: float) -> float:
        p = norm.cdf(high, m1, s1) - norm.cdf(low, m1, s1) if low < m1 else norm.sf(low, m1, s1) - norm.sf(high, m1, s1)
        log_q = norm.logsf(low, m0, s0) if high == math.inf else norm.logcdf(high, m0, s0)
        if low > -math.inf and high < math.inf:
            log_q = math.log(max(norm.cdf(high, m0, s0) - norm.cdf(low, m0, s0), 1e-300))
        return float(p - math.exp(min(epsilon + log_q, 700.0)))

    if abs(a) < 1e-12 * (abs(b) + 1e-300):
        if b == 0:
            return 0.0
        return max(0.0, mass(-c / b, math.inf) if b > 0 else mass(-math.inf, -c / b))
    discriminant = b * b - 4 * a * c
    if discriminant <= 0:
        return max(0.0, 1 - math.exp(min(epsilon, 700.0))) if a > 0 else 0.0
    low, high = sorted(((-b - math.sqrt(discriminant)) / (2 * a), (-b + math.sqrt(discriminant)) / (2 * a)))
    return max(0.0, mass(low, high) if a < 0 else mass(-math.inf, low) + mass(high, math.inf))


def epsilon_one_shot(statistics: Array, dimension: float, delta: float) -> float:
    """ESTIMATE of epsilon from canaries' cosines with a run's released updates; not a bound.

    Args:
        statistics: cosine of each canary that was in with the sum of the released updates, [k], k >= 2.
        dimension: d of the space; a canary that was out has cosines N(0, 1/d).
        delta: delta in (0, 1).

    Source: Andrew, Kairouz, Oh, Oprea, McMahan and Suriyakumar, "One-shot Empirical Privacy Estimation for Federated
        Learning" (ICLR 2024), Algorithm 2.
    """
    values = np.asarray(statistics, dtype=np.float64)
    if values.ndim != 1 or len(values) < 2:
        raise ConfigError(f"a one-shot estimate needs the cosines of at least 2 canaries, got {values.size}")
    spread = float(np.std(values, ddof=1))
    return epsilon_two_gaussians(float(values.mean()), spread, 0.0, 1 / math.sqrt(dimension), delta)


# -- how much can be shown at all --------------------------------------------------------------------------------------

Counting = Literal["clopper-pearson", "one-run", "one-run-fdp"]
_BOUNDS: dict[Counting, Callable[..., float]] = {
    "clopper-pearson": epsilon_clopper_pearson,
    "one-run": epsilon_one_run,
    "one-run-fdp": epsilon_one_run_fdp,
}


def largest_epsilon(method: Counting, canaries: int, delta: float, confidence: float = CONFIDENCE) -> float:
    """What `canaries` of them (half in, half out), told apart without an error, would show."""
    half = canaries // 2
    if half < 2:
        return 0.0
    return _BOUNDS[method](Scores(np.ones(half), np.zeros(half)), delta, confidence)


def canaries_needed(method: Counting, epsilon: float, delta: float, confidence: float = CONFIDENCE) -> int:
    """Fewest canaries (or trials), to a power of two, that could show more than `epsilon` if no guess were wrong.

    Raises:
        ConfigError: no number of canaries could.
    """
    count = 4
    while largest_epsilon(method, count, delta, confidence) <= epsilon:
        count *= 2
        if count > 2**24:
            raise ConfigError(
                f"{method} cannot show an epsilon of {epsilon:g} at delta = {delta:g}: use another method"
            )
    return count


def _at_rule(
    at: Callable[[Scores, float, float | None], tuple[float, float]],
    scores: Scores,
    significance: float,
    rule: ThresholdRule | float,
    seed: int | None,
) -> float:
    if rule == "frontier":
        return at(scores, significance / len(scores.frontier()[0]), None)[0]
    if rule == "split":
        choosing, evaluating = scores.split(seed)
        return at(evaluating, significance, at(choosing, significance, None)[1])[0]
    if isinstance(rule, str):
        raise ConfigError(f"unknown rule {rule!r}; known: split, frontier, or a threshold")
    return at(scores, significance, float(rule))[0]


def _check(delta: float, confidence: float) -> None:
    if not 0 <= delta < 1:
        raise ConfigError(f"delta must lie in [0, 1), got {delta}")
    if not 0.5 < confidence < 1:
        raise ConfigError(f"confidence must lie in (0.5, 1), got {confidence}")
