"""Composite objectives (1/N) sum_n loss(x_n . theta, y_n) + psi(theta) with a separable regulariser
psi.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt
from scipy.special import expit

from fedlgm.errors import ConfigError

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Lasso:
    """Least squares, loss (margin - y)^2 / 2, with psi = strength * ||theta||_1.

    Attributes:
        strength: weight of the l1 norm, >= 0 (scikit-learn's `Lasso(alpha=strength)`).
        curvature: largest second derivative of the loss in the margin, so that the smoothness
            constant of coordinate i is curvature * mean(x_i^2).
    """

    strength: float
    curvature: ClassVar[float] = 1.0

    def __post_init__(self) -> None:
        _check_strength(self.strength)

    def value(self, theta: Array, features: Array, targets: Array) -> float:
        """Compute the objective at theta, shape [K], on features [N, K] and targets [N]."""
        return float(
            ((features @ theta - targets) ** 2).mean() / 2 + self.strength * np.abs(theta).sum()
        )

    def margin_gradient(self, margins: Array, targets: Array) -> Array:
        """Compute the derivative of each row's loss in its margin x_n . theta, shape [N], which is
        the residual.
        """
        return margins - targets

    def prox(self, value: float, step: float) -> float:
        """Compute argmin_w (w - value)^2 / 2 + step * psi_i(w), which is soft thresholding."""
        return math.copysign(max(abs(value) - step * self.strength, 0.0), value)


@dataclass(frozen=True)
class Logistic:
    """Logistic regression, loss log(1 + exp(-y margin)) with labels -1 and 1, psi = strength / 2 *
    ||theta||_2^2.

    Attributes:
        strength: weight of the squared l2 norm, >= 0 (scikit-learn's
            `LogisticRegression(C=1 / (N * strength))`).
    """

    strength: float
    curvature: ClassVar[float] = 0.25

    def __post_init__(self) -> None:
        _check_strength(self.strength)

    def value(self, theta: Array, features: Array, targets: Array) -> float:
        """Compute the objective at theta, as for `Lasso`."""
        losses = np.logaddexp(0.0, -targets * (features @ theta))
        return float(losses.mean() + self.strength / 2 * (theta @ theta))

    def margin_gradient(self, margins: Array, targets: Array) -> Array:
        """Compute the derivative of each row's loss in its margin: minus the label times the
        probability of the other label.
        """
        return np.asarray(-targets * expit(-targets * margins))

    def prox(self, value: float, step: float) -> float:
        """Compute argmin_w (w - value)^2 / 2 + step * psi_i(w), which shrinks the value."""
        return value / (1 + step * self.strength)


Objective = Lasso | Logistic


def _check_strength(strength: float) -> None:
    if not (math.isfinite(strength) and strength >= 0):
        raise ConfigError(f"strength of a regulariser must be finite and >= 0, got {strength}")
