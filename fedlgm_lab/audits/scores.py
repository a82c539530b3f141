"""Scores of canaries, and the checks that every bound applies to its arguments."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedlgm.checks import check_below_one
from fedlgm.errors import ConfigError

Array = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]
CONFIDENCE = 0.999
"""Default confidence. At this confidence, at most one in a thousand audits of sound releases raises
a false alarm on average.
"""
XTOL = 1e-9  # absolute tolerance of the root finding that yields a bound


@dataclass(frozen=True)
class Scores:
    """Scores of canaries.

    Attributes:
        inside: scores of the canaries that were included in the run, [n].
        outside: scores of the canaries that were left out, [k].

    Raises:
        ConfigError: the scores are not a list of numbers, are empty, or contain NaN.

    Example:
        >>> scores = Scores(inside=[2.0, 3.0, 4.0], outside=[1.0, 2.5])
        >>> scores.count
        5
    """

    inside: Array
    outside: Array

    def __post_init__(self) -> None:
        for name in ("inside", "outside"):
            values = np.asarray(getattr(self, name), dtype=np.float64)
            if values.ndim != 1 or values.size == 0 or np.isnan(values).any():
                raise ConfigError(
                    f"scores {name} must be a non-empty list of numbers, got shape {values.shape}"
                )
            object.__setattr__(self, name, values)

    @property
    def count(self) -> int:
        """Number m of all canaries, whether in the run or left out."""
        return self.inside.size + self.outside.size

    def split(self, seed: int | None = None) -> tuple[Scores, Scores]:
        """Divide the scores of included and of left-out canaries at random into two halves.

        Raises:
            ConfigError: a half would be empty.
        """
        rng = np.random.default_rng(seed)
        halves = []
        for values in (self.inside, self.outside):
            order, cut = rng.permutation(values.size), values.size // 2
            halves.append((values[order[:cut]], values[order[cut:]]))
        if any(part.size == 0 for half in halves for part in half):
            raise ConfigError(
                f"too few scores to split: {self.inside.size} of included and {self.outside.size} "
                "of excluded canaries"
            )
        return Scores(halves[0][0], halves[1][0]), Scores(halves[0][1], halves[1][1])

    def frontier(self) -> tuple[Array, Counts, Counts]:
        """Find the thresholds at the corners of the concave hull of the ROC curve.

        Returns:
            The thresholds, and the numbers of left-out and of included canaries with a score below
            each threshold.
        """
        thresholds = np.append(np.union1d(self.inside, self.outside), np.inf)
        missed = np.searchsorted(np.sort(self.inside), thresholds, side="left")
        rejected = np.searchsorted(np.sort(self.outside), thresholds, side="left")
        corners = _hull(missed, rejected)
        return thresholds[corners], rejected[corners], missed[corners]


def _hull(x: Counts, y: Counts) -> Counts:
    """Find the corners of the upper hull of points with ascending x, as indices."""
    indices = np.arange(len(x))
    while len(indices) > 2:
        dx, dy = np.diff(x[indices]), np.diff(y[indices])
        inner = dy[:-1] * dx[1:] - dy[1:] * dx[:-1] > 0
        if inner.all():
            break
        indices = indices[np.r_[True, inner, True]]
    return indices


def check(delta: float, confidence: float) -> None:
    """Refuse a delta or a confidence outside its range.

    Raises:
        ConfigError: the message names the value that is out of range.
    """
    check_below_one(delta=delta)
    check_confidence(confidence)


def check_confidence(confidence: float) -> None:
    """Refuse a confidence outside (0.5, 1) with a ConfigError."""
    if not 0.5 < confidence < 1:
        raise ConfigError(f"confidence must lie in (0.5, 1), got {confidence}")
