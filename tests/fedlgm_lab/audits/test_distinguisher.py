"""Releases of many numbers: what tells them apart may lie in a few of them, or in their scales
alone."""

from __future__ import annotations

import warnings

import pytest

from fedlgm.errors import Notice
from fedlgm_lab.audits import audit_release

SIZE = 300  # more than 1000 trials can learn the covariance of


def three_without_noise(world, rng):
    """A shift of a hundredth in three numbers that have no noise, beside 297 that have plenty."""
    noise = 5.0 * rng.standard_normal(SIZE)
    noise[:3] = 0.01 * world
    return noise


def three_of_another_scale(world, rng):
    noise = rng.standard_normal(SIZE)
    noise[:3] *= 1 + 2 * world
    return noise


def alike(world, rng):
    return 5.0 * rng.standard_normal(SIZE)


@pytest.mark.parametrize("release", [three_without_noise, three_of_another_scale])
def test_a_few_numbers_of_many_give_a_release_away(release):
    result = audit_release(release, epsilon=1.0, delta=1e-5, trials=1000, seed=0)
    assert not result.passed
    assert result.epsilon_lower > 1.5


@pytest.mark.parametrize("epsilon", [0.5, 1.5, 4.0, 8.0])
@pytest.mark.parametrize("trials", [100, 1000])
def test_numbers_without_noise_never_pass_in_silence(epsilon, trials):
    """100 trials show 1.35 of them, and could show 1.81: a reported 1.5 passed without a word."""

    def release(world, rng):
        noise = 5.0 * rng.standard_normal(200)
        noise[[3, 70, 199]] = 0.01 * world
        return noise

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = audit_release(release, epsilon=epsilon, delta=1e-5, trials=trials, seed=0)
    told = [str(warning.message) for warning in caught]
    assert not found.passed or any(
        "3 of 200 numbers have no noise, the first at index 3" in text for text in told
    )


def test_releases_that_are_alike_pass():
    assert audit_release(alike, epsilon=0.01, delta=1e-5, trials=1000, seed=0).passed
    assert audit_release(
        alike, epsilon=0.01, delta=1e-5, trials=1000, seed=0, noise="gaussian"
    ).passed


def test_an_audit_that_cannot_fail_says_so():
    """Counted errors of 1000 trials never reach an epsilon of 8, even if numbers have no noise at
    all."""
    words = r"show an epsilon of at most 4\.\d+ .* the audit cannot fail; raise trials, or pass noise='gaussian'"
    bare = "without noise: 3 of 300 numbers have no noise, the first at index 0"
    with pytest.warns(Notice, match=f"{words}.*{bare}"):
        assert audit_release(
            three_without_noise, epsilon=8.0, delta=1e-5, trials=1000, seed=0
        ).passed
    with pytest.warns(Notice, match=f"{words} if the release is linear$"):
        audit_release(alike, epsilon=8.0, delta=1e-5, trials=1000, seed=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        audit_release(alike, epsilon=8.0, delta=1e-5, trials=1000, seed=0, noise="gaussian")
        audit_release(alike, epsilon=1.0, delta=1e-5, trials=1000, seed=0)
        linear = audit_release(
            three_without_noise, epsilon=8, delta=1e-5, trials=1000, seed=0, noise="gaussian"
        )
        assert not linear.passed
