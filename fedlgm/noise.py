"""The only place that draws noise.

Two doors: `draw` for small NumPy vectors (applications, closed-form checks) and `add_noise_` for model updates.
Every draw takes a named stream of `fedlgm.keys`; nothing here reads a global generator.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

Family = Literal["gaussian", "laplace"]


def draw(
    family: Family, scale: npt.ArrayLike, rng: np.random.Generator, size: tuple[int, ...] | None = None
) -> np.ndarray:
    """Independent zero-mean noise in float64.

    Args:
        family: "gaussian" (`scale` is the standard deviation) or "laplace" (`scale` is the parameter b, std sqrt(2) b).
        scale: non-negative scales, broadcast against `size`; a zero scale gives exactly zero.
        rng: stream to draw from.
        size: shape of the result; by default that of `scale`.

    Returns:
        Array of shape `size`.
    """
    scale = np.asarray(scale, dtype=np.float64)
    shape = scale.shape if size is None else size
    unit = rng.standard_normal(shape) if family == "gaussian" else rng.laplace(size=shape)
    return unit * scale
