"""Known answers: prefix workload, z of standard deviation 1, one coordinate."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedlgm.noise import correlation
from fedlgm.noise.correlation import Correlation, Workload

# T, bands b, and mean and largest error of: the square root, the optimum for the mean, the optimum
# for the maximum.
ERRORS = [
    (16, 1, (2.91548, 4.00000), (2.91548, 4.00000), (2.91548, 4.00000)),
    (16, 2, (2.29818, 3.07318), (2.28291, 3.03211), (2.28884, 3.02511)),
    (16, 4, (1.94120, 2.46927), (1.93753, 2.45121), (1.94975, 2.43658)),
    (16, 8, (1.79288, 2.12198), (1.78594, 2.13780), (1.80558, 2.11321)),
    (16, 16, (1.79681, 1.94388), (1.75043, 2.01251), (1.79681, 1.94388)),
    (64, 1, (5.70088, 8.00000), (5.70088, 8.00000), (5.70088, 8.00000)),
    (64, 2, (4.31417, 6.00925), (4.20176, 5.81380), (4.20788, 5.80705)),
    (64, 4, (3.35113, 4.58545), (3.24059, 4.36549), (3.25415, 4.35025)),
    (64, 8, (2.71943, 3.58883), (2.66397, 3.44705), (2.68364, 3.42429)),
    (64, 16, (2.36071, 2.93896), (2.35005, 2.89448), (2.37252, 2.86752)),
    (64, 64, (2.22968, 2.38885), (2.17904, 2.46796), (2.22968, 2.38885)),
    (300, 1, (12.26784, 17.32051), (12.26784, 17.32051), (12.26784, 17.32051)),
    (300, 2, (9.17425, 12.93144), (8.80146, 12.36462), (8.80683, 12.35892)),
    (300, 5, (6.33687, 8.87358), (5.85585, 8.09347), (5.87160, 8.07648)),
    (300, 10, (4.86455, 6.72535), (4.48873, 6.06045), (4.51351, 6.03331)),
    (300, 20, (3.83854, 5.16928), (3.62141, 4.72563), (3.65243, 4.69076)),
    (300, 50, (3.03847, 3.83362), (2.98567, 3.67577), (3.01737, 3.63814)),
    (300, 300, (2.71918, 2.88158), (2.66672, 2.96585), (2.71918, 2.88158)),
]
FIVE_DIGITS = {"abs": 6e-6, "rel": 0}


@pytest.mark.parametrize(
    ("rounds", "bands", "root", "mean", "largest"), ERRORS, ids=lambda x: str(x)
)
def test_errors_and_sensitivities(rounds, bands, root, mean, largest):
    for expected, c in (
        (root, correlation.get("square-root", rounds, bands=bands)),
        (mean, correlation.get("banded", rounds, bands=bands)),
        (largest, correlation.get("banded", rounds, bands=bands, reduce="max")),
    ):
        assert c.error() == pytest.approx(expected[0], **FIVE_DIGITS)
        assert c.error(reduce="max") == pytest.approx(expected[1], **FIVE_DIGITS)
        assert np.linalg.norm(c.coefficients) == pytest.approx(1, abs=1e-12)
        assert c.bands == bands
        k = -(-rounds // bands)
        assert c.amplified_column_norm() == pytest.approx(1, abs=1e-9)
        if rounds % bands == 0:
            assert c.sensitivity(bands) == pytest.approx(math.sqrt(k), abs=1e-6)


def test_long_runs():
    """Where truncating the square root costs most; an optimiser's first step must not leave where
    C^-1 is stable."""
    for bands, root, best in ((10, 12.095, 10.468), (50, 6.343, 5.544)):
        assert correlation.get("square-root", 2000, bands=bands).error() == pytest.approx(
            root, abs=6e-4
        )
        assert correlation.get("banded", 2000, bands=bands).error() == pytest.approx(best, abs=6e-4)


@pytest.mark.parametrize(
    ("rounds", "coefficients"),
    [
        (16, ".794875 .438433 .329274 .259862"),
        (64, ".676678 .397713 .323760 .283046 .254409 .231377 .210888 .190427"),
        (300, ".561861 .370519 .322079 .295901 .277519 .262635 .249334 .236387 .222527 .205372"),
    ],
)
def test_optimal_coefficients(rounds, coefficients):
    expected = np.array(coefficients.split(), dtype=float)
    found = correlation.get("banded", rounds, bands=expected.size).coefficients
    np.testing.assert_allclose(found, expected, rtol=0, atol=1.5e-6)


def test_square_root_is_the_root():
    c = correlation.get("square-root", 32)
    np.testing.assert_allclose(
        c.coefficients[:5] / c.coefficients[0], [1, 0.5, 0.375, 0.3125, 0.2734375]
    )
    workload = Workload(momentum=0.9, decay=0.97)
    root = correlation.get("square-root", 32, workload=workload)
    scaled = root.matrix() / root.coefficients[0]
    np.testing.assert_allclose(scaled @ scaled, workload.matrix(32), atol=1e-13)


@pytest.mark.parametrize(
    ("rounds", "separation", "decays", "scales", "sensitivity", "mean", "largest"),
    [
        (16, 4, [0.52980], [0.61245], 2.62840, 1.54317, 1.94783),
        (64, 8, [0.78507], [0.62768], 4.51398, 1.77003, 2.27685),
        (300, 10, [0.87019], [0.64510], 11.30719, 2.30491, 3.08354),
        (300, 50, [0.95904, 0.36136], [0.33866, 0.17784], 4.29374, 1.78773, 2.20043),
        (300, None, [0.98911, 0.78798], [0.14285, 0.32427], 1.62430, 1.64608, 1.83292),
        (64, None, [0.95650, 0.58980], [0.25433, 0.24687], 1.46247, 1.49057, 1.68429),
    ],
)
def test_buffered_toeplitz(rounds, separation, decays, scales, sensitivity, mean, largest):
    c = correlation.get("blt", rounds, buffers=len(decays), min_separation=separation)
    assert c.bands is None
    assert c.coefficients[0] == 1
    np.testing.assert_allclose(c.decays, decays, rtol=0, atol=6e-6)
    np.testing.assert_allclose(c.scales, scales, rtol=0, atol=6e-6)
    once = c.sensitivity(1, 1)
    assert (c.sensitivity(separation) if separation else once) == pytest.approx(
        sensitivity, **FIVE_DIGITS
    )
    assert c.error() == pytest.approx(mean, **FIVE_DIGITS)
    assert c.error(reduce="max") == pytest.approx(largest, **FIVE_DIGITS)


def test_more_buffers():
    """Sensitivity times error: three buffers are within 0.03 % of all Toeplitz matrices; min-sep
    gains nothing."""
    three = correlation.get("blt", 300, buffers=3)
    assert three.sensitivity(1, 1) * three.error() == pytest.approx(2.6676, abs=6e-5)
    one = correlation.get("blt", 300, buffers=1)
    assert one.sensitivity(1, 1) * one.error() == pytest.approx(2.8413, abs=6e-5)
    for buffers in (1, 2):
        c = correlation.get("blt", 300, buffers=buffers, min_separation=10)
        assert c.sensitivity(10) * c.error() / math.sqrt(30) == pytest.approx(4.7583, abs=6e-5)


def test_largest_error_of_buffered_toeplitz():
    mean, largest = (correlation.get("blt", 300, reduce=reduce) for reduce in ("mean", "max"))
    products = [
        [c.sensitivity(1, 1) * c.error(reduce=reduce) for reduce in ("mean", "max")]
        for c in (mean, largest)
    ]
    assert products[0][0] < products[1][0]
    assert products[1][1] < products[0][1]


def test_sensitivities():
    straight = 1 - np.arange(10) / 10
    short, long = (Correlation("own", rounds, straight) for rounds in (16, 64))
    assert short.sensitivity(3) == pytest.approx(6.684310, abs=1e-6)
    assert short.sensitivity(3, 2) == pytest.approx(3.489986, abs=1e-6)
    assert long.sensitivity(7, 5) == pytest.approx(4.871345, abs=1e-6)
    assert short.sensitivity(4) == pytest.approx(5.075431, abs=1e-6)
    root = Correlation("own", 16, [1, 0.5, 0.375, 0.3125])
    assert root.sensitivity(4) == pytest.approx(2.439903, abs=1e-6)


def test_column_norms_of_plain_square_roots():
    for bands, norm in ((2, 1.118), (4, 1.220), (10, 1.338), (300, 1.698)):
        c = correlation.get("square-root", 300, bands=bands)
        plain = Correlation("own", 300, c.coefficients / c.coefficients[0])
        assert plain.amplified_column_norm() == pytest.approx(norm, abs=6e-4)


def test_momentum():
    rounds, workload = 300, Workload(momentum=0.9)
    found = [
        correlation.get("banded", rounds, bands=10, workload=workload),
        correlation.get("square-root", rounds, bands=10, workload=workload),
        correlation.get("banded", rounds, bands=10),
        correlation.get("identity", rounds),
    ]
    assert [c.error(workload) for c in found] == pytest.approx(
        [37.97, 38.08, 39.61, 117.15], abs=6e-3
    )


@pytest.mark.parametrize(
    ("bands", "first", "late"),
    [(2, 1.30, 2.32), (5, 1.66, 2.39), (10, 1.78, 2.26), (50, 1.69, 1.94)],
)
def test_a_rounds_noise_is_not_that_of_z(bands, first, late):
    std = correlation.get("banded", 300, bands=bands).noise_std()
    assert (std[0], std[-1]) == pytest.approx((first, late), abs=6e-3)


@pytest.mark.parametrize(
    ("bands", "mean", "largest"),
    [(5, 0.477, 0.466), (10, 0.366, 0.348), (20, 0.295, 0.271), (50, 0.243, 0.210)],
)
def test_gain_without_amplification(bands, mean, largest):
    """Same schema on both sides, so the sensitivities are equal."""
    independent = correlation.get("identity", 300)
    assert independent.sensitivity(bands) == pytest.approx(
        correlation.get("banded", 300, bands=bands).sensitivity(bands)
    )
    for reduce, expected in (("mean", mean), ("max", largest)):
        c = correlation.get("banded", 300, bands=bands, reduce=reduce)
        ratio = c.error(reduce=reduce) / independent.error(reduce=reduce)
        assert ratio == pytest.approx(expected, abs=6e-4)
