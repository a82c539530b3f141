"""Similarity between reconstructed and private images: SSIM, PSNR, and the matching of unordered
sets of images.
"""

from __future__ import annotations

import math

import numpy as np
from scipy.ndimage import uniform_filter
from scipy.optimize import linear_sum_assignment

from fedlgm.errors import ConfigError

PIXEL_RANGE = 2.0
"""Width of the interval [-1, 1] in which the pixels of the library's data sets lie."""
_WINDOW = 7  # side of the windows of SSIM


def ssim(first: np.ndarray, second: np.ndarray) -> float:
    """Compute the mean structural similarity of two images, in [-1, 1]; 1 only for equal images.

    Windows are uniform, covariances are unbiased, and a border of half a window is left out. These
    are the defaults of `skimage.metrics.structural_similarity`, with which tests compare the
    result.

    Args:
        first: an image [C, H, W] or [H, W].
        second: an image of the same shape.

    Raises:
        ConfigError: the shapes differ, or an image is below 7x7 pixels.

    Source: Wang, Bovik, Sheikh and Simoncelli, IEEE Transactions on Image Processing 13 (2004),
        equation 13.

    Example:
        >>> image = np.linspace(-1, 1, 64).reshape(8, 8)
        >>> round(ssim(image, image), 6)
        1.0
    """
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if a.shape != b.shape or a.ndim not in (2, 3):
        raise ConfigError(
            f"ssim compares two images [C, H, W] or [H, W] of one shape, got {a.shape} and "
            f"{b.shape}"
        )
    if min(a.shape[-2:]) < _WINDOW:
        raise ConfigError(
            f"ssim compares images of at least {_WINDOW}x{_WINDOW} pixels, got {a.shape}"
        )
    size = (1,) * (a.ndim - 2) + (_WINDOW, _WINDOW)
    unbiased = _WINDOW**2 / (_WINDOW**2 - 1)

    def mean(values: np.ndarray) -> np.ndarray:
        return uniform_filter(values, size)

    mean_a, mean_b = mean(a), mean(b)
    var_a, var_b = (unbiased * (mean(v * v) - m * m) for v, m in ((a, mean_a), (b, mean_b)))
    cov = unbiased * (mean(a * b) - mean_a * mean_b)
    c1, c2 = (0.01 * PIXEL_RANGE) ** 2, (0.03 * PIXEL_RANGE) ** 2
    index = (
        (2 * mean_a * mean_b + c1)
        * (2 * cov + c2)
        / ((mean_a**2 + mean_b**2 + c1) * (var_a + var_b + c2))
    )
    border = _WINDOW // 2
    return float(index[..., border:-border, border:-border].mean())


def psnr(first: np.ndarray, second: np.ndarray) -> float:
    """Compute the peak signal-to-noise ratio of two images, in decibels; infinite for equal images.

    Args:
        first: an image of any shape.
        second: an image of the same shape.

    Raises:
        ConfigError: the images have different shapes.

    Example:
        >>> round(psnr(np.zeros(4), np.full(4, 0.2)), 3)
        20.0
    """
    if np.shape(first) != np.shape(second):
        raise ConfigError(
            f"psnr compares images of one shape, got {np.shape(first)} and {np.shape(second)}"
        )
    error = float(
        np.mean((np.asarray(first, dtype=np.float64) - np.asarray(second, dtype=np.float64)) ** 2)
    )
    return math.inf if error == 0 else 10 * math.log10(PIXEL_RANGE**2 / error)


def match(reconstructed: np.ndarray, private: np.ndarray) -> np.ndarray:
    """Assign a reconstruction to every private image so that the sum of the pairs' SSIM is largest.

    An update does not reveal the order of a client's images, so the order of reconstructions has no
    meaning.

    Args:
        reconstructed: reconstructed images [n, C, H, W].
        private: private images [n, C, H, W].

    Returns:
        Indices into `reconstructed`, one for each private image, int64 [n].
    """
    similarity = np.array([[ssim(guess, truth) for guess in reconstructed] for truth in private])
    return linear_sum_assignment(similarity, maximize=True)[1]
