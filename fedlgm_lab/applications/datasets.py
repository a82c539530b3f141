"""Data for coordinate descent (tables that scikit-learn loads) and for PCA (points in a random
subspace).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedlgm.checks import check_count, check_known
from fedlgm.errors import ConfigError, DataError
from fedlgm.files import explain_failure

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class TabularData:
    """A regression or two-class task.

    Attributes:
        name: name of the data set.
        features: features of the rows, shape [N, K].
        targets: targets of the rows, shape [N]: scaled to mean 0 and unit variance for regression,
            labels -1 and 1 for two classes.
        classification: whether the targets are labels.
    """

    name: str
    features: Array
    targets: Array
    classification: bool


def load_tabular(name: str, *, scaling: str = "range") -> TabularData:
    """Load a data set.

    The scaling uses statistics of the data, which the DP-CD literature treats as public.

    Args:
        name: "diabetes" (442 x 10, regression) and "breast-cancer" (569 x 30, two classes) come
            with scikit-learn; "california" (20,640 x 8, regression) and "electricity" (45,312 x 8,
            two classes) are downloaded once.
        scaling: "centered" only centres the features. "range" then divides them by their largest
            magnitude (bounds b_i = 1, unequal variances). "standardized" divides them by their
            standard deviation instead.

    Returns:
        The task.

    Raises:
        ConfigError: the name or scaling is unknown.
        DataError: the set cannot be downloaded or a feature is constant.
    """
    check_known("data set", name, _SETS)
    check_known("scaling", scaling, _SCALES)
    from sklearn import datasets  # imported here, because the import is slow

    loader, options, classification = _SETS[name]
    try:
        features, targets = getattr(datasets, loader)(return_X_y=True, **options)
    except OSError as error:
        what, remedy = f"{name} could not be downloaded or read", "diabetes needs no download"
        raise DataError(explain_failure(what, error, remedy)) from error
    features = np.asarray(features, dtype=np.float64)
    features = features - features.mean(axis=0)
    if np.any(features.std(axis=0) == 0):
        raise DataError(f"{name} has a constant feature")
    features = features / _SCALES[scaling](features)
    if classification:
        targets = np.where(targets == np.unique(targets)[-1], 1.0, -1.0)
    else:
        targets = np.asarray(targets, dtype=np.float64)
        targets = (targets - targets.mean()) / targets.std()
    return TabularData(name, features, targets, classification)


_SETS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "diabetes": ("load_diabetes", {"scaled": False}, False),
    "breast-cancer": ("load_breast_cancer", {}, True),
    "california": ("fetch_california_housing", {}, False),
    "electricity": (
        "fetch_openml",
        {"data_id": 151, "as_frame": False, "parser": "liac-arff"},
        True,
    ),
}
"""Function of `sklearn.datasets` with its options, and whether the targets are labels, by name."""
_SCALES: dict[str, Callable[[Array], Any]] = {
    "range": lambda x: np.abs(x).max(axis=0),
    "standardized": lambda x: x.std(axis=0),
    "centered": lambda x: 1.0,
}


def fully_random_rows(
    dimension: int, rank: int, rows: int, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Draw points uniformly from the unit sphere of a uniformly random subspace (Soltanolkotabi and
    Candes 2012).

    Args:
        dimension: ambient dimension M.
        rank: dimension r of the subspace, in [1, M].
        rows: number N of points.
        rng: stream to draw from.

    Returns:
        The points, shape [N, M], and an orthonormal basis of the subspace, shape [M, r].

    Raises:
        ConfigError: the rank is outside [1, M], or there are no rows.
    """
    for name, value in (("dimension", dimension), ("rank", rank), ("rows", rows)):
        check_count(name, value)
    if rank > dimension:
        raise ConfigError(f"rank must be at most the dimension {dimension}, got {rank}")
    basis = np.linalg.qr(rng.standard_normal((dimension, rank)))[0]
    coefficients = rng.standard_normal((rows, rank))
    coefficients /= np.linalg.norm(coefficients, axis=1, keepdims=True)
    return coefficients @ basis.T, basis
