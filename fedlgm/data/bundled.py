"""Sets that need no file: scikit-learn's digits and synthetic class blobs."""

from __future__ import annotations

from functools import cache

import numpy as np

from fedlgm.data.dataset import DataSet
from fedlgm.errors import ConfigError

_TEST_EVERY = 5
_SYNTHETIC_TEST = 10_000


@cache
def digits() -> DataSet:
    """8x8 digits of `sklearn.datasets.load_digits`, 10 classes, pixels in [-1, 1].

    The split is fixed and public: within each class, every fifth sample in file order is a test sample. That makes
    1,442 training and 355 test samples.
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x = (bunch.images / 8.0 - 1.0).astype(np.float32)[:, None]
    y = bunch.target.astype(np.int64)
    by_class = np.argsort(y, kind="stable")
    starts = np.searchsorted(y[by_class], np.arange(10))
    rank = np.empty_like(y)
    rank[by_class] = np.arange(len(y)) - starts[y[by_class]]
    test = rank % _TEST_EVERY == _TEST_EVERY - 1
    return DataSet("digits", x[~test], y[~test], x[test], y[test], classes=10)


def synthetic(
    samples: int = 100_000, *, classes: int = 10, shape: tuple[int, int, int] = (1, 4, 4), seed: int = 0
) -> DataSet:
    """Gaussian class blobs for tests of scale: x = mean[y] + N(0, I), with mean[y] ~ N(0, I) and y uniform.

    Args:
        samples: number of training samples; 10,000 test samples of the same law come on top.
        classes: number of classes.
        shape: shape (C, H, W) of one input.
        seed: public seed, 0 <= seed < 2**128; it determines every value.

    Returns:
        The set, named "synthetic".

    Raises:
        ConfigError: if a size is not positive or the seed is negative.
    """
    if min(samples, classes, *shape) < 1 or seed < 0:
        raise ConfigError(
            f"synthetic data needs samples, classes and shape of at least 1 and a seed of at least 0, "
            f"got samples={samples}, classes={classes}, shape={shape}, seed={seed}"
        )
    # The set is a public constant of its seed, not a stream of a run: it does not go through a run's KeyRing.
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
