"""Private estimates of coordinate smoothness constants, for the variant of DP-CD whose constants
are not public.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from fedlgm.checks import check_count
from fedlgm.errors import ConfigError
from fedlgm.mechanisms.inid import laplace_budget, noise_scales
from fedlgm.noise.draws import draw
from fedlgm_lab.applications.objectives import Array, Objective
from fedlgm_lab.applications.smoothness import feature_rows


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
    """Estimate the smoothness constants with epsilon-DP (i.n.i.d. noise paper, supplement; DP-CD,
    appendix F).

    Squares are clipped to b_i^2, so that a row that is replaced, added or removed changes the i-th
    sum by at most b_i^2; every coordinate gets epsilon / K. Together with a later run at (epsilon',
    delta), the estimates are (epsilon + epsilon', delta)-DP.

    Args:
        objective: supplies the curvature.
        features: shape [n, K].
        bounds: public bounds b_i > 0 of |x_i|, shape [K].
        epsilon: epsilon of the estimates, > 0.
        rows: public number N of rows, by which the sums are divided.
        rng: stream of the noise.
        floor: number in (0, 1]; estimates below floor * curvature * b_i^2 are raised to this value,
            because a zero or negative estimate gives no valid learning rate or clipping constant.

    Returns:
        Estimates, shape [K], all > 0.

    Raises:
        ConfigError: an argument out of range.
        DataError: features of the wrong shape.
    """
    x, b = feature_rows(features), np.asarray(bounds, dtype=np.float64)
    if b.shape != (x.shape[1],) or not np.all(np.isfinite(b)) or np.any(b <= 0):
        raise ConfigError(f"bounds must be {x.shape[1]} finite numbers > 0, one a feature")
    if not (math.isfinite(floor) and 0 < floor <= 1):
        raise ConfigError(f"floor must lie in (0, 1], got {floor}")
    check_count("rows", rows)
    noise = draw("laplace", noise_scales("laplace", "spr", b**2, laplace_budget(epsilon)), rng)
    moments = (np.minimum(x**2, b**2).sum(axis=0) + noise) / rows
    return np.asarray(objective.curvature * np.maximum(moments, floor * b**2))
