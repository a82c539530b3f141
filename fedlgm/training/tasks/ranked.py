"""The task of ranking examples with binary targets: the area under the ROC curve (AUC) and its
confidence interval.

Source: DeLong, DeLong and Clarke-Pearson, Biometrics 44 (1988): the variance of an AUC, computed
from each row's share of lower scores in the other class.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from torch import Tensor
from typing_extensions import override

from fedlgm.errors import ConfigError, DataError
from fedlgm.training.tasks.binary import Binary
from fedlgm.training.tasks.set_metrics import Metric


class AUC(NamedTuple):
    """An AUC and the ends of its confidence interval, which `auc` computes. All values are NaN if
    the targets have only one class or a score is not finite.

    Example:
        >>> AUC(0.9, 0.8, 0.95).low
        0.8
    """

    value: float
    low: float
    high: float


def auc(scores: np.ndarray, targets: np.ndarray, width: float = 1.96) -> AUC:
    """Estimate the probability that a row of class 1 has a higher score than a row of class 0, with
    a confidence interval (95 % by default). Ties count as half.

    The interval is normal on the logit scale, so it stays within [0, 1]. If the scores separate the
    classes, the AUC is 1 or 0 and the estimated variance is 0. The interval then reaches from the
    AUC to 1 - 3 / m or 3 / m, where m is the size of the smaller class (the rule of three).

    Args:
        scores: [n].
        targets: 0 or 1, [n].
        width: half of the interval's width, in standard errors.

    Raises:
        ConfigError: scores and targets are not one-dimensional arrays of equal length.

    Example:
        >>> found = auc(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0, 0, 1, 1]))
        >>> found.value, round(found.low, 2), round(found.high, 2)
        (0.75, 0.07, 0.99)
    """
    from scipy import stats  # imported here, because workers do not need it

    if scores.ndim != 1 or scores.shape != targets.shape:
        raise ConfigError(
            f"auc takes one score and one target per row, got shapes {scores.shape} and "
            f"{targets.shape}"
        )
    ones, zeros = scores[targets == 1], scores[targets == 0]
    if not (len(ones) and len(zeros)) or not np.isfinite(scores).all():
        return AUC(math.nan, math.nan, math.nan)
    both = stats.rankdata(np.concatenate([ones, zeros]))
    above = (both[: len(ones)] - stats.rankdata(ones)) / len(zeros)  # share of zeros below each one
    below = 1 - (both[len(ones) :] - stats.rankdata(zeros)) / len(ones)
    value = float(above.mean())
    variance = sum(float(part.var(ddof=1)) / len(part) for part in (above, below) if len(part) > 1)
    if value in (0.0, 1.0):
        reach = min(1.0, 3 / min(len(ones), len(zeros)))
        return AUC(value, max(0.0, value - reach), min(1.0, value + reach))
    middle, reach = (
        math.log(value / (1 - value)),
        width * math.sqrt(variance) / (value * (1 - value)),
    )
    low, high = (float(stats.logistic.cdf(middle + side * reach)) for side in (-1, 1))
    return AUC(value, low, high)


class Ranked(Binary):
    """`Binary` with one label per example [n], which also reports the AUC with its 95 % confidence
    interval (`auc_low`, `auc_high`).
    """

    name = "ranked"
    headline = "auc"

    @override
    def targets(self, y: np.ndarray, part: str) -> np.ndarray:
        real = super().targets(y, part)
        if math.prod(real.shape[1:]) != 1:
            raise DataError(
                f"task 'ranked' needs one label per example, but the {part} targets have shape "
                f"{real.shape}"
            )
        if part == "test" and np.unique(real).size < 2:
            raise DataError(
                "task 'ranked' needs test targets of both classes, 0 and 1: there is no AUC of one "
                "class"
            )
        return real

    @override
    def set_metrics(self) -> Mapping[str, Metric]:
        def part(index: int) -> Metric:
            return lambda outputs, targets: auc(_flat(outputs), _flat(targets))[index]

        return {"auc": part(0), "auc_low": part(1), "auc_high": part(2)}


def _flat(values: Tensor) -> np.ndarray:
    return values.detach().cpu().double().numpy().ravel()
