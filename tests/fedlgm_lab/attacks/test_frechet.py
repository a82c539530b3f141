from __future__ import annotations

import numpy as np
import pytest
import torch

from fedlgm import data
from fedlgm.errors import ConfigError
from fedlgm_lab.attacks.frechet import FEATURES, PublicClassifier, frechet_distance


def exact(mean: list[float], cov: list[list[float]], count: int = 400) -> np.ndarray:
    """A sample whose mean and covariance are exactly these."""
    z = np.random.default_rng(0).standard_normal((count, len(mean)))
    z -= z.mean(0)
    z = z @ np.linalg.inv(np.linalg.cholesky(np.cov(z, rowvar=False))).T
    return z @ np.linalg.cholesky(np.array(cov)).T + mean


def test_known_answers():
    first = exact([0.0, 0.0], [[1.0, 0.0], [0.0, 4.0]])
    second = exact([3.0, 4.0], [[9.0, 0.0], [0.0, 16.0]])
    # Diagonal laws: 25 + (1 - 3)^2 + (2 - 4)^2
    assert frechet_distance(first, second) == pytest.approx(33.0)
    assert frechet_distance(first, first) == pytest.approx(0.0, abs=1e-9)


def test_matches_scipys_matrix_root():
    from scipy.linalg import sqrtm

    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal((60, 5)) @ rng.standard_normal((5, 5)) for _ in range(2))
    ca, cb = np.cov(a, rowvar=False), np.cov(b, rowvar=False)
    expected = ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(
        ca + cb - 2 * np.real(sqrtm(ca @ cb))
    )
    assert frechet_distance(a, b) == pytest.approx(expected)
    assert frechet_distance(b, a) == pytest.approx(expected)


def test_a_singular_covariance_is_no_obstacle():
    rng = np.random.default_rng(1)
    assert np.isfinite(frechet_distance(rng.standard_normal((4, 16)), rng.standard_normal((4, 16))))


def test_public_classifier_orders_sets_of_digits():
    digits = data.load("digits")
    before = torch.get_rng_state()
    classifier = PublicClassifier.train(
        torch.from_numpy(digits.test_x), torch.from_numpy(digits.test_y), 10
    )
    assert torch.equal(before, torch.get_rng_state())
    assert classifier.accuracy > 0.85
    threes = torch.from_numpy(digits.train_x[digits.train_y == 3])
    fives = torch.from_numpy(digits.train_x[digits.train_y == 5])
    noise = torch.rand(threes.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    assert classifier.features(threes).shape == (len(threes), FEATURES)
    same, other = classifier.distance(threes[::2], threes[1::2]), classifier.distance(threes, fives)
    assert 10 * same < other
    assert 10 * same < classifier.distance(threes, noise)
    assert classifier.agreement(threes, 3) > 0.8


def test_refuses():
    with pytest.raises(ConfigError, match="the same width"):
        frechet_distance(np.zeros((5, 2)), np.zeros((5, 3)))
    with pytest.raises(ConfigError, match="at least 10 images"):
        PublicClassifier.train(torch.zeros(3, 1, 8, 8), torch.zeros(3, dtype=torch.int64), 2)
