from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedlgm.errors import ConfigError
from fedlgm_lab.attacks.images import match, psnr, ssim


def pictures(seed: int, shape: tuple[int, ...] = (1, 12, 9)) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    first = rng.uniform(-1, 1, shape)
    return first, np.clip(first + 0.3 * rng.standard_normal(shape), -1, 1)


def test_ssim_has_scikit_images_values():
    # skimage.metrics.structural_similarity(a, b, win_size=7, data_range=2.0) of scikit-image 0.26
    # on these pictures.
    assert ssim(*pictures(0)) == pytest.approx(SKIMAGE[0], abs=1e-12)
    assert ssim(*pictures(1, (20, 20))) == pytest.approx(SKIMAGE[1], abs=1e-12)
    assert ssim(*pictures(2, (3, 16, 16))) == pytest.approx(SKIMAGE[2], abs=1e-12)


SKIMAGE = (0.726969055395513, 0.48392169715081323, 0.568396724517453)


def test_ssim_is_one_only_for_equal_images():
    first, second = pictures(0)
    assert ssim(first, first) == pytest.approx(1.0)
    assert ssim(first, second) < 1


@given(st.integers(0, 10_000))
def test_ssim_is_symmetric_and_bounded(seed):
    first, second = pictures(seed)
    assert ssim(first, second) == pytest.approx(ssim(second, first))
    assert -1 <= ssim(first, second) <= 1


def test_psnr_known_answer():
    assert psnr(np.zeros((1, 4, 4)), np.full((1, 4, 4), 0.02)) == pytest.approx(40.0)
    assert math.isinf(psnr(np.ones(3), np.ones(3)))


def test_match_finds_the_order():
    images = np.stack([pictures(seed)[0] for seed in range(5)])
    order = np.array([3, 0, 4, 1, 2])
    assert (match(images[np.argsort(order)], images) == order).all()


@pytest.mark.parametrize("shapes", [((1, 8, 8), (1, 8, 9)), ((8,), (8,)), ((6, 6), (6, 6))])
def test_ssim_refuses(shapes):
    with pytest.raises(ConfigError):
        ssim(np.zeros(shapes[0]), np.zeros(shapes[1]))
