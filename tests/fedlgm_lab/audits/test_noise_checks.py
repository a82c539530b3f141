"""What an audit sees of the noise itself: noise that comes back, whatever the rounds and layers, and its law."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch

from fedlgm_lab.audits.law import PLANNED, PROBABILITIES, STATISTICS, counted, least_likely
from fedlgm_lab.audits.order import ordered, same_values
from fedlgm_lab.audits.repeats import Sketches, Windows, most_alike
from tests.fedlgm_lab.audits.test_canaries import LAYERS, SIZES, audited, subject, watched

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


def moved(round, size):
    """Likewise, each number 17 places further on."""
    return np.roll(normal(2, size), 17) if round == 9 else normal(round, size)


def in_another_layer(round, size):
    """The last layer of round 9 has the beginning of the noise that the second one had in round 2."""
    noise = normal(round, size)
    if round == 9:
        noise[-SIZES["c"] :] = normal(2, size)[SIZES["a"] :][: SIZES["c"]]
    return noise


def mixed(round, size):
    """Half of the variance of round 9's noise is that of round 2's."""
    noise = normal(round, size)
    return (noise + normal(2, size)) / np.sqrt(2) if round == 9 else noise


def permuted(round, size):
    """The noise of round 2 in another order over all layers."""
    return np.random.default_rng(7).permutation(normal(2, size)) if round == 9 else normal(round, size)


def reversed_with_signs(round, size):
    """One layer of it backwards, with random signs."""
    noise = normal(round, size)
    if round == 9:
        old = normal(2, size)[-SIZES["c"] :]
        noise[-SIZES["c"] :] = old[::-1] * np.random.default_rng(8).choice([-1.0, 1.0], SIZES["c"])
    return noise


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


@pytest.mark.parametrize("draw", [again, moved, in_another_layer, mixed], ids=lambda draw: draw.__name__)
def test_noise_that_comes_back_rounds_later_is_caught(nine, draw):
    result, failed = failing(nine, noising(draw))
    assert failed == {"noise repetition"}
    detail = next(check.detail for check in result.checks if check.name == "noise repetition")
    assert "rounds 2 and 9" in detail if draw in (again, mixed) else "round 9" in detail
    assert result.epsilon_lower > result.epsilon_reported or draw is mixed  # it can be taken off


@pytest.mark.parametrize("draw", [permuted, reversed_with_signs])
def test_noise_that_comes_back_in_another_order_is_caught(nine, draw):
    result, failed = failing(nine, noising(draw))
    assert failed == {"noise repetition"}
    detail = next(check.detail for check in result.checks if check.name == "noise repetition")
    assert detail.startswith("all layers" if draw is permuted else "c")
    assert "rounds 2 and 9 have the same values, in another order or with other signs" in detail


@pytest.mark.parametrize("size", [8, 40, 100_000])
def test_draws_of_any_size_differ_in_their_sorted_values(size):
    """2,000 small draws make two million pairs; the check has no level to spend."""
    rng = np.random.default_rng(9)
    rounds = [ordered(rng.standard_normal(size), {0: (0, size)}, 1) for _ in range(2000 if size < 100 else 40)]
    assert same_values(np.stack(rounds)) is None
    rounds.append(rounds[3] + 1e-6)
    assert same_values(np.stack(rounds)) == (0, 3, len(rounds) - 1)


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
    assert "between -0.0001 and 0.0001" in next(c for c in result.checks if c.name == "noise law").detail


def test_one_layer_of_another_law_is_caught(nine):
    rng = np.random.default_rng(6)

    def draw(round, size):
        noise = normal(round, size)
        noise[: SIZES["a"]] = SCALED["uniform"](rng, SIZES["a"])
        return noise

    result, failed = failing(nine, noising(draw))
    assert failed == {"noise law"}
    assert next(c for c in result.checks if c.name == "noise law").detail.startswith("least likely in a:")


def test_sketches_are_normal_and_the_same_for_the_same_noise():
    sizes = LAYERS.sizes
    sketches = Sketches(sizes, np.random.default_rng(0).bytes(int(sizes.sum()) // 8 + 1))
    ends = np.concatenate([[0], np.cumsum(sizes)])
    spans = {j: (int(ends[j]), int(ends[j + 1])) for j in range(len(sizes))}
    rows = np.stack([sketches.of(normal(t, int(sizes.sum())), spans) for t in (1, 2, 3, 2)])
    known = rows[~np.isnan(rows)]
    assert abs(known.std() - 1) < 0.06
    assert most_alike(rows)[2][1:] == (1, 3)
    assert most_alike(rows[:3])[0] < 5
    assert most_alike(rows[:1])[0] == 0


def test_windows_are_found_wherever_they_come_back():
    windows, spans = Windows(), [(0, 100), (100, 400)]
    quiet = [windows.of(normal(t, 400), spans) for t in (1, 2)]
    assert max(row[0] for row in quiet) < 6
    assert quiet[1][2] > quiet[0][2] > 0
    later = normal(3, 400)
    later[250:330] = normal(1, 400)[100:180]
    assert windows.of(later, spans)[0] > 20
    same = normal(4, 400)
    same[300:380] = same[:80]  # in one round
    assert windows.of(same, spans)[0] > 20


def test_windows_pass_over_what_was_not_seen():
    noise = normal(1, 400)
    noise[50:90] = np.nan
    assert Windows().of(noise, [(0, 400)])[0] < 6


def test_cells_hold_everything_and_their_counts_are_binomial():
    assert PROBABILITIES.sum() == pytest.approx(1.0)
    assert PLANNED[-3:] == pytest.approx([2 * scipy.stats.norm.sf(edge) for edge in (2.5, 3.0, 3.5)])
    assert counted(normal(1, 999)).sum() == 999
    rng, share = np.random.default_rng(7), 0.05
    found = sum(least_likely(counted(rng.standard_normal(300)))[0] < share / STATISTICS for _ in range(1000))
    assert found < 70  # of level 0.05 in a thousand
