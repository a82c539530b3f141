"""Independent but not identically distributed (i.n.i.d.) Gaussian and Laplace noise, and the
baselines with which the paper compares it.

Every function computes one noise scale per coordinate from a public sensitivity profile and a
budget. Whether the noise suffices depends only on the budget that the scales spend:

    Gaussian   sum_i lambda_i^2 / sigma_i^2 = mu^2     (mu-Gaussian DP; whitening of the coordinates)
    Laplace    sum_i lambda_i / beta_i      = epsilon  (epsilon-DP; triangle inequality)

The scales of all three rules spend exactly the given budget. The "i.n.i.d." rule minimises the
expected (weighted) l_p^p error at this budget; "i.i.d." gives all coordinates one scale;
"scale-perturb-rescale" (SPR) gives each coordinate an equal share of the budget. Source: i.n.i.d.
noise paper, Theorems 4 and 5, equations 9 and 12, Table I. The result holds for the neighbouring
relation for which the profile was computed.

Profiles are vectors (shape [K]) or `Profile` objects (runs of equal coordinates). The scales have
one entry per coordinate for a vector and one per run for a `Profile`. A coordinate of zero
sensitivity gets zero noise under the i.n.i.d. and SPR rules; an all-zero profile gives all-zero
scales, with a warning.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedlgm.checks import check_at_least_one, check_below_one, check_known, check_positive
from fedlgm.errors import ConfigError
from fedlgm.mechanisms.profiles import Array, Profile, as_profile
from fedlgm.noise.draws import Family
from fedlgm.privacy.gaussian import gaussian_mu

ProfileLike = Profile | npt.ArrayLike
Rule = Literal["inid", "spr", "iid"]


def gaussian_inid(
    profile: ProfileLike,
    epsilon: float,
    delta: float,
    p: float = 2,
    weights: npt.ArrayLike | None = None,
) -> Array:
    """Compute the standard deviations of the (epsilon, delta)-DP Gaussian mechanism with the least
    expected l_p^p error.

    Args:
        profile: sensitivities lambda, shape [K], or a `Profile`.
        epsilon: privacy budget, > 0.
        delta: delta of the guarantee, in (0, 1).
        p: the error is sum_i weights_i E|noise_i|^p, with finite p >= 1; 2 is the mean squared
            error.
        weights: positive weights of the coordinates' errors, shaped like the scales; all one by
            default.

    Returns:
        sigma, one entry per coordinate (per run for a `Profile`), by Theorem 4 (for p = 2) and
        equation 9 of the i.n.i.d. noise paper.

    Raises:
        ConfigError: sensitivities, budget, p or weights are out of range.
    """
    return noise_scales("gaussian", "inid", profile, gaussian_mu(epsilon, delta), p, weights)


def laplace_inid(
    profile: ProfileLike,
    epsilon: float,
    delta: float = 0.0,
    p: float = 2,
    weights: npt.ArrayLike | None = None,
    *,
    tight: bool = False,
) -> Array:
    """Compute the scales of the (epsilon, delta)-DP Laplace mechanism with the least expected l_p^p
    error.

    Args:
        profile: sensitivities lambda, shape [K], or a `Profile`.
        epsilon: privacy budget, > 0.
        delta: delta of the guarantee, in [0, 1); 0 for pure epsilon-DP.
        p: the error is sum_i weights_i E|noise_i|^p, with finite p >= 1; 2 is the mean squared
            error.
        weights: positive weights of the coordinates' errors, shaped like the scales; all one by
            default.
        tight: whether to use the tighter of the two bounds of `laplace_budget`, which allows less
            noise.

    Returns:
        beta, one entry per coordinate (per run for a `Profile`), by Theorem 5 (for p = 2) and
        equation 12 of the i.n.i.d. noise paper.

    Raises:
        ConfigError: sensitivities, budget, p or weights are out of range.
    """
    return noise_scales(
        "laplace", "inid", profile, laplace_budget(epsilon, delta, tight=tight), p, weights
    )


def laplace_budget(epsilon: float, delta: float = 0.0, *, tight: bool = False) -> float:
    """Return a value of sum_i lambda_i / beta_i for which Laplace noise is (epsilon, delta)-DP.

    The paper's Corollary 6 allows epsilon - log(1 - delta). The tighter bound allows epsilon - 2
    log(1 - delta), for any number of coordinates, for this reason. Define the overlap 1 -
    delta_P(e) = integral min(P, exp(e) Q). One Laplace coordinate shifted by a (in scales) has
    overlap exp((e - a)/2) for |e| <= a. The overlap of the product of two distributions at e_1 +
    e_2 is at least the product of their overlaps at e_1 and e_2. An epsilon with |epsilon| <= sum
    a_i can always be split into e_i with |e_i| <= a_i. The tighter bound is exact for a single
    coordinate of non-zero sensitivity. The same argument shows that a product of Laplace releases
    is dominated by one scalar Laplace release of shift sum_i lambda_i / beta_i.

    Args:
        epsilon: privacy budget, > 0.
        delta: delta of the guarantee, in [0, 1).
        tight: whether to use the tighter bound instead of the paper's.

    Returns:
        The budget for all coordinates together.

    Raises:
        ConfigError: `epsilon` or `delta` is out of range.
    """
    check_positive(epsilon=epsilon)
    check_below_one(delta=delta)
    return epsilon - (2 if tight else 1) * math.log1p(-delta)


def noise_scales(
    family: Family,
    rule: Rule,
    profile: ProfileLike,
    budget: float,
    p: float = 2,
    weights: npt.ArrayLike | None = None,
) -> Array:
    """Compute standard deviations of Gaussian noise, or scales of Laplace noise, that spend a
    budget exactly.

    With weights w the least error of Gaussian noise is reached if sigma_i^(p+2) is proportional to
    lambda_i^2 / w_i. (The paper's Remark 4 only replaces lambda by a weighted profile. Scales
    computed in this way overspend the budget unless they are divided by the weights.)

    Args:
        family: law of the noise.
        rule: "inid" has the least expected error, "iid" gives all coordinates one scale, including
            coordinates of zero sensitivity, and "spr" gives an equal share of the budget to each
            coordinate that can change.
        profile: sensitivities lambda, shape [K], or a `Profile`.
        budget: mu of mu-Gaussian DP, or epsilon of pure DP for Laplace noise; > 0.
        p: for "inid", as in `gaussian_inid`.
        weights: for "inid", as in `gaussian_inid`.

    Returns:
        One scale per coordinate (per run for a `Profile`).

    Raises:
        ConfigError: an argument is out of range.

    Example:
        >>> noise_scales("gaussian", "iid", [3.0, 4.0], 1.0).tolist()
        [5.0, 5.0]
    """
    check_known("rule", rule, Rule)
    runs, relative, weight = _prepare(profile, budget, p, weights)
    order, root = _NORMS[family]
    if rule == "iid":
        return np.full(runs.values.size, runs.norm(order) / budget)
    if rule == "spr":
        # Each of the n coordinates that can change spends budget^q / n.
        return runs.values * (root(runs.counts[runs.values > 0].sum()) / budget)
    # sigma_i^(p + q) is proportional to lambda_i^q / w_i, with q = 2 (Gaussian) or 1 (Laplace).
    shape: Array = relative ** (order / (p + order)) * weight ** (-1 / (p + order))
    total = float(
        runs.counts @ (relative ** (order * p / (p + order)) * weight ** (order / (p + order)))
    )
    # The scales are normalised so that sum_i (lambda_i / sigma_i)^q equals budget^q.
    return shape * (float(runs.values.max()) * root(total) / budget)


_NORMS: dict[Family, tuple[int, Callable[[float], float]]] = {
    "gaussian": (2, math.sqrt),
    "laplace": (1, float),
}
"""For each law of the noise, the order q of the norm of the profile that the budget limits, and the
q-th root, which turns the sum of the coordinates' costs into this norm.
"""


def _prepare(
    profile: ProfileLike, budget: float, p: float, weights: npt.ArrayLike | None
) -> tuple[Profile, Array, Array]:
    """Check the arguments. Return the profile, its sensitivities divided by the largest sensitivity
    (so that no power overflows), and the weights divided by the largest weight.
    """
    runs = as_profile(profile)
    check_positive(budget=budget)
    check_at_least_one(p=p)
    weight = np.ones_like(runs.values) if weights is None else np.asarray(weights, dtype=np.float64)
    if weight.shape != runs.values.shape:
        raise ConfigError(
            f"weights must have shape {runs.values.shape}, one per scale, got {weight.shape}"
        )
    if not np.all(np.isfinite(weight)) or np.any(weight <= 0):
        raise ConfigError(
            "weights must be finite and > 0; drop a coordinate whose error does not matter instead"
        )
    peak = float(runs.values.max())
    if peak == 0:
        warnings.warn(
            "the sensitivity profile is zero everywhere, so no noise is needed and all scales are "
            "zero",
            stacklevel=4,
        )
    relative = runs.values / (peak or 1.0)
    if np.any((relative == 0) & (runs.values > 0)):
        raise ConfigError("the non-zero sensitivities span more than the range of double precision")
    return runs, relative, weight / weight.max()
