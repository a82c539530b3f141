"""Sensitivities against brute force over every participation pattern and adversarial vectors."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlgm.noise import correlation
from fedlgm.noise.correlation import Correlation, Workload, sensitivities


def patterns(rounds: int, separation: int, most: int):
    """Every non-empty set of at most `most` rounds, any two at least `separation` apart."""
    for size in range(1, most + 1):
        for chosen in itertools.combinations(range(rounds), size):
            if all(b - a >= separation for a, b in itertools.pairwise(chosen)):
                yield list(chosen)


def largest(matrix: np.ndarray, allowed) -> float:
    """Largest (sum of |X_ij| over a pattern)^(1/2)."""
    products = np.abs(matrix.T @ matrix)
    return math.sqrt(max(products[np.ix_(p, p)].sum() for p in allowed))


def adversary(matrix: np.ndarray, pattern: list[int], rng: np.random.Generator) -> float:
    """Unit vectors for the rounds of a pattern, improved one by one: || sum_t C[:, t] (x) u_t
    ||."""
    products = (matrix.T @ matrix)[np.ix_(pattern, pattern)]
    u = rng.standard_normal((len(pattern), len(pattern) + 1))
    u /= np.linalg.norm(u, axis=1, keepdims=True)
    for _ in range(30):
        for i in range(len(pattern)):
            pull = products[i] @ u - products[i, i] * u[i]
            if np.linalg.norm(pull) > 1e-12:
                u[i] = pull / np.linalg.norm(pull)
    return math.sqrt(max(0.0, float(np.sum(products * (u @ u.T)))))


coefficient = st.floats(-1, 1, allow_subnormal=False).map(lambda x: round(x, 3))


@st.composite
def cases(draw, signed: bool = True):
    rounds = draw(st.integers(1, 8))
    bands = draw(st.integers(1, rounds))
    rest = draw(st.lists(coefficient, min_size=bands - 1, max_size=bands - 1))
    kind = draw(st.sampled_from(["any", "decreasing"]))
    if kind == "decreasing":
        rest = sorted((abs(x) for x in rest), reverse=True)
    elif not signed:
        rest = [abs(x) for x in rest]
    c = Correlation("own", rounds, [1.0, *rest])
    return c, draw(st.integers(1, rounds + 1)), draw(st.none() | st.integers(1, 4))


@settings(max_examples=60, deadline=None)
@given(cases(), st.integers(0, 2**32 - 1))
def test_no_participation_pattern_and_no_vectors_exceed_it(case, seed):
    c, separation, limit = case
    claimed = c.sensitivity(separation, limit)
    most = sensitivities.participations(c.rounds, separation, limit)
    allowed = list(patterns(c.rounds, separation, most))
    true = largest(c.matrix(), allowed)
    assert claimed >= true * (1 - 1e-15)
    if (
        sensitivities.is_decreasing(c.coefficients)
        or c.coefficients.size <= separation
        or most == 1
    ):
        assert claimed == pytest.approx(true, rel=1e-12)
    else:
        assert claimed <= 1.2 * true
    rng = np.random.default_rng(seed)
    worst = max(adversary(c.matrix(), p, rng) for p in allowed)
    assert worst <= claimed * (1 + 1e-12)
    if (c.coefficients >= 0).all():
        assert worst == pytest.approx(
            true, rel=1e-3
        )  # all contributions alike; the search may stop early


@settings(max_examples=80, deadline=None)
@given(cases(), st.integers(1, 9))
def test_cycles(case, period):
    c, _, _ = case
    true = largest(
        c.matrix(), [list(range(r, c.rounds, period)) for r in range(min(period, c.rounds))]
    )
    assert c.sensitivity(period) >= true * (1 - 1e-12)


@settings(max_examples=80, deadline=None)
@given(cases())
def test_prefixes(case):
    c, separation, limit = case
    spent = [c.prefix_sensitivity(t, separation, limit) for t in range(c.rounds + 1)]
    assert spent[0] == 0
    assert spent[-1] == c.sensitivity(separation, limit)
    for t in range(1, c.rounds + 1):
        assert spent[t] == pytest.approx(c.leading(t).sensitivity(separation, limit), rel=1e-12)
        assert spent[t] >= spent[t - 1] * (1 - 1e-12)
    steps = c.round_sensitivities(separation, limit)
    np.testing.assert_allclose(np.sqrt(np.cumsum(steps**2)), spent[1:], rtol=1e-9)
    assert math.sqrt(math.fsum(steps**2)) >= c.sensitivity(separation, limit) * (1 - 1e-15)


def test_the_first_rounds_of_a_cycle_cost_most():
    c = correlation.get("banded", 30, bands=5)
    np.testing.assert_allclose(c.round_sensitivities(5), np.tile(c.coefficients, 6), rtol=1e-12)


@settings(max_examples=60, deadline=None)
@given(cases())
def test_rows(case):
    c, separation, limit = case
    for t in range(c.rounds):
        most = sensitivities.participations(t + 1, separation, limit)
        row = np.abs(c.matrix()[t])
        true = max(row[p].sum() for p in patterns(t + 1, separation, most))
        assert c.row_bound(t, separation, limit) == pytest.approx(true, rel=1e-12, abs=1e-300)
        assert c.row_bound(t, separation, limit) >= true * (1 - 1e-15)


@settings(max_examples=60, deadline=None)
@given(cases(), st.sampled_from([Workload(), Workload(momentum=0.5)]))
def test_no_strategy_beats_the_lower_bound(case, workload):
    """sens(C) ||B_t|| is at least the sum of one pattern's entries in row t of A: a better one
    would be wrong."""
    c, separation, limit = case
    most = sensitivities.participations(c.rounds, separation, limit)
    a = workload.matrix(c.rounds)
    norms = np.linalg.norm(a @ np.linalg.inv(c.matrix()), axis=1)
    for p in patterns(c.rounds, separation, most):
        assert (c.sensitivity(separation, limit) * norms >= a[:, p].sum(axis=1) * (1 - 1e-9)).all()


@settings(max_examples=40, deadline=None)
@given(
    cases(signed=False),
    st.lists(st.floats(0.1, 3), min_size=1, max_size=3),
    st.integers(0, 2**32 - 1),
)
def test_layers_share_one_matrix(case, ratios, seed):
    """Layers bounded by c_l with noise s_l C^-1 z: the whole moves by (sum c_l^2 / s_l^2)^(1/2)
    sens(C)."""
    c, separation, limit = case
    kappa = math.sqrt(sum(r**2 for r in ratios))
    most = sensitivities.participations(c.rounds, separation, limit)
    stacked = np.vstack([r * c.matrix() for r in ratios])
    allowed = list(patterns(c.rounds, separation, most))
    bound = kappa * c.sensitivity(separation, limit)
    assert largest(stacked, allowed) <= bound * (1 + 1e-12)
    assert largest(stacked, allowed) == pytest.approx(
        kappa * largest(c.matrix(), allowed), rel=1e-12
    )
    rng = np.random.default_rng(seed)
    pattern = allowed[rng.integers(len(allowed))]
    moved = 0.0
    for r in ratios:  # every layer with directions of its own
        x = np.zeros((c.rounds, 3))
        x[pattern] = rng.standard_normal((len(pattern), 3))
        norms = np.linalg.norm(x, axis=1, keepdims=True)
        moved += r**2 * np.sum((c.matrix() @ np.divide(x, norms, out=x, where=norms > 0)) ** 2)
    assert math.sqrt(moved) <= bound * (1 + 1e-12)


def test_wrong_formulas_are_noticed():
    """Power of the brute force above, on coefficients that rise: each of these shortcuts would be
    below the truth."""
    c = Correlation("own", 8, [1.0, 0.1, 0.9])
    earliest = np.linalg.norm(sensitivities.earliest_pattern(c.coefficients, 8, 1, 2))
    true = largest(c.matrix(), patterns(8, 1, 2))
    assert earliest < 0.95 * true  # rounds 0 and 2 are worse than 0 and 1
    assert c.sensitivity(1, 2) >= true
    true = largest(c.matrix(), patterns(8, 2, 4))
    assert (
        math.sqrt(sensitivities.best(c.column_norms() ** 2, 2, 4)) < 0.9 * true
    )  # columns 2 apart overlap
    assert math.sqrt(4) * c.sensitivity(1, 1) < true
    assert c.sensitivity(2) >= true
    # scalar contributions of either sign are not the worst: an adversary with vectors exceeds all
    # of them
    signed = np.array([[1, 0.45, -0.45], [0.45, 1, 0.45], [-0.45, 0.45, 1]])
    root = np.linalg.cholesky(signed).T
    scalars = max(np.linalg.norm(root @ s) for s in itertools.product([-1, 1], repeat=3))
    vectors = max(adversary(root, [0, 1, 2], np.random.default_rng(i)) for i in range(5))
    assert scalars < 0.98 * vectors
    assert vectors < largest(root, [[0, 1, 2]])


def test_best():
    values = np.array([3.0, 5.0, 4.0, 1.0, 9.0])
    assert sensitivities.best(values, 1, 5) == 22
    assert sensitivities.best(values, 2, 3) == 16
    assert sensitivities.best(values, 3, 2) == 14
    assert sensitivities.best(values, 2, 1) == 9
    np.testing.assert_array_equal(
        sensitivities.best(np.stack([values, values[::-1]]), 3, 2), [14, 14]
    )


def test_independent_noise_is_exact():
    c = correlation.get("identity", 300)
    assert c.sensitivity(1, 1) == 1.0
    assert c.sensitivity(3) == 10.0
    assert c.amplified_column_norm() == 1.0
    assert c.sensitivity(10) > math.sqrt(30) - 1e-15
    assert (c.noise_std() == 1).all()
