"""Private principal component analysis by noise on the second-moment matrix sum_n x_n x_n^T.

    plan  = covariance_plan(method, dimension, epsilon, delta)
    total = covariance_sum(rows, plan)  # additive over sets of rows: each client may send its own
    noisy = ...                         # the total and the plan's noise, see `federated_pca`
    basis = top_subspace(noisy, rank)

Neighbours differ by the addition or removal of one row; every row is scaled down to the unit l2
ball. Noise is drawn for the upper triangle and mirrored. Sources: Analyze Gauss (Dwork, Talwar,
Thakurta and Zhang 2014); i.n.i.d. noise paper, section VI-B.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from dp_accounting import dp_event

from fedlgm.checks import check_count, check_known
from fedlgm.errors import ConfigError, DataError
from fedlgm.mechanisms.inid import laplace_budget, noise_scales
from fedlgm.mechanisms.profiles import Profile, as_profile
from fedlgm.noise.draws import Family
from fedlgm.privacy.gaussian import gaussian_mu
from fedlgm.privacy.guarantee import Guarantee, Status
from fedlgm_lab.applications.sums import gram, sum_rows

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class CovariancePlan:
    """Plan of a release of the second-moment matrix of rows in the unit ball.

    Attributes:
        dimension: number of features M.
        family: law of the noise.
        diagonal: noise scale of the M diagonal entries (standard deviation, or Laplace parameter).
        off_diagonal: noise scale of the M (M - 1) / 2 entries above the diagonal.
        entry_clip: bounds of |x_i x_j| on and off the diagonal, or None if rows are bounded as a
            whole.
        event: accounting event.
        guarantee: status of the privacy claim.
    """

    dimension: int
    family: Family
    diagonal: float
    off_diagonal: float
    entry_clip: tuple[float, float] | None
    event: dp_event.DpEvent
    guarantee: Guarantee

    @property
    def protected(self) -> bool:
        """Whether the release has a privacy guarantee."""
        return not isinstance(self.event, dp_event.NonPrivateDpEvent)


def covariance_plan(
    method: str, dimension: int, epsilon: float, delta: float = 0.0
) -> CovariancePlan:
    """Plan the release of one second-moment matrix under an (epsilon, delta) budget.

    Methods:
        gaussian-iid: standard deviation 1/mu_0 in the whole upper triangle (Analyze Gauss):
            ||x x^T||_F <= 1.
        gaussian-symmetric: 1/mu_0 on the diagonal, 1/(sqrt(2) mu_0) above it (Gaussian orthogonal
            ensemble). With s = sum_i x_i^4 a unit row costs mu_0^2 (s + 2 sum_{i<j} x_i^2 x_j^2) =
            mu_0^2 (s + 1 - s): every unit row meets the budget with equality, at half the
            off-diagonal variance and with no clipping of entries.
        gaussian-inid: i.n.i.d. noise paper: entries clipped to 1/sqrt(K) on and 1/sqrt(2K) off the
            diagonal, with K = M (M + 1) / 2, and the optimal noise for that profile.
        gaussian-inid-unclipped: the same noise without the clipping, as the paper's figures
            suggest. NOT PRIVATE at the stated budget: a row along one axis moves its diagonal entry
            by 1 instead of 1/sqrt(K).
        laplace-iid: scale D_1/epsilon with the l1 sensitivity D_1 = (M + 1) / 2 of the upper
            triangle.
        laplace-inid: entries clipped as in gaussian-inid, and the optimal Laplace noise for that
            profile.

    Args:
        method: one of the above.
        dimension: number of features M >= 1.
        epsilon: privacy budget, > 0.
        delta: delta of the budget; in (0, 1) for Gaussian methods, 0 for Laplace methods, which are
            epsilon-DP.

    Returns:
        The plan.

    Raises:
        ConfigError: the method is unknown, or an argument is out of range.
    """
    check_known("covariance method", method, _REASONS)
    check_count("dimension", dimension)
    family: Family = "laplace" if method.startswith("laplace") else "gaussian"
    if family == "gaussian":
        budget = gaussian_mu(epsilon, delta)
        event = dp_event.GaussianDpEvent(1 / budget)
    elif delta == 0:
        budget = laplace_budget(epsilon)
        event = dp_event.LaplaceDpEvent(1 / budget)
    else:
        raise ConfigError(f"{method} is epsilon-DP: delta must be 0, got {delta}")
    clip = None
    if method == "gaussian-iid":
        diagonal = off_diagonal = 1 / budget
    elif method == "gaussian-symmetric":
        diagonal, off_diagonal = 1 / budget, math.sqrt(0.5) / budget
    elif method == "laplace-iid":
        diagonal = off_diagonal = (dimension + 1) / 2 / budget
    else:
        entries = _entry_profile(dimension)
        clip = float(entries.values[0]), float(entries.values[-1])
        scales = noise_scales(family, "inid", entries, budget)
        diagonal, off_diagonal = float(scales[0]), float(scales[-1])
    status: Status = "proven"
    if method == "gaussian-inid-unclipped":
        status, clip, event = "none", None, dp_event.NonPrivateDpEvent()
    guarantee = Guarantee(
        status, _REASONS[method], relation="add-remove", trust="central", unit="example"
    )
    return CovariancePlan(dimension, family, diagonal, off_diagonal, clip, event, guarantee)


def _entry_profile(dimension: int) -> Profile:
    """Return the paper's sensitivity profile: diagonal entries first, then those above the
    diagonal.
    """
    size = dimension * (dimension + 1) // 2
    if dimension == 1:
        return as_profile([1.0])
    values = np.array([1 / math.sqrt(size), 1 / math.sqrt(2 * size)])
    return Profile(values, np.array([dimension, size - dimension], dtype=np.int64))


_CLIPPED = "every entry is clipped to its sensitivity"
_REASONS = {
    "gaussian-iid": "the upper triangle of x x^T has l2 norm at most 1",
    "gaussian-symmetric": "in units of the noise every unit row has norm exactly mu_0",
    "gaussian-inid": _CLIPPED,
    "gaussian-inid-unclipped": "entries are not clipped, so a row along one axis exceeds the "
    "sensitivity profile",
    "laplace-iid": "the upper triangle of x x^T has l1 norm at most (M + 1) / 2",
    "laplace-inid": _CLIPPED,
}
"""Why each method's guarantee holds, or fails."""


