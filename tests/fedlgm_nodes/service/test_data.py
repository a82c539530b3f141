"""Every form in which a node's examples may lie."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedlgm.errors import ConfigError, DataError
from fedlgm.training import tasks
from fedlgm_nodes.policy import Data
from fedlgm_nodes.service import data as node_data

X = np.arange(2 * 4 * 4, dtype=np.uint8).reshape(2, 4, 4) * 7
Y = np.array([1, 0])


def section(**values: Any) -> Data:
    return Data.model_validate({"name": "d", "shape": (1, 4, 4), "classes": 2} | values)


def read(folder: Path, **values: Any) -> tuple[np.ndarray, np.ndarray]:
    described = section(**values)
    found = node_data.read(described, folder)
    return found.x.numpy(), node_data.targets(described, found.y, tasks.get()).numpy()


def idx(array: np.ndarray) -> bytes:
    return (
        b"\x00\x00\x08"
        + bytes([array.ndim])
        + struct.pack(f">{array.ndim}I", *array.shape)
        + array.tobytes()
    )


def scaled(x: np.ndarray) -> np.ndarray:
    return x[:, None].astype(np.float32) / np.float32(127.5) - 1


def test_numpy(tmp_path):
    np.savez(tmp_path / "d.npz", x=X, y=Y)
    np.save(tmp_path / "x.npy", X.astype(np.float64))
    np.save(tmp_path / "y.npy", Y)
    x, y = read(tmp_path, kind="numpy", path="d.npz")
    np.testing.assert_array_equal(x, scaled(X))
    np.testing.assert_array_equal(y, Y)
    x, _ = read(tmp_path, kind="numpy", path="x.npy", labels="y.npy")
    np.testing.assert_array_equal(x, X[:, None].astype(np.float32))


def test_idx(tmp_path):
    (tmp_path / "x").write_bytes(idx(X))
    (tmp_path / "y.gz").write_bytes(gzip.compress(idx(Y.astype(np.uint8))))
    x, y = read(tmp_path, kind="idx", path="x", labels="y.gz")
    np.testing.assert_array_equal(x, scaled(X))
    np.testing.assert_array_equal(y, Y)


def test_a_folder_of_images(tmp_path):
    from PIL import Image

    for name, picture in zip(("benign", "malignant"), X, strict=True):
        (tmp_path / "pictures" / name).mkdir(parents=True)
        Image.fromarray(picture).save(tmp_path / "pictures" / name / "one.png")
    (tmp_path / "pictures" / "benign" / "notes.txt").write_text("not a picture")
    kept = {"kind": "images", "path": "pictures"}
    x, y = read(tmp_path, **kept, class_names=("malignant", "benign"))
    np.testing.assert_allclose(x, scaled(X[::-1]), atol=1e-6)
    np.testing.assert_array_equal(y, [0, 1])
    x, _ = read(tmp_path, **kept, class_names=("benign", "malignant"), shape=(3, 2, 2))
    assert x.shape == (2, 3, 2, 2)
    with pytest.raises(DataError, match="no folder"):
        read(tmp_path, **kept, class_names=("benign", "other"))
    (tmp_path / "pictures" / "benign" / "two.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"two.png is not a readable image"):
        read(tmp_path, **kept, class_names=("benign", "malignant"))


def test_images_are_those_of_a_simulation(tmp_path):
    from PIL import Image

    from fedlgm import data

    rng = np.random.default_rng(1)
    for name in ("benign", "malignant"):
        for part in ("train", "test"):
            (tmp_path / part / name).mkdir(parents=True)
            pixels = rng.integers(256, size=(20, 33, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / part / name / "a.png")
    x, y = read(
        tmp_path, kind="images", path="train", class_names=("benign", "malignant"), shape=(3, 8, 8)
    )
    simulated = data.load("image-folder", tmp_path, image_size=8)
    np.testing.assert_array_equal(x, simulated.train_x)
    np.testing.assert_array_equal(y, simulated.train_y)


def test_csv_is_that_of_a_simulation(tmp_path):
    from fedlgm import data

    file = tmp_path / "d.csv"
    file.write_text("age,site,smokes,ill\n52,3,True,yes\n61.5,1,False,NA\n40,2,True,yes\n")
    kept = {"kind": "csv", "path": "d.csv", "labels": "ill", "class_names": ("yes", "NA")}
    columns = ("age", "smokes")
    x, y = read(tmp_path, **kept, shape=(2,), features=columns, standardise={"age": (50, 20)})
    simulated = data.load(
        "table", file=file, test_file=file, target="ill", inputs=columns, labels=("yes", "NA"),
        standardise={"age": (50, 20)},
    )  # fmt: skip
    np.testing.assert_array_equal(x, simulated.train_x)
    np.testing.assert_array_equal(y, simulated.train_y)
    with pytest.raises(DataError, match="1 targets in column 'ill', the first in row 1, counted"):
        read(tmp_path, **kept | {"class_names": ("yes", "no")}, shape=(3,))
    with pytest.raises(DataError, match=r"3 targets .* \(it is empty\)"):
        read(tmp_path, **kept | {"class_names": ()}, shape=(3,))
    with pytest.raises(DataError, match="no column 'agee'; did you mean 'age'"):
        read(tmp_path, **kept, shape=(3,), standardise={"agee": (50, 20)})
    file.write_text("age,ill\n52,1\n61,\n")
    with pytest.raises(DataError, match="first in row 1"):
        read(tmp_path, **kept | {"class_names": ()}, shape=(1,))
    file.write_text("age;ill\n52;1\n")
    with pytest.raises(DataError, match="not commas"):
        read(tmp_path, **kept, shape=(1,))


def test_parquet(tmp_path):
    import pyarrow
    import pyarrow.parquet

    table = {"age": [1.0, 2.0], "dose": [3.0, 4.0], "scan": [[5.0, 6.0], [7.0, 8.0]], "ill": [0, 1]}
    pyarrow.parquet.write_table(pyarrow.table(table), tmp_path / "d.parquet")
    kept = {"kind": "parquet", "path": "d.parquet", "labels": "ill"}
    x, y = read(tmp_path, **kept, shape=(4,))
    np.testing.assert_array_equal(x, [[1, 3, 5, 6], [2, 4, 7, 8]])
    np.testing.assert_array_equal(y, [0, 1])
    x, _ = read(tmp_path, **kept, shape=(1,), features=("dose",))
    np.testing.assert_array_equal(x, [[3], [4]])
    with pytest.raises(DataError, match="no column 'weight'"):
        read(tmp_path, **kept, shape=(1,), features=("weight",))


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (["a-1", "a-2"], "column 'more' holds text, not numbers: convert it, or list only"),
        (["1.5", "2.5"], "column 'more' holds text, not numbers"),
        (
            np.array(["2026-01-01", "2026-01-02"], "datetime64[ns]"),
            "column 'more' holds dates or times, not numbers",
        ),
        ([[1.0], [1.0, 2.0]], "column 'more' holds lists of unequal length"),
        (
            [1.0, None],
            (
                "column 'more' has no finite number in 1 of 2 rows, first in row 1, counted from "
                "0: fill the gaps"
            ),
        ),
        ([True, None], "column 'more' has no finite number in 1 of 2 rows"),
    ],
)
def test_a_parquet_column_that_is_no_feature_is_named(tmp_path, column, words):
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table({"age": [1.0, 2.0], "more": column, "ill": [0, 1]})
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
    with pytest.raises(DataError, match=words):
        read(tmp_path, kind="parquet", path="d.parquet", labels="ill", shape=(2,))


def load(count: int) -> tuple[np.ndarray, np.ndarray]:
    """A user's own loader."""
    return np.zeros((count, 16), np.float32), np.zeros(count)


