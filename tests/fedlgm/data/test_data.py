"""Data sets by name: what they hold, where they are looked for, and the interval of their
pixels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fedlgm import data
from fedlgm.errors import ConfigError, DataError
from simulations.config import recipe
from simulations.config.assembly import Assembly
from tests.support.data_files import (
    write_mnist,
)

DEBIAN_FASHION = Path("/usr/share/datasets/fashion-mnist")


def test_digits_is_a_fixed_stratified_split_of_all_samples() -> None:
    from sklearn.datasets import load_digits

    digits = data.load("digits")
    assert digits.shape == (1, 8, 8)
    assert (len(digits.train_y), len(digits.test_y), digits.classes) == (1442, 355, 10)
    assert digits.train_x.dtype == np.float32
    assert digits.train_y.dtype == np.int64
    assert digits.train_x.min() == -1.0
    assert digits.train_x.max() == 1.0
    share = np.bincount(digits.test_y) / np.bincount(
        np.concatenate([digits.train_y, digits.test_y])
    )
    assert np.abs(share - 0.2).max() < 0.01
    ours = np.concatenate([digits.train_x, digits.test_x]).reshape(1797, 64) * 8 + 8
    labelled = np.c_[ours, np.concatenate([digits.train_y, digits.test_y])]
    theirs = np.c_[load_digits().data, load_digits().target]
    assert np.array_equal(labelled[np.lexsort(labelled.T)], theirs[np.lexsort(theirs.T)])


def test_synthetic_is_determined_by_its_seed_and_learnable() -> None:
    first, again, other = data.synthetic(3000), data.synthetic(3000), data.synthetic(3000, seed=1)
    assert np.array_equal(first.train_x, again.train_x)
    assert np.array_equal(first.test_y, again.test_y)
    assert not np.array_equal(first.train_x, other.train_x)
    means = np.stack([first.train_x[first.train_y == k].mean(0) for k in range(10)])
    distances = ((first.test_x[:, None] - means) ** 2).sum((2, 3, 4))
    accuracy = (distances.argmin(1) == first.test_y).mean()
    assert 0.5 < accuracy < 0.999
    # The noise has unit variance around the class means.
    assert (first.train_x - means[first.train_y]).std() == pytest.approx(1.0, abs=0.01)


def test_synthetic_sizes() -> None:
    assert data.load("synthetic-500").train_x.shape == (500, 1, 4, 4)
    assert data.load("synthetic").train_x.shape == (100_000, 1, 4, 4)
    assert data.synthetic(50, classes=3, shape=(3, 5, 6)).shape == (3, 5, 6)
    with pytest.raises(ConfigError, match="samples=0"):
        data.load("synthetic-0")


def test_sets_are_held_once() -> None:
    assert data.load("digits") is data.load("digits")
    assert data.load("synthetic-500") is data.load("synthetic-500")


def test_names_and_unknown_name() -> None:
    assert set(data.names()) == {
        "digits",
        "breast-cancer",
        "mnist",
        "fashion-mnist",
        "cifar10",
        "cifar100",
        "svhn",
        "femnist",
        "bible-kjv",
        "bible-kjv-chapters",
        "image-folder",
        "synthetic",
        "table",
    }
    with pytest.raises(ConfigError, match=r"unknown data set 'cifar'; did you mean 'cifar10'"):
        data.load("cifar")


def test_store_is_searched_after_data_dir(tmp_path: Path) -> None:
    _, stored_y, _, _ = write_mnist(tmp_path / "store" / "mnist", seed=10)
    given = tmp_path / "given"
    given.mkdir()
    assert np.array_equal(data.load("mnist").train_y, stored_y)
    assert np.array_equal(data.load("mnist", given).train_y, stored_y)
    _, given_y, _, _ = write_mnist(given, seed=20)
    assert np.array_equal(data.load("mnist", given).train_y, given_y)


def test_bare_files_of_a_shared_store_are_not_guessed_at(tmp_path: Path) -> None:
    write_mnist(tmp_path / "store")
    with pytest.raises(DataError, match="mnist not found"):
        data.load("mnist")


@pytest.mark.parametrize("half", ["", "/private"])
def test_test_examples_need_no_training_files(tmp_path: Path, half: str) -> None:
    folder = tmp_path / "store" / "mnist"
    write_mnist(folder)
    whole = data.load("mnist")
    for file in folder.glob("train-*"):
        file.unlink()
    found = data.only_test_examples(f"mnist{half}", pixels=(-1, 1))
    assert np.array_equal(found.train_x, whole.test_x)
    assert np.array_equal(found.test_y, whole.test_y)
    for file in folder.glob("t10k-labels*"):
        file.unlink()
    with pytest.raises(DataError, match="mnist not found: looked for t10k-images"):
        data.only_test_examples("mnist")


@pytest.mark.parametrize("name", ["digits", "breast-cancer", "digits/private", "digits/public"])
def test_published_numbers_of_sets_that_are_made_here(name: str) -> None:
    assert data.published_examples(name) == len(data.load(name).train_y)


@pytest.mark.skipif(
    not DEBIAN_FASHION.is_dir(), reason="needs Debian's package dataset-fashion-mnist"
)
def test_fashion_mnist_of_debian() -> None:
    fashion = data.load("fashion-mnist")
    assert fashion.train_x.shape == (60_000, 1, 28, 28)
    assert fashion.test_x.shape == (10_000, 1, 28, 28)
    assert data.published_examples("fashion-mnist") == len(fashion.train_y)
    for name in ("fashion-mnist/private", "fashion-mnist/public"):
        assert data.published_examples(name) == len(data.load(name).train_y)
    assert np.bincount(fashion.train_y).tolist() == [6000] * 10
    # Well-known mean and standard deviation of its pixels in [0, 1].
    assert (fashion.train_x.mean() + 1) / 2 == pytest.approx(0.2860, abs=1e-4)
    assert fashion.train_x.std() / 2 == pytest.approx(0.3530, abs=1e-4)


@pytest.mark.parametrize("name", ["mnist", "mnist/private", "digits"])
def test_pixels_move_to_another_interval(tmp_path: Path, name: str) -> None:
    write_mnist(tmp_path / "store" / "mnist")
    usual, unit = data.load(name), data.load(name, pixels=(0, 1))
    wide = data.load(name, pixels=[-3.0, 5.0])
    assert (usual.test_x.min(), unit.test_x.min(), wide.test_x.min()) == (-1.0, 0.0, -3.0)
    assert (usual.test_x.max(), unit.test_x.max(), wide.test_x.max()) == (1.0, 1.0, 5.0)
    np.testing.assert_allclose(unit.train_x, (usual.train_x.astype(np.float64) + 1) / 2, atol=1e-7)
    assert unit.train_x.dtype == np.float32
    assert unit.train_y.tolist() == usual.train_y.tolist()


@pytest.mark.parametrize(
    "pixels", [(1, 0), (0, 0), (0,), (0, 1, 2), (0, float("inf")), (float("nan"), 1)]
)
def test_pixels_that_are_no_interval_are_refused(pixels: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="pixels must be two numbers"):
        data.load("digits", pixels=pixels)


def test_pixels_are_for_images_alone() -> None:
    x, y = np.zeros((4, 3), dtype=np.float32), np.zeros(4, dtype=np.int64)
    for name in ("synthetic-20", {"train": (x, y), "test": (x, y)}):
        with pytest.raises(ConfigError, match="pixels is only for bundled sets of images"):
            data.load(name, pixels=(0, 1))


def test_a_recipe_names_the_interval_of_its_pixels() -> None:
    made = recipe.load("digits", ["data.pixels=[0, 1]"])
    assert recipe.load("digits").data.pixels is None
    assert Assembly(made).data.dataset.train_x.min() == 0.0
    for wrong, message in (
        ("[1, 0]", r"data\.pixels must be two numbers"),
        ("3", "data.pixels"),
        ("[0]", "data.pixels"),
    ):
        with pytest.raises(ConfigError, match=message):
            Assembly(recipe.load("digits", [f"data.pixels={wrong}"])).data.dataset  # noqa: B018