def methods() -> tuple[str, ...]:
    """List the known covariance methods."""
    return tuple(_REASONS)


def covariance_sum(rows: npt.ArrayLike, plan: CovariancePlan) -> Array:
    """Add up the bounded outer products of `rows`; the sum is additive over disjoint sets of rows.

    Args:
        rows: data, shape [N, M]; rows longer than 1 are scaled to length 1.
        plan: plan of the release, which states whether entries are clipped.

    Returns:
        Symmetric matrix, shape [M, M].

    Raises:
        DataError: the rows have a wrong shape or entries that are not finite.
    """
    x = np.asarray(rows, dtype=np.float64)
    if x.ndim != 2 or x.shape[1] != plan.dimension:
        raise DataError(f"rows must have shape [N, {plan.dimension}], got {x.shape}")
    if not np.all(np.isfinite(x)):
        raise DataError(
            "rows must be finite; drop or impute missing values before a private release"
        )
    x = x / np.maximum(1.0, np.linalg.norm(x, axis=1, keepdims=True))
    if plan.entry_clip is None:
        return gram(x)
    diagonal, off_diagonal = plan.entry_clip
    total = np.empty((plan.dimension, plan.dimension))
    for i in range(plan.dimension):
        entries = x[:, i, None] * x[:, i:]
        limits = np.full(entries.shape[1], off_diagonal)
        limits[0] = diagonal
        total[i, i:] = sum_rows(np.clip(entries, -limits, limits))
        total[i + 1 :, i] = total[i, i + 1 :]
    return total


def top_subspace(matrices: npt.ArrayLike, rank: int) -> Array:
    """Compute an orthonormal basis of the leading eigenspace of each symmetric matrix: [..., M, M]
    gives [..., M, rank].

    Raises:
        ConfigError: the rank is outside [1, M].
    """
    stack = np.asarray(matrices, dtype=np.float64)
    if not 1 <= rank <= stack.shape[-1]:
        raise ConfigError(f"rank must lie in [1, {stack.shape[-1]}], got {rank}")
    return np.asarray(np.linalg.eigh(stack)[1][..., -rank:])


def subspace_recovery_error(estimate: npt.ArrayLike, truth: npt.ArrayLike) -> Array:
    """Compute ||(I - E E^T) U||_F / ||U||_F: 0 for equal subspaces, 1 for orthogonal subspaces.

    Args:
        estimate: orthonormal bases E, shape [..., M, r].
        truth: orthonormal basis U, shape [M, r].

    Returns:
        Errors, shape [...].
    """
    e, u = np.asarray(estimate, dtype=np.float64), np.asarray(truth, dtype=np.float64)
    residual = u - e @ (np.swapaxes(e, -1, -2) @ u)
    return np.asarray(np.linalg.norm(residual, axis=(-2, -1)) / np.linalg.norm(u))
