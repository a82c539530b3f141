"""Images held as bytes are, for everybody who asks, the floats that they stand for."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedlgm import data
from fedlgm.data.dataset import DataSet
from fedlgm.data.pixels import Pixels
from tests.support.data_files import write_mnist


@pytest.fixture
def codes(tmp_path: Path) -> np.ndarray:
    return write_mnist(tmp_path / "store" / "mnist", seed=3)[0][:, None]


def arithmetic(codes: np.ndarray) -> np.ndarray:
    """Every pixel computed, as no table is needed for."""
    x = codes.astype(np.float32)
    x *= 2.0 / 255.0
    x -= 1.0
    return x


def test_the_table_gives_the_very_floats_of_arithmetic(codes: np.ndarray) -> None:
    usual = arithmetic(codes)
    assert np.array_equal(data.load("mnist").train_x, usual)
    low, half = np.float32(-0.3), np.float32((0.9 + 0.3) / 2)
    moved = low + half * (usual + np.float32(1))
    assert np.array_equal(data.load("mnist", pixels=(-0.3, 0.9)).train_x, moved)


def test_examples_are_decoded_without_the_others(codes: np.ndarray) -> None:
    held, rows = data.load("mnist", pixels=(0, 1)), np.array([5, 2, 7])
    assert isinstance(held.held("train_x"), Pixels)
    some = held.examples(rows)
    assert "train_x" not in vars(held)
    assert held.shape == (1, 28, 28)
    assert isinstance(some, np.ndarray)
    assert some.dtype == np.float32
    assert np.array_equal(some, held.train_x[rows])
    assert np.array_equal(held.examples(rows), some)  # now from the floats
    assert "train_x" in vars(held)


def test_bytes_travel_as_bytes(codes: np.ndarray) -> None:
    held = data.load("mnist/private")
    parts = held.parts()
    assert parts["train_x"].dtype == np.uint8
    for arrived in (
        DataSet.from_parts("mnist", parts, 10),
        pickle.loads(pickle.dumps(held)),
        held.validate(),
    ):
        assert isinstance(arrived.held("train_x"), Pixels)
        assert np.array_equal(arrived.train_x, held.train_x)
        assert np.array_equal(arrived.test_x, held.test_x)


def test_a_changed_copy_holds_the_same_floats(codes: np.ndarray) -> None:
    held = data.load("mnist")
    changed = replace(held, train_y=held.train_y.astype(np.float32))
    assert np.array_equal(changed.train_x, held.train_x)
    with pytest.raises(AttributeError, match="no attribute 'train_z'"):
        held.train_z  # type: ignore[attr-defined]  # noqa: B018
