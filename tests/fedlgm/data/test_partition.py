from __future__ import annotations

import pickle
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2_contingency

from fedlgm.data import Partition, partition, schemes
from fedlgm.errors import ConfigError

# Every scheme with options that suit any labels of at least two classes.
ALL_SAMPLES: dict[str, dict[str, Any]] = {
    "iid": {},
    "dirichlet": {"alpha": 0.3},
    "dirichlet-large": {"alpha": 0.3},
    "hsu": {"alpha": 0.5},
    "isolation": {},
    "isolation-ii": {"alpha": 0.05},
}
EXAMPLES = ALL_SAMPLES | {
    "isolation-i": {"labels_per_client": 3},
    "natural": {"users": np.arange(1000) % 37},
}


def balanced(classes: int, each: int) -> np.ndarray:
    return np.tile(np.arange(classes), each)


def gini(p: np.ndarray) -> np.ndarray:
    """Sum of squared shares along the last axis."""
    return np.asarray(np.sum(p**2, axis=-1))


# --- what holds for every scheme ---


def test_every_scheme_is_exercised() -> None:
    assert set(schemes()) == set(EXAMPLES)


@settings(max_examples=25, deadline=None)
@given(
    scheme=st.sampled_from(sorted(ALL_SAMPLES)),
    labels=st.lists(st.integers(0, 6), min_size=40, max_size=200),
    clients=st.integers(2, 40),
    seed=st.integers(0, 2**128 - 1),
)
def test_every_sample_belongs_to_exactly_one_client(
    scheme: str, labels: list[int], clients: int, seed: int
) -> None:
    y = np.array(labels)
    p = partition(y, clients, scheme, seed=seed, **ALL_SAMPLES[scheme])
    assert len(p) == clients
    assert p.sizes.sum() == len(y)
    assert np.array_equal(np.sort(p.order), np.arange(len(y)))


@settings(max_examples=25, deadline=None)
@given(
    scheme=st.sampled_from(["isolation-i"]),
    each=st.integers(40, 60),
    classes=st.integers(3, 8),
    clients=st.integers(2, 12),
    seed=st.integers(0, 2**32),
)
def test_no_sample_goes_to_two_clients(
    scheme: str, each: int, classes: int, clients: int, seed: int
) -> None:
    p = partition(balanced(classes, each), clients, scheme, seed=seed, **EXAMPLES[scheme])
    assert len(np.unique(p.order)) == len(p.order) == p.sizes.sum()
    assert p.sizes.min() > 0


@pytest.mark.parametrize("scheme", sorted(EXAMPLES))
def test_result_depends_on_the_seed_and_on_no_global_generator(scheme: str) -> None:
    y = np.random.default_rng(0).integers(0, 10, 1000)

    def divide(seed: int, world: int) -> Partition:
        np.random.seed(world)  # noqa: NPY002
        random.seed(world)
        torch.manual_seed(world)
        before = (
            pickle.dumps(np.random.get_state()),  # noqa: NPY002
            random.getstate(),
            torch.get_rng_state().tolist(),
        )
        p = partition(y, 20, scheme, seed=seed, **EXAMPLES[scheme])
        after = (
            pickle.dumps(np.random.get_state()),  # noqa: NPY002
            random.getstate(),
            torch.get_rng_state().tolist(),
        )
        assert before == after
        return p

    first, again, other = divide(5, 1), divide(5, 2), divide(6, 1)
    assert np.array_equal(first.order, again.order)
    assert np.array_equal(first.offsets, again.offsets)
    assert not np.array_equal(first.order, other.order)


@pytest.mark.parametrize("scheme", sorted(EXAMPLES))
def test_label_histogram_counts_the_labels_of_each_client(scheme: str) -> None:
    y = np.random.default_rng(1).integers(0, 10, 1000)
    p = partition(y, 20, scheme, **EXAMPLES[scheme])
    histogram = p.label_histogram(y, 12)
    assert histogram.shape == (20, 12)
    for client in range(20):
        assert np.array_equal(histogram[client], np.bincount(y[p[client]], minlength=12))


def test_storage_is_compact_and_indexed_by_client() -> None:
    p = partition(balanced(10, 100), 7, "iid")
    assert p.order.dtype == np.int32
    assert p.order.nbytes + p.offsets.nbytes == 4 * 1000 + 8 * 8
    assert all(np.all(np.diff(p[i]) > 0) for i in range(7))
    for bad in (-1, 7):
        with pytest.raises(IndexError, match=rf"client {bad} is not in \[0, 7\)"):
            p[bad]
    assert [len(samples) for samples in p] == p.sizes.tolist()


# --- scheme by scheme ---


