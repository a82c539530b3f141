"""Measured privacy loss of clients, cohorts and directions that react to everything released so
far.

Six rounds, at least three between two participations, vectors of two numbers. The adversary knows
everything but the noise (and the coins): its log-likelihood ratio for "the client is there" is
computed round by round."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant

from fedlgm.noise import correlation
from fedlgm.privacy import gaussian_delta

ROUNDS, SEPARATION, RUNS, CLIP = 6, 3, 200_000, 0.9
NOISE = correlation.get("banded", ROUNDS, bands=SEPARATION)


class Runs:
    """Many runs at once: releases y = x + C^-1 z, and C y as the adversary sees it."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.w = np.einsum(
            "tr,nrd->ntd", NOISE.inverse(), self.rng.standard_normal((RUNS, ROUNDS, 2))
        )
        self.y = np.zeros((RUNS, ROUNDS, 2))
        self.others = np.zeros((RUNS, ROUNDS, 2))
        self.client = np.zeros((RUNS, ROUNDS, 2))

    def release(self, t: int, client: np.ndarray) -> None:
        """Round t: the others drift with what was released, too."""
        past = self.y[:, t - 1] if t > 0 else np.zeros((RUNS, 2))
        self.others[:, t] = np.tanh(past[:, ::-1])
        self.client[:, t] = client
        self.y[:, t] = self.others[:, t] + client + self.w[:, t]

    def seen(self, t: int) -> np.ndarray:
        """Row t of C y without what the others added, [n, 2]."""
        return np.einsum("r,nrd->nd", NOISE.matrix()[t], self.y - self.others)

    def direction(self, t: int) -> np.ndarray:
        """The past's own direction, [n, 2] of norm 1."""
        past = self.y[:, :t].sum(axis=1) + np.array([1e-9, 0.0])
        return past / np.linalg.norm(past, axis=1, keepdims=True)


def delta(loss: np.ndarray, epsilon: float) -> tuple[float, float]:
    """Measured delta and its standard error from losses under "the client is there"."""
    beyond = np.maximum(0.0, -np.expm1(epsilon - loss))
    return float(beyond.mean()), float(beyond.std() / math.sqrt(len(loss)))


def play(seed: int, reacts: bool) -> tuple[np.ndarray, np.ndarray]:
    """Losses and summed squared shifts of a client that comes whenever it likes and may, [n]
    each."""
    runs, c = Runs(seed), NOISE.matrix()
    last = np.full(RUNS, -SEPARATION)
    loss, spent = np.zeros(RUNS), np.zeros(RUNS)
    for t in range(ROUNDS):
        wants = runs.y[:, t - 1, 0] > 0.5 if reacts and t > 0 else np.ones(RUNS, dtype=bool)
        comes = wants & (t - last >= SEPARATION)
        last[comes] = t
        direction = runs.direction(t) if reacts else np.array([[1.0, 0.0]])
        runs.release(t, np.where(comes[:, None], CLIP * direction, 0.0))
        shift = np.einsum("r,nrd->nd", c[t], runs.client)
        loss += (runs.seen(t) * shift).sum(axis=1) - (shift**2).sum(axis=1) / 2
        spent += (shift**2).sum(axis=1)
    return loss, spent


def test_whoever_reacts_learns_no_more():
    mu = CLIP * NOISE.sensitivity(SEPARATION)
    loss, spent = play(1, reacts=True)
    assert spent.max() <= mu**2 * (1 + 1e-12)
    assert spent.mean() < 0.9 * mu**2  # some came less often
    # filled up by a row that depends on nothing private, the loss is that of one Gaussian mechanism
    rest = mu**2 - spent
    padded = (
        loss
        + rest / 2
        + np.sqrt(np.maximum(rest, 0)) * np.random.default_rng(2).standard_normal(RUNS)
    )
    assert padded.mean() == pytest.approx(mu**2 / 2, abs=5 * mu / math.sqrt(RUNS))
    assert padded.var() == pytest.approx(mu**2, rel=5 * math.sqrt(2 / RUNS))
    for epsilon in (0.25, 1.0, 2.0):
        measured, error = delta(loss, epsilon)
        assert measured <= gaussian_delta(mu, epsilon) + 4 * error


def test_the_bound_is_attained():
    """Power: whoever always comes costs all of it, so a sensitivity five per cent smaller is
    noticed."""
    mu = CLIP * NOISE.sensitivity(SEPARATION)
    loss, spent = play(3, reacts=False)
    np.testing.assert_allclose(spent, mu**2, rtol=1e-9)
    measured, error = delta(loss, 1.0)
    assert abs(measured - gaussian_delta(mu, 1.0)) < 4 * error
    assert measured > gaussian_delta(0.95 * mu, 1.0) + 4 * error


def test_amplification():
    """A group's rounds are 0 and 3, the coin's probability 0.4: two sampled Gaussian mechanisms,
    whoever reacts."""
    rate, runs, c = 0.4, Runs(4), NOISE.matrix()
    loss = np.zeros(RUNS)
    for start in range(0, ROUNDS, SEPARATION):
        direction = CLIP * runs.direction(start)
        coin = runs.rng.random(RUNS) < rate
        ratio = np.zeros(RUNS)  # of one block, had the coin fallen so
        before = runs.client.copy()
        for t in range(start, start + SEPARATION):
            runs.release(
                t, np.where(coin[:, None], direction, 0.0) if t == start else np.zeros((RUNS, 2))
            )
            shift = c[t, start] * direction
            seen = runs.seen(t) - np.einsum(
                "r,nrd->nd", c[t], before
            )  # earlier blocks do not reach this one
            ratio += (seen * shift).sum(axis=1) - (shift**2).sum(axis=1) / 2
        assert np.abs(np.einsum("tr,nrd->ntd", c[start:], before)).max() == 0 or start == 0
        loss += np.log1p(rate * np.expm1(ratio))

    def accounted(rate: float, multiplier: float) -> PLDAccountant:
        one = dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(multiplier))
        return PLDAccountant().compose(dp_event.SelfComposedDpEvent(one, ROUNDS // SEPARATION))

    claimed = accounted(rate, 1 / (CLIP * NOISE.amplified_column_norm()))
    less = accounted(rate, 1.05 / (CLIP * NOISE.amplified_column_norm()))
    for epsilon in (0.25, 0.5, 1.0):
        measured, error = delta(loss, epsilon)
        assert abs(measured - claimed.get_delta(epsilon)) < 4 * error + 1e-4
        assert measured > less.get_delta(epsilon) + 4 * error  # power
