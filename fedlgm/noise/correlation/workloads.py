"""The linear map A from a run's released vectors to its models: output t = sum_r A[t, r] y_r.

Only the error depends on A, and not the cost of the run, because everything after a release is
post-processing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from scipy.linalg import toeplitz
from scipy.signal import lfilter

from fedlgm.checks import BelowOne, Rate, check_fields
from fedlgm.errors import ConfigError


@dataclass(frozen=True)
class Workload:
    """A linear server optimizer: m_t = momentum m_{t-1} + y_t, model_t = decay model_{t-1} + m_t.

    The default is plain averaging, whose outputs are the prefix sums of the releases. Adam and
    other non-linear servers have no such map. For them, use prefix sums or momentum instead.

    Example:
        >>> Workload(momentum=0.5).matrix(3)
        array([[1.  , 0.  , 0.  ],
               [1.5 , 1.  , 0.  ],
               [1.75, 1.5 , 1.  ]])

    Attributes:
        momentum: beta in [0, 1).
        decay: factor alpha in (0, 1] that multiplies the model in each round (weight decay).

    Raises:
        ConfigError: a value is outside its range.

    Source: Kalinin and Lampert 2024 (arXiv 2405.13763), Section 3, for momentum and weight decay.
    """

    momentum: BelowOne = 0.0
    decay: Rate = 1.0

    def __post_init__(self) -> None:
        check_fields("", self)

    def column(self, rounds: int) -> np.ndarray:
        """First column of A, which is Toeplitz, float64 [T]."""
        return self.apply(np.eye(rounds, 1))[:, 0]

    def matrix(self, rounds: int) -> np.ndarray:
        """The lower-triangular matrix A, float64 [T, T]."""
        return toeplitz(self.column(rounds), np.zeros(rounds))

    def apply(self, x: np.ndarray) -> np.ndarray:
        """The product A x for a matrix x of shape [T, n]."""
        moved = lfilter([1.0], [1.0, -self.momentum], x, axis=0)
        return lfilter([1.0], [1.0, -self.decay], moved, axis=0)

    def variances(self, coefficients: np.ndarray, rounds: int) -> np.ndarray:
        """Variance of each output, [T]: the squared row norms of A C^-1 for a lower-triangular
        Toeplitz C.
        """
        return np.cumsum(lfilter([1.0], coefficients, self.column(rounds)) ** 2)


PREFIX = Workload()


def as_workload(workload: str | Workload) -> Workload:
    """The workload of the name "prefix", or a given `Workload` itself.

    Raises:
        ConfigError: the name is unknown.
    """
    if isinstance(workload, Workload):
        return workload
    if workload == "prefix":
        return PREFIX
    raise ConfigError(
        f"unknown workload {workload!r}; known: 'prefix', or a fedlgm.correlation.Workload"
    )
