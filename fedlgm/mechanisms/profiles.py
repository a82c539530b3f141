"""Sensitivity profiles: the largest change of each coordinate of a query between neighbouring data
sets.

A profile is a vector lambda with |[f(D) - f(D')]_i| <= lambda_i for all neighbouring D, D'
(i.n.i.d. noise paper, Definition 4). The code that computes the profile decides whether
neighbouring data sets differ by replacing a unit or by adding or removing it. The profile must be
public: it depends on the configuration, never on the private data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedlgm.checks import check_positive
from fedlgm.errors import ConfigError

Array = npt.NDArray[np.float64]
Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Profile:
    """A sensitivity profile, stored as runs of equal coordinates. A layer of any size with equal
    sensitivities then needs only one run.

    Attributes:
        values: sensitivity of each run's coordinates, finite and >= 0, shape [runs].
        counts: number of coordinates of each run, >= 1, shape [runs].

    Raises:
        ConfigError: the shapes differ, there is no coordinate, a value is negative or not finite,
            or a count is below one.
    """

    values: Array
    counts: Counts

    def __post_init__(self) -> None:
        values = _vector(self.values)
        raw = np.asarray(self.counts)
        if raw.shape != values.shape:
            raise ConfigError(
                f"a profile needs one count per run: {values.size} values, counts of shape "
                f"{raw.shape}"
            )
        if not (
            np.issubdtype(raw.dtype, np.number)
            and np.all(np.isfinite(raw))
            and np.all(raw == np.floor(raw))
        ):
            raise ConfigError(f"counts of a profile must be whole numbers, got {raw.tolist()}")
        if np.any(raw < 1):
            raise ConfigError(f"counts of a profile must be >= 1, got {raw.tolist()}")
        if not np.all(np.isfinite(values)) or np.any(values < 0):
            raise ConfigError(
                "sensitivities must be finite and >= 0; give 0 for a coordinate that never changes"
            )
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "counts", raw.astype(np.int64))

    def norm(self, order: float) -> float:
        """Return the l_order norm of the profile. This is an upper bound on the l_order
        sensitivity, and is attained if all coordinates can reach their largest change together.

        Raises:
            ConfigError: the order is not above 0 (it may be infinite).
        """
        if order != math.inf:
            check_positive(order=order)
        peak = float(self.values.max())
        if peak == 0 or np.isinf(order):
            return peak
        return peak * math.pow(float(self.counts @ (self.values / peak) ** order), 1 / order)


def as_profile(profile: Profile | npt.ArrayLike) -> Profile:
    """Return a `Profile` unchanged. Convert a vector of sensitivities (shape [K]) to a profile with
    one run per coordinate.

    Raises:
        ConfigError: the value is not a vector of finite numbers >= 0.
    """
    if isinstance(profile, Profile):
        return profile
    dense = _vector(profile)
    return Profile(dense, np.ones(dense.size, dtype=np.int64))


def _vector(numbers: npt.ArrayLike) -> Array:
    try:
        vector = np.asarray(numbers, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"sensitivities must be a vector of numbers: {error}") from None
    if vector.ndim != 1 or vector.size == 0:
        raise ConfigError(
            f"sensitivities must be a vector with at least one entry, got shape {vector.shape}"
        )
    return vector
