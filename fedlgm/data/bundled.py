"""Data sets that need no files: scikit-learn's digits and breast cancer table, and synthetic
Gaussian classes.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np

from fedlgm.data.dataset import DataSet
from fedlgm.data.tables import Column
from fedlgm.errors import ConfigError

_TEST_EVERY = 5
_SYNTHETIC_TEST = 10_000
_SITES = 10


@cache
def digits() -> DataSet:
    """Load the 8x8 digits of `sklearn.datasets.load_digits`, with 10 classes and pixels in [-1, 1].

    The split is fixed and public: within each class, every fifth sample in file order is a test
    sample. This gives 1,442 training and 355 test samples.
    """
    table = _digits_table()
    x = (table[:, :-1].reshape(-1, 8, 8) / 8.0 - 1.0).astype(np.float32)[:, None]
    y = table[:, -1].astype(np.int64)
    test = np.zeros(len(y), dtype=bool)
    for label in range(10):
        test[np.flatnonzero(y == label)[_TEST_EVERY - 1 :: _TEST_EVERY]] = True
    return DataSet("digits", x[~test], y[~test], x[test], y[test], classes=10)


def _digits_table() -> np.ndarray:
    """Return the pixels and the class of each digit, float64 [1797, 65]. If possible, they are read
    directly from scikit-learn's file, because importing scikit-learn takes a second.
    """
    spec = importlib.util.find_spec("sklearn")
    for folder in spec.submodule_search_locations or () if spec else ():
        file = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if file.is_file():
            return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return np.column_stack([bunch.data, bunch.target])


@cache
def breast_cancer() -> DataSet:
    """Load the Wisconsin breast cancer table of `sklearn.datasets.load_breast_cancer`, divided into
    ten sites. Target 1 means benign.

    The table has 30 measurements of 569 tumours. The measurements are standardised with the means
    and standard deviations of the test examples, which are public. The table has neither a split
    nor sites, so both follow a fixed rule: every fifth row is a test example, and the other rows
    are assigned to the sites one after another.
    """
    from sklearn.datasets import load_breast_cancer

    table = load_breast_cancer()
    x, y = table.data, table.target
    test = np.arange(len(y)) % _TEST_EVERY == _TEST_EVERY - 1
    mean, deviation = x[test].mean(axis=0), x[test].std(axis=0)
    columns = tuple(
        Column(name=str(name), dtype="float", mean=float(mean[i]), deviation=float(deviation[i]))
        for i, name in enumerate(table.feature_names)
    )
    x = ((x - mean) / deviation).astype(np.float32)
    y = y.astype(np.int64)
    sites = np.arange(np.count_nonzero(~test)) % _SITES
    return DataSet(
        "breast-cancer",
        x[~test],
        y[~test],
        x[test],
        y[test],
        classes=2,
        train_user=sites,
        columns=columns,
    )


def synthetic(
    samples: int = 100_000,
    *,
    classes: int = 10,
    shape: tuple[int, int, int] = (1, 4, 4),
    seed: int = 0,
) -> DataSet:
    """Generate Gaussian classes for tests with many samples: x = mean[y] + N(0, I), with mean[y] ~
    N(0, I) and y uniform.

    Args:
        samples: number of training samples; 10,000 test samples with the same distribution are
            added.
        classes: number of classes.
        shape: shape (C, H, W) of one input.
        seed: public seed, at least 0; together with the sizes it determines every value.

    Returns:
        The set, named "synthetic".

    Raises:
        ConfigError: if a size is not positive or the seed is negative.
    """
    if min(samples, classes, *shape) < 1 or seed < 0:
        raise ConfigError(
            "synthetic data needs samples, classes and shape of at least 1 and a seed of at least "
            f"0, got samples={samples}, classes={classes}, shape={shape}, seed={seed}"
        )
    # The set is a public constant that depends only on the seed, so it is not drawn from a run's
    # KeyRing.
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed)))
    means = rng.standard_normal((classes, *shape), dtype=np.float32)

    def draw(count: int) -> tuple[np.ndarray, np.ndarray]:
        y = rng.integers(classes, size=count)
        x = rng.standard_normal((count, *shape), dtype=np.float32)
        x += means[y]
        return x, y

    train_x, train_y = draw(samples)
    test_x, test_y = draw(_SYNTHETIC_TEST)
    return DataSet("synthetic", train_x, train_y, test_x, test_y, classes=classes)


MADE_HERE: dict[str, tuple[Callable[[], DataSet], int]] = {
    "digits": (digits, 1442),
    "breast-cancer": (breast_cancer, 456),
}
"""For each set, by name, the function that makes it and its number of training examples."""
