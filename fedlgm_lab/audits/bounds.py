"""Lower bounds on epsilon from counted guesses about canaries, as pure functions of the canaries'
scores.

A score is any number that tends to be higher for included canaries than for canaries that were left
out. Every bound holds with a probability of at least `confidence` over the canaries' fair coins and
the mechanism's noise. Neighbouring populations are those with and without one canary. The
assumptions are:

    epsilon_clopper_pearson   many independent trials; any (epsilon, delta)-DP release
    epsilon_one_run           one run; a fair coin per canary includes it or not; any
                              (epsilon, delta)-DP release

Scores with Gaussian noise allow tighter bounds; see `fedlgm_lab.audits.gaussian_scores`.

Each bound is evaluated at one threshold. By default the threshold is chosen on one half of the
scores, and the bound is evaluated on the other half.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Literal

import numpy as np
import numpy.typing as npt
import scipy.optimize
import scipy.special
import scipy.stats

from fedlgm.errors import ConfigError
from fedlgm_lab.audits.scores import CONFIDENCE, XTOL, Array, Scores, check

# -- bounds at one threshold -------------------------------------------------------------------------------------------


def clopper_pearson_upper(
    count: npt.ArrayLike, trials: npt.ArrayLike, significance: float
) -> Array:
    """Compute one-sided upper confidence limits of a binomial probability, after `count` successes
    in `trials` trials.

    Args:
        count: number of successes, in any shape.
        trials: number of trials, in a shape that broadcasts with the shape of `count`.
        significance: largest probability with which a limit lies below the true probability.

    Source: Clopper and Pearson, Biometrika 1934.

    Example:
        >>> round(float(clopper_pearson_upper(0, 100, 0.05)), 5)  # 1 - 0.05^(1/100)
        0.02951
    """
    count, trials = np.asarray(count), np.asarray(trials)
    with np.errstate(invalid="ignore"):
        upper = scipy.stats.beta.ppf(1 - significance, count + 1, np.maximum(trials - count, 1))
    return np.where(count < trials, upper, 1.0)


def _rates(missed: Array, false_alarms: Array, delta: float) -> Array:
    """Compute ln((TPR - delta) / FPR) from upper limits of FNR and FPR; -inf where TPR <= delta."""
    gain = 1 - missed - delta
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(gain > 0, np.log(np.maximum(gain, 1e-300)) - np.log(false_alarms), -np.inf)


def one_run_p_value(
    canaries: int, guesses: int, correct: int, epsilon: float, delta: float
) -> float:
    """Bound from above the probability of at least `correct` correct guesses under (epsilon,
    delta)-DP.

    Args:
        canaries: number m of canaries; for each canary, a separate fair coin decides whether it is
            included.
        guesses: number r <= m of canaries for which a guess is made.
        correct: number v of correct guesses.
        epsilon: epsilon >= 0 under which the probability is bounded.
        delta: delta under which the probability is bounded.

    Source: Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run" (NeurIPS
        2023), Theorem 5.2.

    Example:
        >>> round(one_run_p_value(canaries=10, guesses=10, correct=10, epsilon=0.0, delta=0.0), 6)  # ten fair coins
        0.000977
    """
    right = float(scipy.special.expit(epsilon))
    tail = float(scipy.stats.binom.sf(correct - 1, guesses, right))
    if delta == 0 or correct == 0:
        return tail
    steps = np.arange(1, correct + 1)
    slope = np.max(
        (scipy.stats.binom.sf(correct - steps - 1, guesses, right) - tail) / steps, initial=0.0
    )
    return min(1.0, tail + float(slope) * delta * 2 * canaries)


def _largest_refuted(excess: Callable[[float], float], low: float) -> float:
    """Find the epsilon >= low at which the excess, a decreasing function, falls to 0; `low` if the
    excess is not positive at `low`.
    """
    if excess(low) <= 0:
        return low
    high = max(1.0, 2 * low)
    while excess(high) > 0:
        low, high = high, 2 * high
        if high > 1e4:
            return low
    return float(scipy.optimize.brentq(excess, low, high, xtol=XTOL))


# -- bounds from scores ------------------------------------------------------------------------------------------------


def epsilon_clopper_pearson(
    scores: Scores,
    delta: float,
    confidence: float = CONFIDENCE,
    *,
    threshold: float | None = None,
    seed: int | None = 0,
) -> float:
    """Compute a lower bound on epsilon from many independent trials.

    The bound is the larger of ln((TPR - delta) / FPR) and ln((TNR - delta) / FNR), with the error
    rates at their Clopper-Pearson limits.

    Args:
        scores: scores of trials with and without the canary.
        delta: delta in [0, 1).
        confidence: in (0.5, 1).
        threshold: threshold at which the bound is evaluated; None chooses it on one half of the
            scores and evaluates the bound on the other half.
        seed: seed of the split.

    Raises:
        ConfigError: an argument is outside its range, or there are too few scores.

    Source: Jagielski, Ullman and Oprea, "Auditing Differentially Private Machine Learning" (NeurIPS
        2020).

    Example:
        >>> rng = np.random.default_rng(0)
        >>> scores = Scores(rng.normal(1.0, size=4000), rng.normal(size=4000))
        >>> 0.8 < epsilon_clopper_pearson(scores, 1e-5) < 4.38  # a Gaussian release with mu = 1
        True
    """
    check(delta, confidence)
    return _at(partial(_best, delta=delta), scores, 1 - confidence, threshold, seed)


def best_threshold(scores: Scores, delta: float, confidence: float) -> float:
    """Find the threshold that gives the largest bound on these scores.

    The caller then evaluates the threshold on other scores.
    """
    return _best(scores, 1 - confidence, None, delta)[1]


def _best(
    part: Scores, significance: float, threshold: float | None, delta: float
) -> tuple[float, float]:
    """Compute a bound and its threshold: the largest bound over the frontier's thresholds, or the
    bound at the given threshold.
    """
    if threshold is None:
        thresholds, rejected, missed = part.frontier()
    else:
        thresholds = np.array([threshold])
        missed = np.array([int(np.sum(part.inside < threshold))])
        rejected = np.array([int(np.sum(part.outside < threshold))])
    fnr = clopper_pearson_upper(missed, part.inside.size, significance / 2)
    fpr = clopper_pearson_upper(part.outside.size - rejected, part.outside.size, significance / 2)
    values = np.maximum(_rates(fnr, fpr, delta), _rates(fpr, fnr, delta))
    best = int(np.argmax(values))
    return max(0.0, float(values[best])), float(thresholds[best])


def epsilon_one_run(
    scores: Scores,
    delta: float,
    confidence: float = CONFIDENCE,
    *,
    threshold: float | None = None,
    seed: int | None = 0,
) -> float:
    """Compute a lower bound on epsilon from one run, by guessing that the canaries whose score is
    at least the threshold were included.

    Args:
        scores: scores of m canaries. For each canary, a separate fair coin decides whether it is
            included. A canary's score depends only on the release.
        delta: delta in [0, 1).
        confidence: in (0.5, 1).
        threshold: threshold at which the bound is evaluated; None chooses it on one half of the
            scores and evaluates the bound on the other half.
        seed: seed of the split.

    Raises:
        ConfigError: an argument is outside its range, or there are too few scores.

    Source: Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run" (NeurIPS
        2023).

    Example:
        >>> told_apart = Scores(np.ones(50), np.zeros(50))
        >>> shown = epsilon_one_run(told_apart, delta=0.0, threshold=0.5)  # 50 guesses, all of them right
        >>> round((1 + math.exp(-shown)) ** -50, 6)  # as likely as the confidence allows
        0.001
    """
    check(delta, confidence)

    def lower_bound(
        part: Scores, guesses: int, correct: int, significance: float, low: float
    ) -> float:
        return _largest_refuted(
            lambda epsilon: (
                significance - one_run_p_value(part.count, guesses, correct, epsilon, delta)
            ),
            low,
        )

    def at(part: Scores, significance: float, threshold: float | None) -> tuple[float, float]:
        if threshold is not None:
            right, wrong = (
                int(np.sum(part.inside >= threshold)),
                int(np.sum(part.outside >= threshold)),
            )
            return (
                lower_bound(part, right + wrong, right, significance, 0.0) if right + wrong else 0.0
            ), threshold
        thresholds, rejected, missed = part.frontier()
        hits, slips = part.inside.size - missed, part.outside.size - rejected
        guesses = hits + slips
        # The most promising thresholds come first. Most of the other thresholds can then be ruled
        # out quickly.
        promise = 1 - clopper_pearson_upper(slips, guesses, significance)
        best, chosen, precision = 0.0, math.inf, 0.5
        for i in np.argsort(-promise):
            if guesses[i] == 0 or hits[i] / guesses[i] <= precision:
                continue
            bound = lower_bound(part, int(guesses[i]), int(hits[i]), significance, best)
            if bound > best:
                best, chosen, precision = (
                    bound,
                    float(thresholds[i]),
                    float(scipy.special.expit(bound)),
                )
        return best, chosen

    return _at(at, scores, 1 - confidence, threshold, seed)


# -- how much can be shown at all --------------------------------------------------------------------------------------

Counting = Literal["clopper-pearson", "one-run"]
_BOUNDS: dict[Counting, Callable[..., float]] = {
    "clopper-pearson": epsilon_clopper_pearson,
    "one-run": epsilon_one_run,
}


def largest_epsilon(
    method: Counting, canaries: int, delta: float, confidence: float = CONFIDENCE
) -> float:
    """Compute the bound on epsilon that follows if every guess about `canaries` canaries (of which
    half are included) is correct.

    Args:
        method: bound to use: "clopper-pearson" or "one-run".
        canaries: number of canaries, or of trials.
        delta: delta of the bound.
        confidence: in (0.5, 1).

    Example:
        >>> largest_epsilon("one-run", 100, delta=0.0) < largest_epsilon("one-run", 1000, delta=0.0)
        True
    """
    half = canaries // 2
    if half < 2:
        return 0.0
    return _BOUNDS[method](Scores(np.ones(half), np.zeros(half)), delta, confidence)


def canaries_needed(
    method: Counting, epsilon: float, delta: float, confidence: float = CONFIDENCE
) -> int:
    """Find the least number of canaries (or trials), among the powers of two from 4 on, that would
    show more than `epsilon` if every guess were correct.

    The arguments are those of `largest_epsilon`.

    Raises:
        ConfigError: 2**24 canaries could not show more than `epsilon`.

    Example:
        >>> canaries_needed("one-run", epsilon=2.0, delta=1e-5)
        256
    """
    count = 4
    while largest_epsilon(method, count, delta, confidence) <= epsilon:
        count *= 2
        if count > 2**24:
            raise ConfigError(
                f"{method} cannot prove an epsilon of {epsilon:g} at delta = {delta:g}: use "
                "another method"
            )
    return count


def _at(
    at: Callable[[Scores, float, float | None], tuple[float, float]],
    scores: Scores,
    significance: float,
    threshold: float | None,
    seed: int | None,
) -> float:
    if threshold is not None:
        return at(scores, significance, threshold)[0]
    choosing, evaluating = scores.split(seed)
    return at(evaluating, significance, at(choosing, significance, None)[1])[0]
