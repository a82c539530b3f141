"""Sets that are missing or downloaded."""

from __future__ import annotations

import functools
import hashlib
import http.server
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy.io import savemat

from fedlgm import data
from fedlgm.data import sources
from fedlgm.errors import DataError
from tests.support.data_files import (
    IDX_NAMES,
    bytes_array,
    write_mnist,
)


@pytest.mark.parametrize("name", list(sources.FILE_SETS))
def test_missing_set_says_where_and_what(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_DEBIAN", tmp_path / "debian")
    spec = sources.FILE_SETS[name]
    packaged = None if spec.debian is None else tmp_path / "debian" / "lib"
    monkeypatch.setitem(sources.FILE_SETS, name, replace(spec, debian=packaged))
    with pytest.raises(DataError) as caught:
        data.load(name, tmp_path)
    message = str(caught.value)
    assert message.startswith(f"{name} not found: looked for {spec.files[0]}")
    for folder in (
        tmp_path,
        tmp_path / name,
        tmp_path / "store" / name,
        packaged or tmp_path / "debian" / name,
    ):
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
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(served))
    )
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield served, f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


def test_download_fills_the_store(
    tmp_path: Path, mirror: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import torchvision

    served, address = mirror
    train_x, train_y, _, _ = write_mnist(served, packed=True, seed=30)
    names = [name + ".gz" for name in IDX_NAMES]
    sums = [hashlib.md5((served / name).read_bytes()).hexdigest() for name in names]
    monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [address])
    monkeypatch.setattr(
        torchvision.datasets.MNIST, "resources", list(zip(names, sums, strict=True))
    )
    monkeypatch.delenv("FEDLGM_OFFLINE")
    before = socket.getdefaulttimeout()
    mnist = data.load("mnist")
    assert socket.getdefaulttimeout() == before
    assert np.array_equal(mnist.train_y, train_y)
    assert np.allclose(mnist.train_x[:, 0] * 127.5 + 127.5, train_x, atol=1e-4)
    monkeypatch.setenv("FEDLGM_OFFLINE", "1")
    assert data.load("mnist") is mnist


def test_svhn_download_fills_the_store(
    mirror: tuple[Path, str], monkeypatch: pytest.MonkeyPatch
) -> None:
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
        DataError,
        match=r"^mnist not found.*The download failed: .*[Rr]efused.*To fix it, put the four",
    ):
        data.load("mnist")


def test_silent_server_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision

    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        monkeypatch.setattr(sources, "_TIMEOUT", 0.2)
        monkeypatch.setattr(
            torchvision.datasets.MNIST, "mirrors", [f"http://127.0.0.1:{silent.getsockname()[1]}/"]
        )
        monkeypatch.delenv("FEDLGM_OFFLINE")
        with pytest.raises(DataError, match=r"The download failed: .*timed out"):
            data.load("mnist")
