"""Inputs that are read when a client trains."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import simulations
from fedlgm.data import DataSet, LazyArray, divide
from fedlgm.errors import ConfigError, DataError
from fedlgm.noise.keys import KeyRing
from simulations.engines.ray import RayGrid

RNG = np.random.default_rng(4)
X, Y = RNG.standard_normal((80, 3)).astype(np.float32), RNG.integers(2, size=80)
TEST = (X[:20], Y[:20])
SMALL = ["federation.rounds=2", "federation.clients=20", "federation.rate=0.2", "run.seed=3"]


class Recorded:
    """An array that notes which rows are read."""

    def __init__(self, values: np.ndarray) -> None:
        self.values, self.shape, self.dtype = values, values.shape, values.dtype
        self.read: list[int] = []

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        self.read += rows.tolist()
        return self.values[rows]


def simulate(x: Any, folder: Path, **options: Any) -> simulations.RunResult:
    return simulations.simulate(
        model="logistic",
        data={"train": (x, Y), "test": TEST},
        overrides=[*SMALL, "privacy.delta=0.01", "privacy.accountant=rdp"],
        run_dir=folder,
        **options,
    )


@pytest.mark.parametrize("engine", ["local", "processes"])
def test_a_run_has_the_bits_of_the_same_arrays_in_memory(tmp_path: Path, engine: str) -> None:
    stored = tmp_path / "x.npy"
    np.save(stored, X)
    lazy = simulate(LazyArray(np.load(stored, mmap_mode="r")), tmp_path / "lazy", engine=engine)
    same = simulate(X, tmp_path / "arrays")
    assert lazy["model_sha256"] == same["model_sha256"]


def test_only_rows_of_clients_that_train_are_read(tmp_path: Path) -> None:
    source = Recorded(X)
    simulate(LazyArray(source), tmp_path / "run")
    assert 0 < len(set(source.read)) < len(X) / 2


def test_rows_in_any_order_and_of_a_selection() -> None:
    lazy = LazyArray(Recorded(X))
    for rows in (np.array([7, 2, 2]), slice(3, 9, 2), Y == 1, np.array([], dtype=np.int64)):
        assert np.array_equal(lazy[rows], X[rows])
        assert np.array_equal(lazy.keep(rows)[:], X[rows])
    few = lazy.keep(np.array([9, 4, 5])).keep(np.array([2, 0]))
    assert few.shape == (2, 3)
    assert np.array_equal(few[:], X[[5, 9]])
    assert LazyArray(np.arange(6, dtype=np.uint8)[:, None])[np.array([1])].dtype == np.int64


def test_users_divide_it(tmp_path: Path) -> None:
    users = np.arange(80) % 4
    data = DataSet.from_mapping({"train": (LazyArray(X), Y), "test": TEST, "users": users})
    assert divide(data, 4, "natural").sizes.tolist() == [20] * 4
    assert np.array_equal(data.keep(users == 1).examples(slice(2)), X[[1, 5]])


class Broken(Recorded):
    """Rows of another shape, NaN, or an error."""

    def __init__(self, fault: str) -> None:
        super().__init__(X)
        self.fault = fault

    def __getitem__(self, rows: np.ndarray) -> np.ndarray:
        if self.fault == "file":
            raise OSError("the disk is gone")
        return self.values[rows, :2] if self.fault == "shape" else np.full((len(rows), 3), np.nan)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("file", r"LazyArray\(Broken\): its rows cannot be read.*the disk is gone"),
        ("shape", r"2 rows have shape \(2, 2\), not \(2, 3\)"),
        ("nan", "2 rows read hold NaN or infinity"),
    ],
)
def test_bad_rows_are_refused_when_they_are_read(fault: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        LazyArray(Broken(fault))[np.array([0, 1])]


def test_what_is_no_source() -> None:
    for source in (3, [[1.0]], np.float32(1)):
        with pytest.raises(DataError, match=r"needs shape \[n, ...\], dtype and source\[rows\]"):
            LazyArray(source)
    with pytest.raises(DataError, match="not a type of numbers"):
        LazyArray(np.array(["a"]))
    with pytest.raises(DataError, match="79 inputs but 80 targets"):
        DataSet.from_mapping({"train": (LazyArray(X[:79]), Y), "test": TEST})
    with pytest.raises(DataError, match="only their lengths may differ"):
        DataSet.from_mapping({"train": (LazyArray(X[:, :2]), Y), "test": TEST})


def test_ray_refuses_it() -> None:
    division = DataSet.from_mapping({"train": (LazyArray(X), Y), "test": TEST}), None
    assembly: Any = SimpleNamespace(data=SimpleNamespace(division=division))
    unstarted: Any = None
    with pytest.raises(ConfigError, match="LazyArray cannot be sent to Ray's workers"):
        RayGrid.serving(unstarted, assembly, KeyRing.from_seed(0))


def test_another_shape_is_not_resumed(tmp_path: Path) -> None:
    shapes = [
        DataSet.from_mapping({"train": (LazyArray(X[:n]), Y[:n]), "test": TEST}).parts()
        for n in (80, 79)
    ]
    assert shapes[0]["train_x:shape"].tolist() == [80, 3]
    assert shapes[0].keys() == {"train_y", "test_y", "train_x:shape", "test_x"}


@pytest.mark.parametrize(
    ("declared", "rows", "message"),
    [
        (np.float32, np.array([["1.0"]]), "of type <U3, not numbers"),
        (np.uint64, np.array([[2**63]], np.uint64), "that int64 cannot hold"),
        (np.int64, np.array([[1.5]]), "that int64 cannot hold"),
    ],
)
def test_rows_that_the_stated_type_cannot_hold_are_refused(
    declared: type, rows: np.ndarray, message: str
) -> None:
    class Source:
        shape, dtype = (3, 1), np.dtype(declared)

        def __getitem__(self, numbers: np.ndarray) -> np.ndarray:
            return rows

    with pytest.raises(DataError, match=message):
        LazyArray(Source())[np.array([0])]
