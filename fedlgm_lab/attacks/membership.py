"""Measures of how well scores separate members from non-members: AUC, and true-positive rates at
low false-positive rates.

An average over all members hides the relevant figure: an attack that is sure of only a few members
has an AUC near one half and still breaks these members' privacy (Carlini et al., S&P 2022, Section
III). The AUC and the true-positive rates come with intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from scipy.stats import binomtest, norm, rankdata
from sklearn.metrics import roc_curve

from fedlgm.errors import ConfigError
from fedlgm.training.tasks.ranked import auc

FPRS = (0.001, 0.01, 0.1)
"""False-positive rates at which true-positive rates are reported by default."""
_LEAST = 2


@dataclass(frozen=True)
class Rate:
    """True-positive rate at a false-positive rate.

    Attributes:
        fpr: the requested false-positive rate.
        tpr: share of members whose score lies above the threshold.
        low: lower end of the Clopper-Pearson interval of `tpr` at the threshold.
        high: upper end of the same interval.
        fpr_high: upper end of the Clopper-Pearson interval of the false-positive rate at the
            threshold. This end is far above `fpr` if there are too few non-members: n non-members
            resolve no rate below 1 / n.
    """

    fpr: float
    tpr: float
    low: float
    high: float
    fpr_high: float


@dataclass(frozen=True)
class MembershipResult:
    """How well one attack separates members from non-members.

    Attributes:
        members: number of members.
        nonmembers: number of non-members.
        auc: probability that a member scores higher than a non-member; ties count half.
        auc_low: lower end of the interval of `auc`.
        auc_high: upper end of the interval of `auc`.
        rates: true-positive rates at low false-positive rates.
        accuracy: largest mean of the true-positive and true-negative rates over all thresholds. The
            threshold is the best in hindsight, so this mean can exceed one half by chance.
        confidence: confidence of every interval.
        roc: false-positive rates and true-positive rates at every threshold, for pictures, each
            [points].
    """

    members: int
    nonmembers: int
    auc: float
    auc_low: float
    auc_high: float
    rates: tuple[Rate, ...]
    accuracy: float
    confidence: float
    roc: tuple[np.ndarray, np.ndarray] = field(repr=False, compare=False)

    def to_dict(self) -> dict[str, Any]:
        """Convert the result to values that JSON can hold, without the curve."""
        return {name: value for name, value in asdict(self).items() if name != "roc"}


def evaluate_scores(
    members: np.ndarray,
    nonmembers: np.ndarray,
    *,
    fprs: Sequence[float] = FPRS,
    confidence: float = 0.95,
) -> MembershipResult:
    """Compute the figures of an attack from its scores; a higher score means "member".

    The interval of the AUC is DeLong's (Biometrics, 1988) on the logit scale. If every member
    scores above every non-member, or every member below every non-member, the interval is instead
    Clopper and Pearson's. The number of trials is then the size of the smaller set. All trials are
    successes in the first case, and failures in the second.

    Args:
        members: scores of members, [n].
        nonmembers: scores of non-members, [m].
        fprs: false-positive rates to report.
        confidence: confidence of the intervals, two-sided.

    Raises:
        ConfigError: there are fewer than two members or non-members, a score is NaN, or a rate lies
            outside (0, 1).

    Example:
        >>> result = evaluate_scores(np.array([3.0, 2.0, 1.0, 0.5]), np.array([1.5, 0.0, -1.0, -2.0]), fprs=(0.25,))
        >>> result.auc, result.rates[0].tpr
        (0.875, 1.0)
    """
    high, low = (
        np.asarray(members, dtype=np.float64).ravel(),
        np.asarray(nonmembers, dtype=np.float64).ravel(),
    )
    if min(len(high), len(low)) < _LEAST:
        raise ConfigError(
            f"a membership attack needs at least {_LEAST} members and as many non-members, got "
            f"{len(high)} and {len(low)}"
        )
    if np.isnan(high).any() or np.isnan(low).any():
        raise ConfigError(
            "membership scores must not be NaN: the attacked model's outputs are not finite"
        )
    if not 0 < confidence < 1 or any(not 0 < fpr < 1 for fpr in fprs):
        raise ConfigError(
            f"confidence and false-positive rates must lie in (0, 1), got {confidence} and "
            f"{list(fprs)}"
        )
    # Ranks, because scores may be infinite.
    ranks, member = rankdata(np.concatenate([high, low])), np.repeat([1, 0], [len(high), len(low)])
    area = auc(ranks, member, float(norm.ppf((1 + confidence) / 2)))
    ends = area.low, area.high
    if area.value in (0.0, 1.0):
        small = min(len(high), len(low))
        ends = clopper_pearson(round(area.value * small), small, confidence)
    fpr, tpr, _ = roc_curve(member, ranks, drop_intermediate=False)
    return MembershipResult(
        members=len(high),
        nonmembers=len(low),
        auc=area.value,
        auc_low=ends[0],
        auc_high=ends[1],
        rates=tuple(_rate(high, low, fpr, confidence) for fpr in fprs),
        accuracy=float((1 + tpr - fpr).max() / 2),
        confidence=confidence,
        roc=(fpr, tpr),
    )


def clopper_pearson(successes: int, trials: int, confidence: float = 0.95) -> tuple[float, float]:
    """Compute the exact two-sided interval of a binomial proportion.

    Source: Clopper and Pearson, Biometrika, 1934.

    Example:
        >>> low, high = clopper_pearson(0, 10_000)
        >>> low, round(high, 8)
        (0.0, 0.00036882)
    """
    ends = binomtest(successes, trials).proportion_ci(confidence)
    return float(ends.low), float(ends.high)


def _rate(high: np.ndarray, low: np.ndarray, fpr: float, confidence: float) -> Rate:
    allowed = int(np.floor(fpr * len(low) + 1e-9))
    threshold = np.sort(low)[::-1][allowed]  # at most `allowed` non-members score above it
    caught, wrong = int((high > threshold).sum()), int((low > threshold).sum())
    ends = clopper_pearson(caught, len(high), confidence)
    return Rate(fpr, caught / len(high), *ends, clopper_pearson(wrong, len(low), confidence)[1])