def test_a_users_own_loader(tmp_path):
    x, y = read(
        tmp_path,
        kind="loader",
        loader="tests.fedlgm_nodes.service.test_data:load",
        options={"count": 3},
    )
    assert x.shape == (3, 1, 4, 4)
    assert y.dtype == np.int64
    with pytest.raises(DataError, match="cannot be imported"):
        read(tmp_path, kind="loader", loader="tests.fedlgm_nodes.service.test_data:nothing")
    with pytest.raises(DataError, match="TypeError"):
        read(tmp_path, kind="loader", loader="tests.fedlgm_nodes.service.test_data:load")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": X}, "no array y"),
        ({"x": X, "y": Y[:1]}, "2 inputs, but 1 labels"),
        ({"x": X, "y": Y + 1}, r"labels must be whole numbers in \[0, 2\)"),
        ({"x": X, "y": Y + 0.5}, "use the task 'regression'"),
        ({"x": X[:, :3], "y": Y}, "data.shape"),
        ({"x": np.full(X.shape, np.nan), "y": Y}, "NaN or Inf"),
        ({"x": np.array(["a"] * 32).reshape(2, 4, 4), "y": Y}, "must be numbers"),
        ({"x": np.array([{}, {}], dtype=object), "y": Y}, "cannot be read"),
    ],
)
def test_damaged_data(tmp_path, arrays, message):
    np.savez(tmp_path / "d.npz", **arrays)
    with pytest.raises(DataError, match=message):
        read(tmp_path, kind="numpy", path="d.npz")


def test_missing_data(tmp_path):
    with pytest.raises(DataError, match="there is nothing at"):
        read(tmp_path, kind="numpy", path="d.npz")


def test_a_path_that_the_system_refuses(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"data.path '.*' cannot be used: its name is too long; choose a shorter one",
    ):
        read(tmp_path, kind="numpy", path="d" * 5000)


def test_the_digest_is_that_of_the_examples(tmp_path):
    np.savez(tmp_path / "d.npz", x=X, y=Y)
    same = [
        node_data.digest(node_data.read(section(kind="numpy", path="d.npz"), tmp_path))
        for _ in range(2)
    ]
    np.savez(tmp_path / "d.npz", x=X[::-1], y=Y)
    other = node_data.digest(node_data.read(section(kind="numpy", path="d.npz"), tmp_path))
    assert same[0] == same[1] != other


def test_targets_of_other_tasks(tmp_path):
    np.savez(tmp_path / "d.npz", x=X, y=[[0.5], [1.5]])
    described = section(kind="numpy", path="d.npz", classes=1)
    y = node_data.read(described, tmp_path).y
    assert node_data.targets(described, y, tasks.get("regression")).tolist() == [0.5, 1.5]
    with pytest.raises(DataError, match="0 and 1"):
        node_data.targets(described, y, tasks.get("binary"))
    np.savez(tmp_path / "d.npz", x=X, y=[[0, 1, 1], [1, 0, 0]])
    described = section(kind="numpy", path="d.npz", classes=3)
    y = node_data.read(described, tmp_path).y
    assert node_data.targets(described, y, tasks.get("multi-label")).shape == (2, 3)
