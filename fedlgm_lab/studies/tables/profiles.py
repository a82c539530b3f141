"""The illustrative profiles of the i.n.i.d. noise paper (section V), the inequality of a profile,
and optimal noise for layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import scipy

from fedlgm.errors import ConfigError
from fedlgm.mechanisms.inid import noise_scales
from fedlgm.mechanisms.profiles import Array, Counts, Profile, as_profile
from fedlgm.noise.draws import Family


def unit_profile(name: str, dimension: int, *, norm: float = 2.0) -> Array:
    """Return one of the illustrative profiles of the i.n.i.d. noise paper (section V), scaled to
    norm 1.

    Args:
        name: "uniform" (lambda_i constant), "linear" (i), "quadratic" (i^2), "exponential" (e^i) or
            "one-hot".
        dimension: number of coordinates K >= 1.
        norm: order of the norm that is scaled to one, >= 1; the paper takes order 2 for Gaussian
            noise and order 1 for Laplace noise.

    Returns:
        Sensitivities, shape [K], in ascending order.

    Raises:
        ConfigError: unknown name, dimension below one or norm below one.
    """
    if name not in _SHAPES:
        raise ConfigError(f"unknown profile {name!r}; known: {', '.join(_SHAPES)}")
    if dimension < 1:
        raise ConfigError(f"dimension of a profile must be >= 1, got {dimension}")
    if not norm >= 1:
        raise ConfigError(f"order of the norm must be >= 1, got {norm}")
    raw = _SHAPES[name](np.arange(1, dimension + 1, dtype=np.float64))
    return raw / as_profile(raw).norm(norm)


_SHAPES: dict[str, Callable[[Array], Array]] = {
    "uniform": np.ones_like,
    "linear": lambda i: i,
    "quadratic": lambda i: i**2,
    "exponential": lambda i: np.exp(i - i[-1]),
    "one-hot": lambda i: (i == i[-1]).astype(np.float64),
}


def gini(profile: Profile) -> float:
    """Compute the Gini coefficient sum_ij |lambda_i - lambda_j| / (2 K ||lambda||_1), which is 0
    for a uniform and 1 - 1/K for a one-hot profile.
    """
    total = float(profile.counts @ profile.values)
    if total == 0:
        return 0.0
    order = np.argsort(profile.values)
    values, counts = profile.values[order], profile.counts[order].astype(np.float64)
    below = np.cumsum(counts) - counts
    above = counts.sum() - below - counts
    return max(0.0, float(counts * (below - above) @ values) / (counts.sum() * total))


def gaussian_groups(
    clip: Sequence[float] | npt.NDArray[np.float64],
    dims: Sequence[int] | npt.NDArray[np.int64],
    mu: float,
) -> Array:
    """Compute each layer's optimal standard deviation of Gaussian noise if layers are clipped in l2
    norm.

    The noise is i.i.d. within a layer. Clipping a layer to l2 norm C therefore needs as much noise
    as clipping each of its K coordinates to C / sqrt(K), and it changes the update less. The
    squared error is least with sigma_m^2 = (C_m / sqrt K_m) sum_k C_k sqrt(K_k) / mu^2, which is
    the "min total noise" allocation of the layer-wise Gaussian mechanism paper at noise multiplier
    1/mu.

    Args:
        clip: l2 bound C_m of each layer's contribution, shape [layers].
        dims: number of parameters K_m of each layer, shape [layers].
        mu: budget of mu-Gaussian DP, > 0.

    Returns:
        sigma, shape [layers].

    Raises:
        ConfigError: bounds, sizes or budget out of range.
    """
    return noise_scales("gaussian", "inid", _layers(clip, dims, 2), mu)


def laplace_groups(
    clip: Sequence[float] | npt.NDArray[np.float64],
    dims: Sequence[int] | npt.NDArray[np.int64],
    budget: float,
) -> Array:
    """Compute each layer's optimal scale of Laplace noise if layers are clipped in l1 norm.

    The squared error is least with beta_m = (C_m / K_m)^(1/3) sum_k C_k^(2/3) K_k^(1/3) / budget.
    Arguments and errors as in `gaussian_groups`, with l1 bounds and a budget sum_m C_m / beta_m.
    """
    return noise_scales("laplace", "inid", _layers(clip, dims, 1), budget)


def _layers(clip: npt.ArrayLike, dims: npt.ArrayLike, order: int) -> Profile:
    bounds = as_profile(clip).values
    sizes = Profile(np.ones_like(bounds), np.asarray(dims)).counts
    return Profile(bounds / sizes ** (1 / order), sizes)


def expected_error(
    family: Family, scales: npt.ArrayLike, p: float = 2, counts: Counts | None = None
) -> float:
    """Compute E||noise||_p^p of independent noise in closed form.

    Args:
        family: "gaussian" (`scales` are standard deviations) or "laplace" (`scales` are the
            parameters beta).
        scales: noise scales, shape [K] or [runs].
        p: exponent >= 1; 2 gives the mean squared error and 1 the mean absolute error.
        counts: number of coordinates that have each scale, shape [runs]; 1 by default.

    Returns:
        sum_i c_p scale_i^p with c_p = 2^(p/2) Gamma((p+1)/2) / sqrt(pi) (Gaussian) or Gamma(p+1)
        (Laplace).
    """
    vector = np.asarray(scales, dtype=np.float64)
    if family == "gaussian":
        log_moment = (
            p / 2 * math.log(2) + float(scipy.special.gammaln((p + 1) / 2)) - math.log(math.pi) / 2
        )
    else:
        log_moment = float(scipy.special.gammaln(p + 1))
    powers = vector**p
    return math.exp(log_moment) * float(powers.sum() if counts is None else powers @ counts)
