"""An audit's checks of the noise of a user's release: noise that comes back in any round or layer,
and its law."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.fedlgm_lab.audits.test_canaries import SIZES, audited, subject, watched

SCALED = {  # laws of variance 1
    "uniform": lambda rng, n: rng.uniform(-np.sqrt(3), np.sqrt(3), n),
    "Laplace": lambda rng, n: rng.laplace(scale=np.sqrt(0.5), size=n),
    "truncated": lambda rng, n: truncated(rng, n),
    "two points": lambda rng, n: rng.choice([-1.0, 1.0], n),
}


def truncated(rng, n):
    """Normal numbers cut off at 2.5, of variance 1 again."""
    drawn = rng.standard_normal(3 * n + 50)
    drawn = drawn[np.abs(drawn) < 2.5][:n]
    return drawn / 0.9546


def noising(draw):
    """A release whose noise in units of the plan's is draw(round, coordinates of all layers)."""

    def publish(plan, total, keys, round):
        scale = np.concatenate([np.full(size, sigma) for _, size, _, sigma in plan.parts])
        return total + torch.from_numpy(scale * draw(round, len(scale)))

    return publish


def normal(round, size):
    return np.random.default_rng(1000 + round).standard_normal(size)


def again(round, size):
    """Round 9 has the noise of round 2."""
    return normal(2 if round == 9 else round, size)


def in_another_layer(round, size):
    """The last layer of round 9 has the beginning of the noise that the second one had in round
    2."""
    noise = normal(round, size)
    if round == 9:
        noise[-SIZES["c"] :] = normal(2, size)[SIZES["a"] :][: SIZES["c"]]
    return noise


def mixed(round, size):
    """Half of the variance of round 9's noise is that of round 2's."""
    noise = normal(round, size)
    return (noise + normal(2, size)) / np.sqrt(2) if round == 9 else noise


def seeded_by_sums(round, size):
    """A generator for each layer, seeded with the sum of the numbers of round and layer."""
    parts = enumerate(SIZES.values())
    return np.concatenate(
        [np.random.default_rng(round + j).standard_normal(part) for j, part in parts]
    )


def partly_kept(round, size):
    """A hundredth of the variance is that of the round before."""
    return np.sqrt(0.99) * normal(round, size) + 0.1 * normal(round - 1, size)


@pytest.fixture(scope="module")
def nine():
    return subject(rounds=9)


def failing(of, publish):
    result = audited(of, watched(of, publish, count=60), per_layer=False)
    return result, {check.name for check in result.checks if not check.passed}


def test_noise_as_planned_passes(nine):
    result, failed = failing(nine, noising(normal))
    assert result.passed
    assert not failed


@pytest.mark.parametrize(
    ("draw", "seen"),
    [
        (again, "in round 2 and"),
        (in_another_layer, "b in round 2 and c in round 9"),
        (mixed, "in round 2 and"),
        (seeded_by_sums, "in round"),
    ],
)
def test_noise_that_comes_back_is_caught(nine, draw, seen):
    result, failed = failing(nine, noising(draw))
    assert "noise repetition" in failed
    assert seen in next(check.detail for check in result.checks if check.name == "noise repetition")


def test_noise_that_is_correlated_over_rounds_is_caught(nine):
    """Too little for any two rounds."""
    assert failing(nine, noising(partly_kept))[1] == {"noise independence"}


@pytest.mark.parametrize("law", SCALED)
def test_noise_of_another_law_and_the_same_variance_is_caught(nine, law):
    rng = np.random.default_rng(5)
    _, failed = failing(nine, noising(lambda round, size: SCALED[law](rng, size)))
    assert "noise law" in failed


@pytest.mark.parametrize("bare", [1, 16])
def test_numbers_without_noise_are_caught(nine, bare):
    """Too few for the scale of their layer."""

    def draw(round, size):
        noise = normal(round, size)
        noise[-bare:] = 0.0
        return noise * np.sqrt(size / (size - bare))

    result, failed = failing(nine, noising(draw))
    assert failed == {"noise law"}
    assert "between 0 and 0.0001" in next(c for c in result.checks if c.name == "noise law").detail


def test_one_layer_of_another_law_is_caught(nine):
    rng = np.random.default_rng(6)

    def draw(round, size):
        noise = normal(round, size)
        noise[: SIZES["a"]] = SCALED["uniform"](rng, SIZES["a"])
        return noise

    result, failed = failing(nine, noising(draw))
    assert failed == {"noise law"}
    assert next(c for c in result.checks if c.name == "noise law").detail.startswith(
        "least likely in a:"
    )
