"""The same figures from jax_privacy, where the test-peers extra is installed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from fedlgm.noise import correlation
from fedlgm.noise.correlation import Correlation

jax = pytest.importorskip("jax", reason="the test-peers extra is not installed")
peer = pytest.importorskip(
    "jax_privacy.matrix_factorization", reason="the test-peers extra is not installed"
)


@pytest.fixture(autouse=True)
def double_precision():
    before = jax.config.jax_enable_x64
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", before)


def test_optimal_coefficients():
    ours = correlation.get("banded", 64, bands=8)
    theirs = np.array(peer.toeplitz.optimize_banded_toeplitz(64, 8))
    np.testing.assert_allclose(
        ours.coefficients, theirs / np.linalg.norm(theirs), rtol=0, atol=1e-6
    )


def test_square_root():
    ours = correlation.get("square-root", 50).coefficients
    np.testing.assert_allclose(
        ours / ours[0], peer.toeplitz.optimal_max_error_strategy_coefs(50), rtol=1e-12
    )


def test_errors():
    for c in (correlation.get("banded", 40, bands=5), correlation.get("square-root", 40)):
        theirs = np.array(peer.toeplitz.per_query_error(strategy_coef=c.coefficients, n=40))
        assert c.error() == pytest.approx(math.sqrt(theirs.mean()), rel=1e-9)
        assert c.error(reduce="max") == pytest.approx(math.sqrt(theirs.max()), rel=1e-9)


@pytest.mark.parametrize(
    ("separation", "limit"), [(3, None), (3, 2), (7, None), (10, None), (1, 4)]
)
def test_sensitivities(separation, limit):
    most = limit or -(-40 // separation)
    straight = Correlation("own", 40, 1 - np.arange(10) / 10)
    theirs = peer.toeplitz.minsep_sensitivity_squared(straight.coefficients, separation, most, 40)
    assert straight.sensitivity(separation, limit) == pytest.approx(math.sqrt(theirs), rel=1e-9)
    rising = Correlation("own", 40, np.random.default_rng(1).random(6) + 0.5)
    if separation >= 6:
        theirs = peer.sensitivity.get_sensitivity_banded(rising.matrix(), separation, most)
    else:
        theirs = peer.sensitivity.get_min_sep_sensitivity_upper_bound(
            rising.matrix(), separation, most
        )
    assert rising.sensitivity(separation, limit) == pytest.approx(float(theirs), rel=1e-6)


@pytest.mark.parametrize(("separation", "buffers"), [(5, 1), (5, 2), (40, 2)])
def test_buffers(separation, buffers):
    """Coefficients, error and sensitivity of a buffered strategy."""
    c = correlation.get("blt", 40, min_separation=separation, buffers=buffers)
    theirs = peer.buffered_toeplitz.BufferedToeplitz.build(
        buf_decay=list(c.decays), output_scale=list(c.scales)
    )
    np.testing.assert_allclose(c.coefficients, np.array(theirs.toeplitz_coefs(40)), rtol=1e-9)
    squared = peer.toeplitz.minsep_sensitivity_squared(
        c.coefficients, separation, -(-40 // separation), 40
    )
    assert c.sensitivity(separation) == pytest.approx(math.sqrt(squared), rel=1e-9)
    errors = np.array(peer.toeplitz.per_query_error(strategy_coef=c.coefficients, n=40))
    assert c.error() == pytest.approx(math.sqrt(errors.mean()), rel=1e-9)
