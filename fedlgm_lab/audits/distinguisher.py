"""Distinguishers with many trials: they release each of two neighbouring populations repeatedly and
guess from which population a release comes.

`audit_mechanism_by_trials` knows the plans and scores a release by its exact log-likelihood ratio.
`audit_release` knows nothing about the release: it takes any function, from this library or
elsewhere, that releases one of two neighbouring inputs. It learns to distinguish the two inputs
from half of the trials and counts its errors in the other half.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedlgm import privacy
from fedlgm.checks import check_count
from fedlgm.errors import ConfigError, Notice
from fedlgm.noise.draws import Family
from fedlgm.noise.keys import KeyRing
from fedlgm_lab.audits import bounds
from fedlgm_lab.audits.gaussian_scores import gaussian_shift
from fedlgm_lab.audits.result import AuditResult
from fedlgm_lab.audits.scores import CONFIDENCE, Array, Scores
from fedlgm_lab.audits.subject import Subject, World

Release = Callable[[int, np.random.Generator], npt.ArrayLike]
"""(0 or 1: which of two neighbouring inputs, source of randomness) -> released numbers, [n]."""
OnTrial = Callable[[int, int], None]
TRIALS = 4000
_CERTAIN = 1e6  # log-likelihood ratio of a vector that only one population can release
_PER_COORDINATE = 16  # least number of trials per released number, to estimate a covariance


# -- mechanisms --------------------------------------------------------------------------------------------------------


def audit_mechanism_by_trials(
    subject: Subject,
    *,
    trials: int = TRIALS,
    confidence: float = CONFIDENCE,
    seed: int | None = None,
    on_trial: OnTrial | None = None,
) -> AuditResult:
    """Audit one release of a mechanism, in which every client takes part, on the pair of
    neighbouring populations that is easiest to distinguish.

    Args:
        subject: what to audit.
        trials: releases of each of the two populations.
        confidence: confidence of the Clopper-Pearson bound.
        seed: seed of the noise and of the split into halves; None draws both from the operating
            system.
        on_trial: called with (trials done, all trials).

    Raises:
        ConfigError: there are too few trials for any bound at this confidence.
    """
    check_trials(trials, subject.delta, confidence)
    later = subject.start if subject.private_plan else subject.later()
    first, second = max(subject.neighbours(later), key=lambda pair: divergence(*pair))
    keys = KeyRing.from_seed(seed).derive(b"distinguisher")
    ratios: tuple[list[float], list[float]] = ([], [])
    for trial in range(trials):
        for world, values, number in ((first, ratios[0], 0), (second, ratios[1], 1)):
            noisy = world.release(
                keys.derive(number.to_bytes(1, "little"), trial.to_bytes(4, "little"))
            )
            values.append(log_likelihood_ratio(noisy.double().numpy(), first, second))
        if on_trial is not None:
            on_trial(trial + 1, trials)
    scores = Scores(np.array(ratios[0]), np.array(ratios[1]))
    lower = bounds.epsilon_clopper_pearson(scores, subject.delta, confidence, seed=seed)
    return AuditResult(
        subject=f"one release of {subject.name}",
        method="distinguisher",
        epsilon_lower=lower,
        epsilon_reported=subject.reported_epsilon(first.plan, whole=False),
        delta=subject.delta,
        confidence=confidence,
        guarantee=first.plan.guarantee.sentence(noise_reproducible=False),
        observations=2 * trials,
        scores=vars(scores),
    )


def log_likelihood_ratio(noisy: Array, one: World, other: World) -> float:
    """Compute the logarithm of a release's likelihood under `one` over its likelihood under
    `other`.

    The result is clipped to ±1e6, which is also its value if only one of the two populations can
    have made the release.
    """
    if one.plan.size != other.plan.size:
        return _CERTAIN if len(noisy) == one.plan.size else -_CERTAIN
    ratio = _log_density(noisy, one) - _log_density(noisy, other)
    return float(np.clip(ratio, -_CERTAIN, _CERTAIN)) if not math.isnan(ratio) else 0.0


def divergence(one: World, other: World) -> float:
    """Compute the Kullback-Leibler divergence of the releases of two neighbours as if all noise
    were Gaussian.
    """
    if one.plan.size != other.plan.size:
        return math.inf
    a, b = one.plan.scales, other.plan.scales
    gap = (one.total - other.total).double().numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        # KL(N(m1, a^2) || N(m2, b^2)) of each coordinate.
        terms = np.log(b / a) + (a**2 + gap**2) / (2 * b**2) - 0.5
        terms = np.where((a == 0) & (b == 0), np.where(gap == 0, 0.0, np.inf), terms)
    return float(np.sum(terms))


def _log_density(noisy: Array, world: World) -> float:
    scale, gap = world.plan.scales, noisy - world.total.double().numpy()
    free = scale == 0
    if free.any() and np.abs(gap[free]).max() > 0:
        return -math.inf
    gap, scale = gap[~free], scale[~free]
    if world.plan.family == "laplace":
        return float(-np.sum(np.abs(gap) / scale + np.log(scale)))
    return float(-np.sum(0.5 * (gap / scale) ** 2 + np.log(scale)))


# -- anything that releases --------------------------------------------------------------------------------------------


def audit_release(
    release: Release,
    epsilon: float,
    delta: float,
    *,
    noise: Family | Literal["unknown"] = "unknown",
    trials: int = TRIALS,
    confidence: float = CONFIDENCE,
    seed: int | None = None,
    name: str = "release",
    on_trial: OnTrial | None = None,
) -> AuditResult:
    """Audit any release, from your own code or another framework, by its outputs alone.

    Args:
        release: called with 0 or 1 (which of two neighbouring inputs) and a source of randomness,
            which it need not use. It returns the released vector, always of the same length
            (several rounds are concatenated).
        epsilon: the reported epsilon of the release, for these neighbours.
        delta: delta of the reported epsilon.
        noise: "gaussian" if the release is known to be linear with Gaussian noise. The audit then
            estimates the distance between the two distributions, which can show an epsilon of any
            size. Otherwise the audit counts errors, which can show an epsilon of at most about
            ln(trials); a notice warns if a larger epsilon is reported.
        trials: releases of each input.
        confidence: confidence of the bound.
        seed: seed of the randomness given to `release` and of the split.
        name: name of the release in reports.
        on_trial: called with (trials done, all trials).

    Raises:
        ConfigError: there are too few trials, or releases have different lengths.

    Example:
        >>> def release(world, rng):  # a sum of sensitivity 1 with half the noise that epsilon = 1 needs
        ...     return [world + rng.normal(scale=1.87)]
        >>> audit_release(release, epsilon=1.0, delta=1e-5, noise="gaussian", seed=0).passed
        False
    """
    check_trials(trials, delta, confidence)
    if not epsilon >= 0:
        raise ConfigError(f"epsilon must be at least 0, got {epsilon}")
    rng = np.random.default_rng(seed)
    rows: tuple[list[Array], list[Array]] = ([], [])
    for trial in range(trials):
        for world in (0, 1):
            rows[world].append(np.ravel(np.asarray(release(world, rng), dtype=np.float64)))
        if on_trial is not None:
            on_trial(trial + 1, trials)
    if len({len(row) for part in rows for row in part}) != 1:
        raise ConfigError("releases differ in length: pad numbers that are not released with zeros")
    without, with_ = (np.stack(part) for part in rows)
    cut = trials // 2
    learned = Discriminant.fit(without[:cut], with_[:cut], linear=noise == "gaussian")
    scores = Scores(learned(with_[cut:]), learned(without[cut:]))
    if noise == "gaussian":
        mu = gaussian_shift(scores, confidence)
        lower = privacy.gaussian_epsilon(mu, delta) if mu > 0 else 0.0
    else:
        chosen = Scores(learned(with_[:cut]), learned(without[:cut]))
        lower = bounds.epsilon_clopper_pearson(
            scores, delta, confidence, threshold=bounds.best_threshold(chosen, delta, confidence)
        )
        apart = Scores(np.ones(trials - cut), np.zeros(trials - cut))
        most = bounds.epsilon_clopper_pearson(apart, delta, confidence, threshold=0.5)
        if lower <= epsilon:
            _warn_of_reach(trials, most, epsilon, without, with_)
    return AuditResult(
        name,
        "distinguisher",
        lower,
        epsilon,
        delta,
        confidence,
        observations=2 * trials,
        scores=vars(scores),
    )


def _warn_of_reach(trials: int, most: float, epsilon: float, without: Array, with_: Array) -> None:
    """Warn that an audit would pass with any noise, or that it passes although some numbers have no
    noise.
    """
    cannot_fail = (
        f"{trials} trials of each input show an epsilon of at most {most:.3g} if the noise is "
        f"unknown, and {epsilon:g} is reported: the audit cannot fail; raise trials, or pass "
        "noise='gaussian' if the release is linear"
    )
    text = [cannot_fail] if most < epsilon else []
    bare = np.flatnonzero(
        (np.ptp(without, axis=0) == 0) & (np.ptp(with_, axis=0) == 0) & (without[0] != with_[0])
    )
    if len(bare):
        numbers = (
            f"{len(bare)} of {without.shape[1]} numbers have no noise, the first at index {bare[0]}"
        )
        text.append(f"The inputs differ in numbers without noise: {numbers}")
    if text:
        warnings.warn(Notice(". ".join(text)), stacklevel=3)


@dataclass(frozen=True)
class Discriminant:
    """A linear discriminant on features of a release.

    The features are the released numbers themselves if there are at least 16 trials for each
    number. Otherwise one feature replaces them, the projection of the numbers on the difference of
    the two means, each number divided by its variance, so that a number without noise outweighs all
    other numbers. Correlations between numbers are then not learnt. Unless the discriminant has to
    be linear, features of the noise scales are added: the log-likelihood ratio of the numbers' own
    variances, and the logarithm of the mean square of all deviations.

    Attributes:
        direction: direction of the projection, [n]; None if the numbers themselves are the
            features.
        centre: midway between the two means, [n].
        precision: half the difference of the numbers' precisions without and with the target, [n];
            None for a linear discriminant.
        weights: weights of the features.
    """

    direction: Array | None
    centre: Array
    precision: Array | None
    weights: Array

    @classmethod
    def fit(cls, without: Array, with_: Array, linear: bool) -> Discriminant:
        """Fit a discriminant to releases without and with the target, [trials, n] each."""
        size = without.shape[1]
        centre = (without.mean(axis=0) + with_.mean(axis=0)) / 2
        direction = None
        spreads = [_variances(part) for part in (without, with_)]
        if size * _PER_COORDINATE > 2 * len(without):
            direction = (with_.mean(axis=0) - without.mean(axis=0)) / sum(spreads)
            direction = direction / max(float(np.linalg.norm(direction)), 1e-300)
        draft = cls(
            direction,
            centre,
            None if linear else (1 / spreads[0] - 1 / spreads[1]) / 2,
            np.zeros(0),
        )
        a, b = draft._features(without), draft._features(with_)
        pooled = np.atleast_2d(
            np.cov(np.concatenate([a - a.mean(axis=0), b - b.mean(axis=0)]), rowvar=False)
        )
        values, vectors = np.linalg.eigh(pooled)
        values = np.maximum(values, 1e-14 * max(float(values.max()), 1e-300))
        weights = vectors @ ((vectors.T @ (b.mean(axis=0) - a.mean(axis=0))) / values)
        return cls(direction, centre, draft.precision, weights)

    def __call__(self, released: Array) -> Array:
        """Score releases [trials, n]; scores tend to be higher with the target."""
        return self._features(released) @ self.weights

    def _features(self, released: Array) -> Array:
        moved = released - self.centre
        columns = [moved if self.direction is None else (moved @ self.direction)[:, None]]
        if self.precision is not None:
            squares = moved**2
            columns.append((squares @ self.precision)[:, None])
            columns.append(np.log(np.maximum(np.mean(squares, axis=1), 1e-300))[:, None])
        return np.concatenate(columns, axis=1)


def _variances(rows: Array) -> Array:
    """Compute each number's variance over the trials, [n]; at least 1e-14 of the largest."""
    variances = rows.var(axis=0)
    return np.maximum(variances, 1e-14 * max(float(variances.max()), 1e-300))


def check_trials(trials: int, delta: float, confidence: float) -> None:
    """Refuse a number of trials that is too small for any bound.

    Raises:
        ConfigError: the message gives the required number.
    """
    check_count("trials", trials)
    if trials < 2 or bounds.largest_epsilon("clopper-pearson", 2 * trials, delta, confidence) <= 0:
        needed = bounds.canaries_needed("clopper-pearson", 0.0, delta, confidence) // 2
        raise ConfigError(
            f"{trials} trials are too few for a confidence of {confidence:g}: at least {needed} "
            "are needed to show anything"
        )
