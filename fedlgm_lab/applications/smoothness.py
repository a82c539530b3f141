"""Coordinate smoothness constants M_i = curvature * mean_n x_{n,i}^2."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from fedlgm.errors import DataError
from fedlgm_lab.applications.objectives import Array, Objective


def smoothness(objective: Objective, features: npt.ArrayLike) -> Array:
    """Compute the exact smoothness constants of these features, [K].

    NOT PRIVATE: use the constants only if the features are public.

    Raises:
        DataError: the features have a wrong shape, or a feature is zero in every row.
    """
    x = feature_rows(features)
    moments = (x**2).mean(axis=0)
    if np.any(moments == 0):
        raise DataError(
            f"features {np.flatnonzero(moments == 0).tolist()} are zero in every row; drop them"
        )
    return np.asarray(objective.curvature * moments)


def feature_rows(features: npt.ArrayLike) -> Array:
    """Convert features to a finite matrix [n, K], or raise a DataError."""
    x = np.asarray(features, dtype=np.float64)
    if x.ndim != 2 or len(x) == 0 or not np.all(np.isfinite(x)):
        raise DataError(
            f"features must be a finite matrix with at least one row, got shape {x.shape}"
        )
    return x
