"""Files of public data sets: their layouts, and damage that is named."""

from __future__ import annotations

import gzip
import pickle
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from fedlgm import data
from fedlgm.errors import ConfigError, DataError
from simulations.config import recipe
from simulations.config.assembly import Assembly
from tests.support.data_files import (
    IDX_NAMES,
    bytes_array,
    idx_bytes,
    write_cifar,
    write_cifar10,
    write_leaf,
    write_mnist,
)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("below", ["", "mnist", "MNIST/raw"])
def test_mnist_layouts(tmp_path: Path, below: str, packed: bool) -> None:
    train_x, train_y, test_x, test_y = write_mnist(tmp_path / below, packed=packed)
    mnist = data.load("mnist", tmp_path)
    assert mnist.shape == (1, 28, 28)
    assert mnist.train_x.dtype == np.float32
    assert np.allclose(mnist.train_x[:, 0] * 127.5 + 127.5, train_x, atol=1e-4)
    assert np.allclose(mnist.test_x[:, 0] * 127.5 + 127.5, test_x, atol=1e-4)
    assert np.array_equal(mnist.train_y, train_y)
    assert np.array_equal(mnist.test_y, test_y)
    assert data.load("mnist", str(tmp_path)) is mnist


def test_cifar10_joins_batches_channel_first(tmp_path: Path) -> None:
    batches = write_cifar10(tmp_path / "cifar-10-batches-py")
    cifar = data.load("cifar10", tmp_path)
    assert cifar.train_x.shape == (30, 3, 32, 32)
    assert cifar.train_y.tolist() == [label for _, y in batches[:-1] for label in y]
    assert cifar.test_y.tolist() == batches[-1][1]
    # Green of image 1 of batch 2, row 3, column 5: bytes 1024 + 32 * 3 + 5 of its row.
    assert cifar.train_x[7, 1, 3, 5] == pytest.approx(
        batches[1][0][1, 1024 + 101] / 127.5 - 1, abs=1e-6
    )
    assert cifar.train_x.min() == -1.0
    assert cifar.train_x.max() == 1.0


def test_cifar100_uses_fine_labels(tmp_path: Path) -> None:
    _, train_y = write_cifar(tmp_path / "train", "fine_labels", 100)
    _, test_y = write_cifar(tmp_path / "test", "fine_labels", 100, seed=1)
    cifar = data.load("cifar100", tmp_path)
    assert (cifar.classes, cifar.train_y.tolist(), cifar.test_y.tolist()) == (100, train_y, test_y)


class _Payload:
    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, (str(self.target), "w")