def test_iid_sizes_differ_by_at_most_one() -> None:
    p = partition(balanced(10, 100), 30, "iid")
    assert set(p.sizes) == {33, 34}


def test_iid_clients_see_all_classes_of_sorted_labels() -> None:
    y = np.sort(balanced(10, 1000))
    assert partition(y, 10, "iid").label_histogram(y, 10).min() > 50


def dirichlet_gini(scheme: str, alpha: float) -> tuple[float, float]:
    """Mean over 60 classes of sum_i p_i^2 with its standard error, for the shares p of 20 clients
    in a class."""
    y = balanced(60, 2000)
    squares = gini(partition(y, 20, scheme, alpha=alpha, seed=11).label_histogram(y, 60).T / 2000)
    return float(squares.mean()), float(squares.std() / np.sqrt(60))


@pytest.mark.parametrize("scheme", ["dirichlet", "dirichlet-large"])
@pytest.mark.parametrize("alpha", [0.05, 0.5])
def test_class_shares_follow_the_dirichlet_law(scheme: str, alpha: float) -> None:
    mean, error = dirichlet_gini(scheme, alpha)

    def expected(a: float) -> float:
        return (a + 1) / (20 * a + 1)

    assert abs(mean - expected(alpha)) < 4 * error
    # The test has the power to reject another alpha.
    assert abs(mean - expected(2 * alpha)) > 4 * error


def test_more_clients_than_samples() -> None:
    y = balanced(5, 4)
    with pytest.raises(ConfigError, match="at most one per sample"):
        partition(y, 21, "dirichlet", alpha=1.0)
    with pytest.raises(ConfigError, match="at most one client per sample"):
        partition(y, 21, "iid")
    assert partition(y, 50, "dirichlet-large", alpha=1.0).sizes.sum() == 20


def hsu_first_client(alpha: float) -> tuple[float, float]:
    """Mean over seeds of sum_k (share of class k)^2 of the first of 100 clients with 60 samples,
    and its error."""
    y = balanced(10, 600)
    squares = np.array(
        [
            gini(partition(y, 100, "hsu", alpha=alpha, seed=s).label_histogram(y, 10)[0] / 60)
            for s in range(150)
        ]
    )
    return float(squares.mean()), float(squares.std() / np.sqrt(len(squares)))


@pytest.mark.parametrize("alpha", [0.5, 5.0])
def test_hsu_mixtures_follow_the_prior_scaled_dirichlet(alpha: float) -> None:
    mean, error = hsu_first_client(alpha)

    def expected(a: float) -> float:
        # E q_k^2 = p (a p + 1) / (a + 1) for q ~ Dirichlet(a p); 60 draws add the multinomial term.
        return 1 / 60 + (1 - 1 / 60) * 10 * 0.1 * (a * 0.1 + 1) / (a + 1)

    assert abs(mean - expected(alpha)) < 4 * error
    assert abs(mean - expected(2 * alpha)) > 4 * error
    assert (
        abs(mean - expected(10 * alpha)) > 4 * error
    )  # Dirichlet(alpha, ..., alpha) would be this


