from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from fedlgm import correlation
from fedlgm.allocation import allocate
from fedlgm.correlation import Correlation, Workload, optimal_split
from fedlgm.errors import ConfigError

tables = st.integers(1, 6).flatmap(
    lambda k: st.tuples(*(st.lists(st.floats(0.1, 10), min_size=k, max_size=k) for _ in range(4))).map(np.array)
)


@settings(max_examples=30, deadline=None)
@given(tables, st.floats(0.1, 3), st.randoms(use_true_random=False))
def test_no_optimiser_finds_less(table, mu, random):
    clips, sensitivities, errors, weights = table
    sizes = np.array([random.choice([1, 10, 3000]) for _ in clips])
    scales = optimal_split(clips, sensitivities, errors, sizes, weights, mu)
    assert np.sum((clips * sensitivities / scales) ** 2) == pytest.approx(mu**2, rel=1e-12)
    cost = weights * sizes * errors**2
    least = np.sum(cost * scales**2)
    assert least == pytest.approx(np.sum(clips * sensitivities * errors * np.sqrt(weights * sizes)) ** 2 / mu**2)

    def log_error(x: np.ndarray) -> float:  # shares of mu^2 by softmax
        share = np.exp(x - x.max())
        return math.log(np.sum(cost * (clips * sensitivities) ** 2 / (share / share.sum() * mu**2)))

    found = minimize(log_error, np.zeros(len(clips)), method="L-BFGS-B", options={"ftol": 1e-15, "gtol": 1e-10})
    assert found.fun == pytest.approx(math.log(least), abs=1e-7)
    assert found.fun >= math.log(least) - 1e-12


def test_one_correlation_leaves_the_allocation_as_it_is():
    """With the same C everywhere the split is that of independent noise, times the sensitivity."""
    clips, sizes = [1.0, 2.0, 3.0], [4, 100, 2500]
    c = correlation.get("banded", 64, bands=8)
    sensitivity = c.sensitivity(8)
    split = optimal_split(clips, [sensitivity] * 3, [c.error()] * 3, sizes, mu=0.5)
    np.testing.assert_allclose(split, allocate("min-total-noise", clips, sizes, 2.0) * sensitivity, rtol=1e-12)


def test_a_layer_of_its_own_workload_gains():
    """One layer with momentum, one without: each with its own C is better than one C for both."""
    workloads = [Workload(), Workload(momentum=0.9)]
    own = [correlation.get("banded", 300, bands=10, workload=w) for w in workloads]
    separate, shared = (
        sum(c.sensitivity(10) * c.error(w) for c, w in zip(chosen, workloads, strict=True)) ** 2
        for chosen in (own, [own[0], own[0]])
    )
    assert separate < 0.95 * shared


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 7), st.integers(1, 4), st.lists(st.integers(0, 2**31), min_size=2, max_size=3))
def test_the_whole_is_worst_where_every_layer_is(rounds, separation, seeds):
    """Decreasing coefficients of different layers: the sum of squares is attained, by brute force over patterns."""
    layers, ratios = [], []
    for seed in seeds:
        rng = np.random.default_rng(seed)
        layers.append(Correlation("own", rounds, np.sort(rng.random(rounds))[::-1] + 1e-3))
        ratios.append(rng.uniform(0.1, 3))
    stacked = np.vstack([r * c.matrix() for r, c in zip(ratios, layers, strict=True)])
    true = 0.0
    for size in range(1, rounds + 1):
        for pattern in itertools.combinations(range(rounds), size):
            if all(b - a >= separation for a, b in itertools.pairwise(pattern)):
                true = max(true, float(np.linalg.norm(stacked[:, list(pattern)].sum(axis=1))))
    claimed = math.hypot(*(r * c.sensitivity(separation) for r, c in zip(ratios, layers, strict=True)))
    assert claimed == pytest.approx(true, rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 6), st.integers(1, 3), st.lists(st.integers(0, 2**31), min_size=2, max_size=3))
def test_the_whole_is_never_worse_than_its_layers_together(rounds, separation, seeds):
    """Any coefficients and any contributions, by brute force over patterns and an adversary's vectors."""
    rng = np.random.default_rng(seeds)
    layers = [Correlation("own", rounds, [1.0, *rng.uniform(-1, 1, rng.integers(0, rounds))]) for _ in seeds]
    ratios = rng.uniform(0.1, 3, len(seeds))
    claimed = math.hypot(*(r * c.sensitivity(separation) for r, c in zip(ratios, layers, strict=True)))
    for size in range(1, rounds + 1):
        for chosen in itertools.combinations(range(rounds), size):
            if any(b - a < separation for a, b in itertools.pairwise(chosen)):
                continue
            moved = 0.0  # ||C_l x_l / s_l||^2 of all layers; a layer's contributions are independent of the others'
            for ratio, c in zip(ratios, layers, strict=True):
                columns = c.matrix()[:, list(chosen)]
                vectors = rng.standard_normal((size, size + 1))
                for _ in range(5):
                    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
                    vectors = columns.T @ columns @ vectors + 1e-9 * vectors
                vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
                moved += float(np.linalg.norm(ratio * columns @ vectors) ** 2)
            assert math.sqrt(moved) <= claimed * (1 + 1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ([1.0, 2.0], [1.0], [1.0, 1.0], [1, 1]),
            r"sensitivities must have one entry for each layer, got shape \(1,\)",
        ),
        (([], [], [], []), "clips must have one entry"),
        (([1.0], [1.0], [0.0], [1]), r"errors must be finite and positive, got \[0.0\]"),
        (([1.0], [1.0], [1.0], [1], [math.nan]), "weights must be finite and positive"),
        (([1.0], [1.0], [1.0], [1], None, 0.0), "mu must be finite and positive, got 0.0"),
    ],
)
def test_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        optimal_split(*arguments)