def test_cifar_files_cannot_run_code(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    content = pickle.dumps({"labels": [0], "data": _Payload(tmp_path / "written")}, protocol=2)
    pickle.loads(content)["data"].close()
    assert (tmp_path / "written").exists()  # the payload works in the plain unpickler
    (tmp_path / "written").unlink()
    (tmp_path / "data_batch_3").write_bytes(content)
    with pytest.raises(DataError, match=r"data_batch_3.*not part of the CIFAR format"):
        data.load("cifar10", tmp_path)
    assert not (tmp_path / "written").exists()


@pytest.mark.parametrize("below", ["", "svhn", "SVHN"])
def test_svhn_label_ten_is_the_digit_zero(tmp_path: Path, below: str) -> None:
    (tmp_path / below).mkdir(exist_ok=True)
    x = bytes_array(32, 32, 3, 5)
    for split in ("train", "test"):
        savemat(
            tmp_path / below / f"{split}_32x32.mat",
            {"X": x, "y": np.array([[10], [1], [9], [10], [5]], np.uint8)},
        )
    svhn = data.load("svhn", tmp_path)
    assert svhn.train_y.tolist() == [0, 1, 9, 0, 5]
    assert svhn.shape == (3, 32, 32)
    assert svhn.test_x[4, 2, 7, 9] == pytest.approx(x[7, 9, 2, 4] / 127.5 - 1, abs=1e-6)


def test_femnist_keeps_users(tmp_path: Path) -> None:
    pixel = [[0.25] * 784]
    write_leaf(
        tmp_path / "train/all_data_0.json", {"f02": (pixel * 2, [61, 3]), "f01": (pixel, [7])}
    )
    write_leaf(tmp_path / "train/all_data_1.json", {"f03": (pixel * 3, [0, 0, 1])})
    write_leaf(tmp_path / "test/all_data_0.json", {"f01": (pixel, [9])})
    femnist = data.load("femnist", tmp_path)
    assert femnist.classes == 62
    assert femnist.train_y.tolist() == [61, 3, 7, 0, 0, 1]
    assert femnist.train_user is not None
    assert femnist.train_user.tolist() == [1, 1, 0, 2, 2, 2]
    assert femnist.test_y.tolist() == [9]
    assert femnist.shape == (1, 28, 28)
    assert np.all(femnist.train_x == 0.5)  # a quarter of the way from ink = 1 to paper = -1
    clients = data.partition(femnist.train_y, 3, "natural", users=femnist.train_user)
    assert clients.sizes.tolist() == [1, 2, 3]
    of_a_recipe = recipe.load(
        "digits",
        [
            f"data={{name = 'femnist', dir = '{tmp_path}', partition = 'natural'}}",
            "federation.clients=3",
        ],
    )
    assert Assembly(of_a_recipe).data.partition.sizes.tolist() == [1, 2, 3]
    other = Assembly(recipe.load("digits", ["data={name = 'digits', partition = 'natural'}"]))
    with pytest.raises(ConfigError, match="'digits' has none"):
        other.data.partition  # noqa: B018


def _damage_idx(name: str, content: bytes) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        write_mnist(folder)
        (folder / name).unlink()
        (folder / (name + ".gz" * (content[:2] == b"\x1f\x8b"))).write_bytes(content)

    return damage


def _damage_mat(folder: Path) -> None:
    savemat(folder / "train_32x32.mat", {"X": bytes_array(32, 32, 3, 2), "y": np.ones((2, 1))})
    (folder / "test_32x32.mat").write_bytes(b"not a matlab file" * 20)


def _mismatched_mat(folder: Path) -> None:
    for split in ("train", "test"):
        savemat(
            folder / f"{split}_32x32.mat", {"X": bytes_array(32, 32, 3, 2), "y": np.ones((3, 1))}
        )


def _damage_cifar(folder: Path) -> None:
    write_cifar10(folder)
    (folder / "data_batch_2").write_bytes((folder / "data_batch_2").read_bytes()[:200])


def _damage_leaf(folder: Path) -> None:
    write_leaf(folder / "train/a.json", {"u": ([[0.0] * 783], [1])})
    write_leaf(folder / "test/a.json", {"u": ([[0.0] * 784], [1])})


def _empty_leaf(folder: Path) -> None:
    write_leaf(folder / "train/a.json", {})
    write_leaf(folder / "test/a.json", {"u": ([[0.0] * 784], [1])})


LABELS = IDX_NAMES[1]
IMAGES = IDX_NAMES[0]
DAMAGES: list[tuple[str, Callable[[Path], None], str]] = [
    ("mnist", _damage_idx(IMAGES, idx_bytes(bytes_array(20, 28, 28))[:-1]), IMAGES + " is damaged"),
    ("mnist", _damage_idx(IMAGES, b"\x00\x00\x08\x03\x00"), IMAGES + " is damaged"),
    ("mnist", _damage_idx(IMAGES, b"<html>"), IMAGES + " is not an IDX file"),
    ("mnist", _damage_idx(IMAGES, b""), IMAGES + " is not an IDX file"),
    ("mnist", _damage_idx(IMAGES, gzip.compress(bytes(5000))[:-9]), IMAGES + ".gz cannot be read"),
    (
        "mnist",
        _damage_idx(LABELS, idx_bytes(bytes_array(19, high=10))),
        LABELS + " holds labels of shape",
    ),
    (
        "mnist",
        _damage_idx(LABELS, idx_bytes(np.full(20, 10, np.uint8))),
        "training labels of mnist",
    ),
    ("cifar10", _damage_cifar, "data_batch_2 is not a batch"),
    ("svhn", _damage_mat, "test_32x32.mat is not a cropped-digits file"),
    ("svhn", _mismatched_mat, "train_32x32.mat is damaged: 2 images but 3 labels"),
    ("femnist", _damage_leaf, "a.json is not a LEAF file"),
    ("femnist", _empty_leaf, "no users in .*train/a.json"),
]


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGES)
def test_damage_is_reported(
    tmp_path: Path, name: str, damage: Callable[[Path], None], message: str
) -> None:
    damage(tmp_path)
    with pytest.raises(DataError, match=message):
        data.load(name, tmp_path)