def hsu_one_by_one(
    rng: np.random.Generator,
    stock: list[int],
    clients: int,
    alpha: float,
    *,
    renormalise: bool = True,
) -> tuple[int, ...]:
    """First client's counts by the definition: one label at a time, renormalised when a class has
    run out."""
    left = np.array(stock)
    q = rng.dirichlet(alpha * left / left.sum())
    counts = np.zeros(len(stock), dtype=int)
    for _ in range(sum(stock) // clients):
        p = q * (left > 0)
        k = rng.choice(len(stock), p=p / p.sum() if renormalise else q)
        if not left[k]:
            k = rng.choice(len(stock), p=left / left.sum())
        counts[k] += 1
        left[k] -= 1
    return tuple(counts.tolist())


def test_hsu_draws_like_the_one_by_one_definition() -> None:
    stock, alpha, draws = [1, 1, 6], 1.0, 2500
    y = np.repeat(np.arange(3), stock)
    ours = [
        tuple(partition(y, 2, "hsu", alpha=alpha, seed=s).label_histogram(y, 3)[0])
        for s in range(draws)
    ]
    rng = np.random.default_rng(0)
    theirs = [hsu_one_by_one(rng, stock, 2, alpha) for _ in range(draws)]
    # Wrong: what a class cannot give comes from the others in proportion to what is left of them.
    wrong = [hsu_one_by_one(rng, stock, 2, alpha, renormalise=False) for _ in range(draws)]
    cells = sorted(set(ours) | set(theirs))
    assert {sum(cell) for cell in cells} == {4}

    def p_value(sample: list[tuple[int, ...]]) -> float:
        table = [[s.count(cell) for cell in cells] for s in (ours, sample)]
        return float(chi2_contingency(table).pvalue)

    assert p_value(theirs) > 1e-3
    assert p_value(wrong) < 1e-6


def test_hsu_sizes_are_equal_and_last_clients_take_what_is_left() -> None:
    y = balanced(10, 600)
    p = partition(y, 100, "hsu", alpha=0.1)
    assert set(p.sizes) == {60}
    assert set(partition(y, 70, "hsu", alpha=1e-6).sizes) == {85, 86}


def test_natural_follows_the_users() -> None:
    users = np.array([30, 10, 30, 20, 10, 30])
    p = partition(np.zeros(6, dtype=int), 3, "natural", users=users)
    assert [p[i].tolist() for i in range(3)] == [[1, 4], [3], [0, 2, 5]]


def test_natural_never_splits_a_user() -> None:
    users = np.random.default_rng(0).integers(0, 50, 2000)
    p = partition(np.zeros(2000, dtype=int), 8, "natural", users=users)
    groups = [set(users[p[i]].tolist()) for i in range(8)]
    assert sum(map(len, groups)) == len(set().union(*groups)) == 50
    assert {len(group) for group in groups} == {6, 7}


# --- refusals ---


@pytest.mark.parametrize(
    ("scheme", "clients", "options", "message"),
    [
        ("niid", 5, {}, r"unknown partition scheme 'niid'; did you mean 'iid'"),
        ("iid", 0, {}, r"clients must be a whole number of at least 1, got 0"),
        ("iid", 2.5, {}, r"clients must be a whole number of at least 1, got 2.5"),
        ("iid", 5, {"alpha": 1.0}, r"unknown option 'alpha'; its options: none"),
        ("dirichlet", 5, {}, r"option 'alpha' is missing; its options: alpha"),
        ("dirichlet", 5, {"alpha": 0.0}, r"alpha must be finite and positive, got 0.0"),
        ("dirichlet", 5, {"alpha": float("nan")}, r"alpha must be finite and positive, got nan"),
        ("dirichlet", 5, {"alpha": "small"}, r"alpha must be finite and positive, got 'small'"),
        ("dirichlet-large", 5, {"alpha": -1}, r"alpha must be finite and positive, got -1"),
        ("hsu", 5, {"alpha": float("inf")}, r"alpha must be finite and positive"),
        (
            "isolation",
            1,
            {},
            r"clients \(with a private class\) must be a whole number of at least 2",
        ),
        (
            "isolation-ii",
            5,
            {"private_class": 7},
            r"private_class=7 is not among the labels: \[0, 1, 2, 3, 4\]",
        ),
        ("isolation-i", 5, {"labels_per_client": 6}, r"labels_per_client=6 exceeds the 5 classes"),
        (
            "isolation-i",
            5,
            {"labels_per_client": 1},
            r"labels_per_client must be a whole number of at least 2",
        ),
        ("isolation-i", 90, {}, r"use fewer clients or labels"),
        (
            "natural",
            5,
            {"users": np.arange(99)},
            r"users must name the user of each of the 100 samples",
        ),
        ("natural", 5, {"users": np.zeros(100)}, r"5 clients exceed the 1 users"),
    ],
)
def test_bad_options_are_refused(
    scheme: str, clients: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        partition(balanced(5, 20), clients, scheme, **options)


@pytest.mark.parametrize(
    "labels", [np.zeros(0, int), np.zeros((2, 2), int), np.zeros(5), np.array([1, -1])]
)
def test_bad_labels_are_refused(labels: np.ndarray) -> None:
    with pytest.raises(ConfigError, match="labels must be integers >= 0"):
        partition(labels, 2, "iid")


def test_negative_seed_is_refused() -> None:
    with pytest.raises(ConfigError, match="seed must be"):
        partition(balanced(5, 20), 2, "iid", seed=-1)


# --- scale ---


@pytest.mark.parametrize("scheme", sorted(set(EXAMPLES) - {"natural"}))
def test_500_clients_of_60000_samples(scheme: str) -> None:
    y = np.random.default_rng(0).integers(0, 10, 60_000)
    parts = partition(y, 500, scheme, **EXAMPLES[scheme])
    assert len(parts) == 500
    assert len(np.unique(parts.order)) == len(parts.order) <= len(y)


@pytest.mark.parametrize("samples", [60_000, 1_000_000])
def test_100000_clients_take_little_memory(samples: int) -> None:
    y = np.random.default_rng(0).integers(0, 10, samples)
    p = partition(y, 100_000, "dirichlet-large", alpha=0.1)
    assert p.sizes.sum() == samples
    assert p.order.nbytes + p.offsets.nbytes < 6e6
    assert p.label_histogram(y, 10).sum() == samples
