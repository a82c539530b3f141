"""Data sets of PyTorch in the place of arrays."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from fedlgm.data import load
from fedlgm.errors import DataError

X, Y = torch.randn(12, 3, dtype=torch.float64), torch.arange(12) % 2
SET = TensorDataset(X, Y)


class Items(Dataset):
    """A set whose items are given."""

    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def test_a_set_is_read_as_its_arrays():
    found = load(
        {
            "train": Subset(SET, range(8)),
            "test": Subset(SET, range(8, 12)),
            "users": list("aabbccdd"),
        }
    )
    assert np.array_equal(found.train_x, X[:8].float().numpy())
    assert found.train_y.tolist() == Y[:8].tolist()
    assert found.train_user.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_items_may_hold_several_inputs_and_names_of_classes():
    named = Items([(X[i], np.ones(2), "cat" if i % 2 else "dog") for i in range(12)])
    found = load({"train": named, "test": named})
    assert (found.shape, found.labels) == (((3,), (2,)), ("cat", "dog"))


@pytest.mark.parametrize(
    ("part", "words"),
    [
        (DataLoader(SET), r"got a DataLoader: give \(x, y\), or its data set \(loader.dataset\)"),
        (
            TensorDataset(X),
            r"the torch data set TensorDataset: its items must be tuples \(input, target\), got tuple",
        ),
        (
            Items([{"x": X[0], "y": 1}]),
            r"the torch data set Items: .* \(input, target\), got dict: give arrays",
        ),
        (Items([]), r"the torch data set Items: it has no items"),
        (
            Items([(X[0], 1), (X[0, :2], 0)]),
            r"entry 0 of its items has several shapes, such as \[\(2,\), \(3,\)\]",
        ),
        (Items([(X[0], 1), 3]), r"must be tuples"),
        (TensorDataset(), r"the torch data set TensorDataset: IndexError"),
    ],
)
def test_a_set_that_is_no_pair_of_arrays_is_refused(part, words):
    with pytest.raises(DataError, match=words):
        load({"train": part, "test": SET})
