"""Partitions in which the last client alone lacks a class."""

from __future__ import annotations

import numpy as np
import pytest

from fedlgm.data import partition


def test_isolation_hides_the_private_class_from_the_last_client() -> None:
    y = np.tile(np.arange(10), 600)
    histogram = partition(y, 20, "isolation", private_class=3).label_histogram(y, 10)
    assert histogram[-1, 3] == 0
    assert np.delete(histogram[-1], 3).min() > 0
    assert set(histogram[:-1, 3]) == {600 // 19, 600 // 19 + 1}
    assert histogram[:-1].min() > 0


@pytest.mark.parametrize("private", [None, 0])
def test_isolation_i_has_four_labels_and_equal_sizes(private: int | None) -> None:
    y = np.tile(np.arange(10), 5000)
    options = {} if private is None else {"private_class": private}
    p = partition(y, 100, "isolation-i", **options)
    histogram = p.label_histogram(y, 10)
    hidden = 9 if private is None else private
    assert set((histogram[:-1] > 0).sum(1)) == {4}
    assert histogram[:-1, hidden].min() > 0
    assert (histogram[-1] > 0).sum() == 3
    assert histogram[-1, hidden] == 0
    assert len(set(p.sizes)) == 1
    assert p.sizes.sum() > 0.97 * len(y)
    # Label sets vary between clients.
    assert len({tuple(row > 0) for row in histogram}) > 30


def test_isolation_i_with_unequal_classes() -> None:
    y = np.repeat(np.arange(6), [100, 900, 300, 700, 500, 400])
    p = partition(y, 12, "isolation-i", labels_per_client=2, private_class=4)
    histogram = p.label_histogram(y, 6)
    assert len(set(p.sizes)) == 1
    assert set((histogram[:-1] > 0).sum(1)) == {2}
    assert (histogram[-1] > 0).sum() == 1
    assert (histogram > 0)[:, 1].sum() > (histogram > 0)[:, 0].sum()


def test_isolation_ii_is_skewed_and_isolated() -> None:
    y = np.tile(np.arange(10), 5000)
    empty = []
    for seed in range(5):
        p = partition(y, 100, "isolation-ii", seed=seed)
        histogram = p.label_histogram(y, 10)
        assert histogram[-1, 9] == 0
        # FedLab's balance: a client gains a public class only while it has fewer than 45,000 / 100
        # samples.
        before = np.cumsum(histogram[:, :9], axis=1) - histogram[:, :9]
        assert before[histogram[:, :9] > 0].max() < 450
        empty.append(int((p.sizes == 0).sum()))
    assert 35 <= np.mean(empty) <= 55


def test_isolation_ii_concentration() -> None:
    y = np.tile(np.arange(2), 20_000)
    shares = [
        partition(y, 101, "isolation-ii", alpha=0.1, seed=s).label_histogram(y, 2)[:100, 1]
        for s in range(60)
    ]
    squares = np.sum((np.array(shares) / 20_000) ** 2, axis=-1)
    error = squares.std() / np.sqrt(60)
    assert (
        abs(squares.mean() - 1.1 / 11) < 4 * error
    )  # (alpha + 1) / (100 alpha + 1): all but the last client
    assert abs(squares.mean() - 1.2 / 21) > 4 * error
