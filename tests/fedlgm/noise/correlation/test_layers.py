from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlgm.noise import correlation
from fedlgm.noise.correlation import Correlation, Workload


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
@given(
    st.integers(2, 7), st.integers(1, 4), st.lists(st.integers(0, 2**31), min_size=2, max_size=3)
)
def test_the_whole_is_worst_where_every_layer_is(rounds, separation, seeds):
    """Decreasing coefficients of different layers: the sum of squares is attained, by brute force
    over patterns."""
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
    claimed = math.hypot(
        *(r * c.sensitivity(separation) for r, c in zip(ratios, layers, strict=True))
    )
    assert claimed == pytest.approx(true, rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 6), st.integers(1, 3), st.lists(st.integers(0, 2**31), min_size=2, max_size=3)
)
def test_the_whole_is_never_worse_than_its_layers_together(rounds, separation, seeds):
    """Any coefficients and any contributions, by brute force over patterns and an adversary's
    vectors."""
    rng = np.random.default_rng(seeds)
    layers = [
        Correlation("own", rounds, [1.0, *rng.uniform(-1, 1, rng.integers(0, rounds))])
        for _ in seeds
    ]
    ratios = rng.uniform(0.1, 3, len(seeds))
    claimed = math.hypot(
        *(r * c.sensitivity(separation) for r, c in zip(ratios, layers, strict=True))
    )
    for size in range(1, rounds + 1):
        for chosen in itertools.combinations(range(rounds), size):
            if any(b - a < separation for a, b in itertools.pairwise(chosen)):
                continue
            # ||C_l x_l / s_l||^2 of all layers; a layer's contributions are independent of the others'
            moved = 0.0
            for ratio, c in zip(ratios, layers, strict=True):
                columns = c.matrix()[:, list(chosen)]
                vectors = rng.standard_normal((size, size + 1))
                for _ in range(5):
                    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
                    vectors = columns.T @ columns @ vectors + 1e-9 * vectors
                vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
                moved += float(np.linalg.norm(ratio * columns @ vectors) ** 2)
            assert math.sqrt(moved) <= claimed * (1 + 1e-12)
