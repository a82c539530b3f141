"""Repeated private PCA on synthetic data, with all methods on the same matrices (Table III of the
i.n.i.d. noise paper).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from fedlgm.checks import check_count
from fedlgm.errors import ConfigError
from fedlgm.noise.draws import draw
from fedlgm.noise.keys import KeyRing, Purpose
from fedlgm_lab.applications.datasets import fully_random_rows
from fedlgm_lab.applications.pca import (
    CovariancePlan,
    covariance_sum,
    subspace_recovery_error,
    top_subspace,
)

Array = npt.NDArray[np.float64]


def recovery_errors(
    plans: Mapping[str, CovariancePlan], *, rank: int, rows: int, trials: int, keys: KeyRing
) -> dict[str, Array]:
    """Compute the subspace recovery errors of several plans; all plans of a trial share a new data
    set.

    Args:
        plans: plans of the same dimension M, by name.
        rank: dimension of the subspace.
        rows: number of points of each data set.
        trials: number of data sets.
        keys: randomness; trial t depends on `keys`, t and the order of the plans only.

    Returns:
        For each name, the errors, shape [trials].

    Raises:
        ConfigError: no plans, plans of different dimensions, or sizes out of range.
    """
    dimensions = sorted({plan.dimension for plan in plans.values()})
    if len(dimensions) != 1:
        raise ConfigError(f"plans must share one dimension, got {dimensions}")
    check_count("trials", trials)
    errors = np.empty((trials, len(plans)))
    for trial in range(trials):
        x, basis = fully_random_rows(
            dimensions[0], rank, rows, keys.numpy_generator(Purpose.PROBE, trial)
        )
        totals: dict[tuple[float, float] | None, Array] = {}
        noisy = []
        for index, plan in enumerate(plans.values()):
            if plan.entry_clip not in totals:
                totals[plan.entry_clip] = covariance_sum(x, plan)
            noisy.append(
                perturb(
                    totals[plan.entry_clip], plan, keys.numpy_generator(Purpose.NOISE, trial, index)
                )
            )
        errors[trial] = subspace_recovery_error(top_subspace(np.stack(noisy), rank), basis)
    return dict(zip(plans, errors.T, strict=True))


def perturb(total: npt.ArrayLike, plan: CovariancePlan, rng: np.random.Generator) -> Array:
    """Return `total` (shape [M, M]) plus the symmetric noise of `plan`."""
    upper = np.triu_indices(plan.dimension)
    scale = np.where(upper[0] == upper[1], plan.diagonal, plan.off_diagonal)
    noise = np.zeros((plan.dimension, plan.dimension))
    noise[upper] = draw(plan.family, scale, rng)
    return np.asarray(total, dtype=np.float64) + noise + np.triu(noise, 1).T
