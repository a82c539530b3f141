"""Layers with their own correlations: how one budget is split between them.

Layer l is bounded by c_l and has noise s_l C_l^-1 z_l. One client moves the whole by at most
(sum_l (c_l sens(C_l) / s_l)^2)^(1/2), exactly so where one participation pattern is the worst for every layer
(decreasing coefficients, for example). A layer enters through sens(C_l) times the error of C_l alone, so layers with
the same workload and schema want the same C; different ones serve layers with different learning rates, momentum or
decay.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedlgm.errors import ConfigError

_Numbers = Sequence[float] | np.ndarray


def optimal_split(
    clips: _Numbers,
    sensitivities: _Numbers,
    errors: _Numbers,
    sizes: Sequence[int] | np.ndarray,
    weights: _Numbers | None = None,
    mu: float = 1.0,
) -> np.ndarray:
    """Noise scale s_l of each layer's z with the least weighted squared error at a given privacy.

    Minimises sum_l v_l d_l (s_l E_l)^2 subject to sum_l (c_l S_l / s_l)^2 = mu^2, that is to the whole run being one
    Gaussian mechanism of noise multiplier 1 / mu under zero-out (see `Correlation.sensitivity` for other relations).

    Args:
        clips: bounds c_l > 0 of one client's contribution to each layer.
        sensitivities: S_l = `Correlation.sensitivity(...)` of each layer's C.
        errors: E_l = `Correlation.error(...)` of each layer's C, for that layer's workload.
        sizes: coordinates d_l of each layer.
        weights: v_l > 0 of each layer's squared error; None: 1.
        mu: Gaussian privacy parameter, see `fedlgm.privacy.gaussian_mu`.

    Returns:
        s_l, float64 [K]: s_l^2 = c_l S_l / (sqrt(v_l d_l) E_l) * (sum_m c_m S_m E_m sqrt(v_m d_m)) / mu^2. The least
        error is (sum_m c_m S_m E_m sqrt(v_m d_m))^2 / mu^2.

    Raises:
        ConfigError: lists of different lengths, or numbers that are not positive.

    Example:
        >>> optimal_split([1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [16, 1]).round(4)
        array([2.2361, 4.4721])
    """
    lists = {"clips": clips, "sensitivities": sensitivities, "errors": errors, "sizes": sizes}
    given = {name: np.asarray(values, dtype=np.float64) for name, values in lists.items()}
    given["weights"] = np.ones_like(given["clips"]) if weights is None else np.asarray(weights, dtype=np.float64)
    for name, values in given.items():
        if values.ndim != 1 or values.shape != given["clips"].shape or values.size == 0:
            raise ConfigError(f"{name} must have one entry for each layer, got shape {values.shape}")
        if not (np.isfinite(values).all() and (values > 0).all()):
            raise ConfigError(f"{name} must be finite and positive, got {values.tolist()}")
    if not (math.isfinite(mu) and mu > 0):
        raise ConfigError(f"mu must be finite and positive, got {mu}")
    moved = given["clips"] * given["sensitivities"]
    seen = given["errors"] * np.sqrt(given["weights"] * given["sizes"])
    return np.sqrt(moved / seen * (moved @ seen)) / mu
