"""Coordinate smoothness constants M_i = curvature * mean_n x_{n,i}^2, exact or privately estimated."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from fedlgm.errors import ConfigError, DataError, check_count
from fedlgm.mechanisms.inid import laplace_budget, laplace_spr
from fedlgm.noise import draw
from fedlgm.papers.inid.objectives import Array, Objective


def smoothness(objective: Objective, features: npt.ArrayLike) -> Array:
    """Exact constants, shape [K]. NOT PRIVATE: use them only if they are public.

    Raises:
        DataError: features of the wrong shape, or a feature that is zero in every row.
    """
    x = _rows(features)
    moments = (x**2).mean(axis=0)
    if np.any(moments == 0):
        raise DataError(f"features {np.flatnonzero(moments == 0).tolist()} are zero in every row; drop them")
    return np.asarray(objective.curvature * moments)


def private_smoothness(
    objective: Objective,
    features: npt.ArrayLike,
    bounds: npt.ArrayLike,
    *,
    epsilon: float,
    rows: int,
    rng: np.random.Generator,
    floor: float = 0.01,
) -> Array:
    """epsilon-DP estimates of the smoothness constants (i.n.i.d. noise paper, supplement; DP-CD, appendix F).

    Squares are clipped to b_i^2, so that one row, replaced, added or removed, moves the i-th sum by at most b_i^2;
    every coordinate gets epsilon / K. Followed by a run at (epsilon', delta), the total is (epsilon + epsilon',
    delta)-DP.

    Args:
        objective: supplies the curvature.
        features: shape [n, K].
        bounds: public bounds b_i > 0 of |x_i|, shape [K].
        epsilon: share of the budget, > 0.
        rows: public number N of rows, the divisor.
        rng: stream of the noise.
        floor: estimates below floor * curvature * b_i^2 are raised to it, in (0, 1]: an estimate may be zero or
            negative, which is no valid learning rate or clipping constant.

    Returns:
        Estimates, shape [K], all > 0.

    Raises:
        ConfigError: an argument out of range.
        DataError: features of the wrong shape.
    """
    x, b = _rows(features), np.asarray(bounds, dtype=np.float64)
    if b.shape != (x.shape[1],) or not np.all(np.isfinite(b)) or np.any(b <= 0):
        raise ConfigError(f"bounds must be {x.shape[1]} finite numbers > 0, one a feature")
    if not (math.isfinite(floor) and 0 < floor <= 1):
        raise ConfigError(f"floor must lie in (0, 1], got {floor}")
    check_count("rows", rows)
    noise = draw("laplace", laplace_spr(b**2, laplace_budget(epsilon)), rng)
    moments = (np.minimum(x**2, b**2).sum(axis=0) + noise) / rows
    return np.asarray(objective.curvature * np.maximum(moments, floor * b**2))


def _rows(features: npt.ArrayLike) -> Array:
    x = np.asarray(features, dtype=np.float64)
    if x.ndim != 2 or len(x) == 0 or not np.all(np.isfinite(x)):
        raise DataError(f"features must be a finite matrix with at least one row, got shape {x.shape}")
    return x
