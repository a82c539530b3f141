from __future__ import annotations

import functools
import gzip
import hashlib
import http.server
import json
import pickle
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from fedlgm import data
from fedlgm.data import sources
from fedlgm.errors import ConfigError, DataError
from simulations.config import recipe
from simulations.config.assembly import Assembly

IDX_NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
DEBIAN_FASHION = Path("/usr/share/datasets/fashion-mnist")


@pytest.fixture(autouse=True)
def _own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or fills the user's store, nor goes to the internet."""
    monkeypatch.setenv("FEDLGM_DATA", str(tmp_path / "store"))
    monkeypatch.setenv("FEDLGM_OFFLINE", "1")


def bytes_array(*shape: int, seed: int = 0, high: int = 256) -> np.ndarray:
    return np.random.default_rng(seed).integers(high, size=shape).astype(np.uint8)


def idx_bytes(array: np.ndarray) -> bytes:
    header = b"\x00\x00\x08" + bytes([array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return header + array.tobytes()


def write_mnist(folder: Path, *, packed: bool = False, seed: int = 0) -> list[np.ndarray]:
    """Four small IDX files; returns the arrays in the order of IDX_NAMES."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = [
        bytes_array(20, 28, 28, seed=seed),
        bytes_array(20, seed=seed + 1, high=10),
        bytes_array(8, 28, 28, seed=seed + 2),
        bytes_array(8, seed=seed + 3, high=10),
    ]
    for name, array in zip(IDX_NAMES, arrays, strict=True):
        content = idx_bytes(array)
        (folder / (name + ".gz" * packed)).write_bytes(gzip.compress(content) if packed else content)
    return arrays


def write_cifar(path: Path, label_key: str, classes: int, n: int = 6, seed: int = 0) -> tuple[np.ndarray, list[int]]:
    """One batch as in the original archive: protocol 2, rows of 3072 bytes, labels as a list."""
    path.parent.mkdir(parents=True, exist_ok=True)
    x = bytes_array(n, 3072, seed=seed)
    y = bytes_array(n, seed=seed + 100, high=classes).tolist()
    path.write_bytes(
        pickle.dumps({"batch_label": path.name, label_key: y, "data": x, "filenames": ["a"] * n}, protocol=2)
    )
    return x, y


def write_cifar10(folder: Path) -> list[tuple[np.ndarray, list[int]]]:
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    return [write_cifar(folder / name, "labels", 10, seed=i) for i, name in enumerate(names)]


def write_leaf(path: Path, users: dict[str, tuple[list[list[float]], list[int]]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    user_data = {user: {"x": x, "y": y} for user, (x, y) in users.items()}
    content = {"users": list(users), "num_samples": [len(y) for _, y in users.values()], "user_data": user_data}
    path.write_text(json.dumps(content))


# --- sets without files ---


def test_digits_is_a_fixed_stratified_split_of_all_samples() -> None:
    from sklearn.datasets import load_digits

    digits = data.load("digits")
    assert digits.shape == (1, 8, 8)
    assert (len(digits.train_y), len(digits.test_y), digits.classes) == (1442, 355, 10)
    assert digits.train_x.dtype == np.float32
    assert digits.train_y.dtype == np.int64
    assert digits.train_x.min() == -1.0
    assert digits.train_x.max() == 1.0
    share = np.bincount(digits.test_y) / np.bincount(np.concatenate([digits.train_y, digits.test_y]))
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


def test_nbytes_counts_every_array() -> None:
    digits = data.load("digits")
    assert digits.nbytes == 1797 * (64 * 4 + 8)


def test_names_and_unknown_name() -> None:
    assert set(data.names()) == {
        "digits", "mnist", "fashion-mnist", "cifar10", "cifar100", "svhn", "femnist", "bible-kjv",
        "bible-kjv-chapters", "image-folder", "synthetic",
    }  # fmt: skip
    with pytest.raises(ConfigError, match=r"unknown data set 'cifar'; did you mean 'cifar10'"):
        data.load("cifar")


# --- MNIST and Fashion-MNIST ---


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


@pytest.mark.skipif(not DEBIAN_FASHION.is_dir(), reason="needs Debian's package dataset-fashion-mnist")
def test_fashion_mnist_of_debian() -> None:
    fashion = data.load("fashion-mnist")
    assert fashion.train_x.shape == (60_000, 1, 28, 28)
    assert fashion.test_x.shape == (10_000, 1, 28, 28)
    for half in ("", "/private", "/public"):
        name = f"fashion-mnist{half}"
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


@pytest.mark.parametrize("pixels", [(1, 0), (0, 0), (0,), (0, 1, 2), (0, float("inf")), (float("nan"), 1)])
def test_pixels_that_are_no_interval_are_refused(pixels: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="pixels must be two numbers"):
        data.load("digits", pixels=pixels)


def test_pixels_are_for_images_alone() -> None:
    x, y = np.zeros((4, 3), dtype=np.float32), np.zeros(4, dtype=np.int64)
    for name in ("synthetic-20", {"train": (x, y), "test": (x, y)}):
        with pytest.raises(ConfigError, match="pixels is for bundled sets of images"):
            data.load(name, pixels=(0, 1))


def test_a_recipe_names_the_interval_of_its_pixels() -> None:
    made = recipe.load("digits", ["data.pixels=[0, 1]"])
    assert recipe.load("digits").data.pixels is None
    assert Assembly(made).dataset.train_x.min() == 0.0
    for wrong, message in (
        ("[1, 0]", r"data\.pixels must be two numbers"),
        ("3", "data.pixels"),
        ("[0]", "data.pixels"),
    ):
        with pytest.raises(ConfigError, match=message):
            Assembly(recipe.load("digits", [f"data.pixels={wrong}"])).dataset  # noqa: B018


# --- CIFAR, SVHN, FEMNIST ---


def test_cifar10_joins_batches_channel_first(tmp_path: Path) -> None:
    batches = write_cifar10(tmp_path / "cifar-10-batches-py")
    cifar = data.load("cifar10", tmp_path)
    assert cifar.train_x.shape == (30, 3, 32, 32)
    assert cifar.train_y.tolist() == [label for _, y in batches[:-1] for label in y]
    assert cifar.test_y.tolist() == batches[-1][1]
    # Green of image 1 of batch 2, row 3, column 5: bytes 1024 + 32 * 3 + 5 of its row.
    assert cifar.train_x[7, 1, 3, 5] == pytest.approx(batches[1][0][1, 1024 + 101] / 127.5 - 1, abs=1e-6)
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
    with pytest.raises(DataError, match=r"data_batch_3.*no part of the CIFAR format"):
        data.load("cifar10", tmp_path)
    assert not (tmp_path / "written").exists()


@pytest.mark.parametrize("below", ["", "svhn", "SVHN"])
def test_svhn_label_ten_is_the_digit_zero(tmp_path: Path, below: str) -> None:
    (tmp_path / below).mkdir(exist_ok=True)
    x = bytes_array(32, 32, 3, 5)
    for split in ("train", "test"):
        savemat(tmp_path / below / f"{split}_32x32.mat", {"X": x, "y": np.array([[10], [1], [9], [10], [5]], np.uint8)})
    svhn = data.load("svhn", tmp_path)
    assert svhn.train_y.tolist() == [0, 1, 9, 0, 5]
    assert svhn.shape == (3, 32, 32)
    assert svhn.test_x[4, 2, 7, 9] == pytest.approx(x[7, 9, 2, 4] / 127.5 - 1, abs=1e-6)


def test_femnist_keeps_users(tmp_path: Path) -> None:
    pixel = [[0.25] * 784]
    write_leaf(tmp_path / "train/all_data_0.json", {"f02": (pixel * 2, [61, 3]), "f01": (pixel, [7])})
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
        "digits", [f"data={{name = 'femnist', dir = '{tmp_path}', partition = 'natural'}}", "federation.clients=3"]
    )
    assert Assembly(of_a_recipe).partition.sizes.tolist() == [1, 2, 3]
    other = Assembly(recipe.load("digits", ["data={name = 'digits', partition = 'natural'}"]))
    with pytest.raises(ConfigError, match="'digits' has none"):
        other.partition  # noqa: B018


# --- damage: the message names the file ---


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
        savemat(folder / f"{split}_32x32.mat", {"X": bytes_array(32, 32, 3, 2), "y": np.ones((3, 1))})


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
    ("mnist", _damage_idx(LABELS, idx_bytes(bytes_array(19, high=10))), LABELS + " holds labels of shape"),
    ("mnist", _damage_idx(LABELS, idx_bytes(np.full(20, 10, np.uint8))), "training labels of mnist"),
    ("cifar10", _damage_cifar, "data_batch_2 is not a batch"),
    ("svhn", _damage_mat, "test_32x32.mat is not a cropped-digits file"),
    ("svhn", _mismatched_mat, "train_32x32.mat is damaged: 2 images but 3 labels"),
    ("femnist", _damage_leaf, "a.json is not a LEAF file"),
    ("femnist", _empty_leaf, "no users in .*train/a.json"),
]


@pytest.mark.parametrize(("name", "damage", "message"), DAMAGES)
def test_damage_is_reported(tmp_path: Path, name: str, damage: Callable[[Path], None], message: str) -> None:
    damage(tmp_path)
    with pytest.raises(DataError, match=message):
        data.load(name, tmp_path)


# --- missing sets and downloads ---


@pytest.mark.parametrize("name", list(sources.FILE_SETS))
def test_missing_set_says_where_and_what(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_DEBIAN", tmp_path / "debian")
    spec = sources.FILE_SETS[name]
    packaged = None if spec.debian is None else tmp_path / "debian" / "lib"
    monkeypatch.setitem(sources.FILE_SETS, name, replace(spec, debian=packaged))
    with pytest.raises(DataError) as caught:
        data.load(name, tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{name} not found: looked for {spec.files[0]}")
    for folder in (tmp_path, tmp_path / name, tmp_path / "store" / name, packaged or tmp_path / "debian" / name):
        assert str(folder) in message
    assert ("No ready-made files" if spec.torchvision is None else "Downloads are off.") in message
    assert ("dataset-fashion-mnist" in message) == (name == "fashion-mnist")
    assert ("bible-kjv-text" in message) == name.startswith("bible")


def test_data_dir_must_exist(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere' \(data\.dir in a recipe\) is not a directory"):
        data.load("mnist", tmp_path / "nowhere")


def test_download_can_be_refused_by_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLGM_OFFLINE", "0")
    with pytest.raises(DataError, match="Downloads are off"):
        data.load("mnist", download=False)


@pytest.fixture
def mirror(tmp_path: Path) -> Iterator[tuple[Path, str]]:
    """A local web server: the folder it serves and its address."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

    served = tmp_path / "served"
    served.mkdir()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(served)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield served, f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def test_download_fills_the_store(tmp_path: Path, mirror: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision

    served, address = mirror
    train_x, train_y, _, _ = write_mnist(served, packed=True, seed=30)
    names = [name + ".gz" for name in IDX_NAMES]
    sums = [hashlib.md5((served / name).read_bytes()).hexdigest() for name in names]
    monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [address])
    monkeypatch.setattr(torchvision.datasets.MNIST, "resources", list(zip(names, sums, strict=True)))
    monkeypatch.delenv("FEDLGM_OFFLINE")
    before = socket.getdefaulttimeout()
    mnist = data.load("mnist")
    assert socket.getdefaulttimeout() == before
    assert np.array_equal(mnist.train_y, train_y)
    assert np.allclose(mnist.train_x[:, 0] * 127.5 + 127.5, train_x, atol=1e-4)
    monkeypatch.setenv("FEDLGM_OFFLINE", "1")
    assert data.load("mnist") is mnist


def test_svhn_download_fills_the_store(mirror: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision

    served, address = mirror
    splits = {}
    for split in ("train", "test"):
        path = served / f"{split}_32x32.mat"
        savemat(path, {"X": bytes_array(32, 32, 3, 2), "y": np.array([[10], [4]])})
        splits[split] = [address + path.name, path.name, hashlib.md5(path.read_bytes()).hexdigest()]
    monkeypatch.setattr(torchvision.datasets.SVHN, "split_list", splits)
    monkeypatch.delenv("FEDLGM_OFFLINE")
    assert data.load("svhn").train_y.tolist() == [0, 4]


def test_failed_download_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        closed_port = free.getsockname()[1]
    monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [f"http://127.0.0.1:{closed_port}/"])
    monkeypatch.delenv("FEDLGM_OFFLINE")
    with pytest.raises(
        DataError, match=r"^mnist not found.*The download failed: .*[Rr]efused.*To fix it, put the four"
    ):
        data.load("mnist")


def test_silent_server_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setattr(sources, "_TIMEOUT", 0.2)
        monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [f"http://127.0.0.1:{silent.getsockname()[1]}/"])
        monkeypatch.delenv("FEDLGM_OFFLINE")
        with pytest.raises(DataError, match=r"The download failed: .*timed out"):
            data.load("mnist")
