"""Published sets that are read from files: where the files are searched for, how they are
downloaded, and how they are converted to a `DataSet`.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from fedlgm.data import formats, text
from fedlgm.data.dataset import DataSet
from fedlgm.data.formats import Samples
from fedlgm.data.pixels import Pixels
from fedlgm.errors import DataError
from fedlgm.files import explain_failure

_DEBIAN = Path("/usr/share/datasets")
_TIMEOUT = 10.0  # a download is abandoned after this many seconds without an answer


@dataclass(frozen=True)
class FileSet:
    """Description of a published set and its files.

    Attributes:
        classes: number of classes, or number of characters in the alphabet.
        shape: shape of one input.
        train: glob patterns of the files of the training examples. Each pattern must match a file
            in the set's folder.
        read: function that reads the examples from the lists of files that match the patterns. It
            returns (train, test) if one file holds all examples.
        layout: folder below a data directory in which torchvision or LEAF keeps the set.
        advice: beginning of a sentence about how to get the files by hand, which ends with "into
            <folder>".
        torchvision: class of `torchvision.datasets` that downloads the set, or None.
        debian: folder in which Debian's package installs the files; None stands for the folder with
            the set's name among Debian's data sets.
        examples: published number of training examples, or None.
        test: patterns of the files of the test examples; empty if one file holds all examples.
    """

    classes: int
    shape: tuple[int, ...]
    train: tuple[str, ...]
    read: Callable[..., Any]
    layout: str
    advice: str
    torchvision: str | None = None
    debian: Path | None = None
    examples: int | None = None
    test: tuple[str, ...] = ()

    @property
    def files(self) -> tuple[str, ...]:
        """Patterns of all files of the set."""
        return (*self.train, *self.test)

    def samples(self, folder: Path, patterns: Sequence[str]) -> Any:
        """Read the examples in those files of a folder that match the patterns."""
        return self.read(*(_matching_files(folder, pattern) for pattern in patterns))


def _matching_files(folder: Path, pattern: str) -> list[Path]:
    """List the files of `folder` that match `pattern`, sorted by name, so that an unpacked file
    comes before its .gz.
    """
    return sorted(path for path in folder.glob(pattern) if path.is_file())


def _read_bible(files: Sequence[Path], by_chapter: bool) -> tuple[Samples, Samples]:
    texts: dict[object, str] = {}
    for book, number, chapter in text.read_bible(files[0]):
        user = (book, number) if by_chapter else book
        texts[user] = f"{texts[user]}\n{chapter}" if user in texts else chapter
    return text.windows(texts)


_IDX_FILES = ("train-images-idx3-ubyte*", "train-labels-idx1-ubyte*")
_IDX_TEST_FILES = ("t10k-images-idx3-ubyte*", "t10k-labels-idx1-ubyte*")
_CIFAR_SITE = "https://www.cs.toronto.edu/~kriz/cifar.html"
_CIFAR = partial(FileSet, shape=(3, 32, 32), examples=50_000)
_MNIST = partial(
    FileSet,
    classes=10,
    shape=(1, 28, 28),
    train=_IDX_FILES,
    test=_IDX_TEST_FILES,
    read=formats.read_idx_pair,
    examples=60_000,
)
_BIBLE = partial(
    FileSet,
    classes=len(text.ALPHABET),
    shape=(text.LENGTH,),
    train=("bible.data",),
    layout="bible-kjv",
    advice="install Debian's package bible-kjv-text, or put its file bible.data",
    debian=Path("/usr/lib"),
)

FILE_SETS: dict[str, FileSet] = {
    "mnist": _MNIST(layout="MNIST/raw", torchvision="MNIST", advice="put the four files"),
    "fashion-mnist": _MNIST(
        layout="FashionMNIST/raw",
        torchvision="FashionMNIST",
        advice="install Debian's package dataset-fashion-mnist, or put the four files",
    ),
    "cifar10": _CIFAR(
        classes=10,
        train=tuple(f"data_batch_{i}" for i in range(1, 6)),
        test=("test_batch",),
        read=partial(formats.read_cifar, label_key="labels"),
        layout="cifar-10-batches-py",
        torchvision="CIFAR10",
        advice=f"put the files of cifar-10-python.tar.gz ({_CIFAR_SITE})",
    ),
    "cifar100": _CIFAR(
        classes=100,
        train=("train",),
        test=("test",),
        read=partial(formats.read_cifar, label_key="fine_labels"),
        layout="cifar-100-python",
        torchvision="CIFAR100",
        advice=f"put the files of cifar-100-python.tar.gz ({_CIFAR_SITE})",
    ),
    "svhn": FileSet(
        classes=10,
        shape=(3, 32, 32),
        train=("train_32x32.mat",),
        test=("test_32x32.mat",),
        read=formats.read_svhn,
        layout="SVHN",
        torchvision="SVHN",
        examples=73_257,
        advice="put the cropped-digits files of http://ufldl.stanford.edu/housenumbers",
    ),
    "femnist": FileSet(
        classes=62,
        shape=(1, 28, 28),
        train=("train/*.json",),
        test=("test/*.json",),
        read=formats.read_leaf,
        layout="femnist/data",
        advice="create train/ and test/ with LEAF's FEMNIST scripts (https://leaf.cmu.edu) and put "
        "them",
    ),
    "bible-kjv": _BIBLE(read=partial(_read_bible, by_chapter=False)),
    "bible-kjv-chapters": _BIBLE(read=partial(_read_bible, by_chapter=True)),
}


def store() -> Path:
    """Return the folder of downloaded and prepared sets: `$FEDLGM_DATA`, or ~/.cache/fedlgm if this
    is not set.
    """
    return Path(os.environ.get("FEDLGM_DATA") or Path.home() / ".cache" / "fedlgm")


def locate(
    name: str, data_dir: str | Path | None, *, download: bool, files: tuple[str, ...] | None = None
) -> Path:
    """Find the folder that contains the files of the set `name`. If there is none, download the
    set.

    Args:
        name: key of `FILE_SETS`.
        data_dir: directory searched first, or None.
        download: whether torchvision may download the set.
        files: patterns of the files that are needed. With None, all files of the set are needed.

    Returns:
        The folder.

    Raises:
        DataError: `data_dir` is not a directory, or no folder holds the set and it cannot be
            downloaded.
    """
    if data_dir is not None and not Path(data_dir).is_dir():
        raise DataError(
            f"the data folder {str(data_dir)!r} (data.dir in a recipe) is not a directory"
        )
    spec = FILE_SETS[name]
    root, needed = store(), spec.files if files is None else files
    folders = [root / name, root / spec.layout, spec.debian or _DEBIAN / name]
    if data_dir is not None:
        # Files directly in a directory are accepted only if the directory was given for this set,
        # because MNIST and Fashion-MNIST use the same file names.
        folders = [Path(data_dir) / below for below in ("", name, spec.layout)] + folders
    folder = _first_complete(folders, needed)
    if folder is not None:
        return folder
    problem = _download(name, spec, root, download)
    folder = _first_complete(folders, needed)
    if folder is None:
        raise DataError(
            f"{name} not found: looked for {', '.join(needed)} in {', '.join(map(str, folders))}. "
            f"{problem} To fix it, {spec.advice} into {root / name} or a directory given as "
            "data_dir."
        )
    return folder


@cache
def read(name: str, folder: Path) -> DataSet:
    """Read the set `name` of `FILE_SETS` from the folder that `locate` found. The set stays in
    memory until the process ends.

    Returns:
        The set. Its inputs are pixels in [-1, 1], or the numbers of characters of `text.ALPHABET`.

    Raises:
        DataError: if a file is damaged.
    """
    spec = FILE_SETS[name]
    train = spec.samples(folder, spec.train)
    train, test = (train, spec.samples(folder, spec.test)) if spec.test else train
    return _build_data_set(name, folder, train, test)


def read_test(name: str, folder: Path) -> DataSet:
    """Read only the test examples of the set `name`. They are both the training part and the test
    part of the result.

    Raises:
        DataError: if a file is damaged.
    """
    spec = FILE_SETS[name]
    samples = spec.samples(folder, spec.test)._replace(user=None)
    return _build_data_set(name, folder, samples, samples)


def _build_data_set(name: str, folder: Path, train: Samples, test: Samples) -> DataSet:
    classes = FILE_SETS[name].classes
    for part, y in (("test", test.y), ("training", train.y)):
        if not len(y) or y.min() < 0 or y.max() >= classes:
            raise DataError(
                f"{folder}: the {part} labels of {name} must exist and lie in [0, {classes})"
            )
    users = (
        None
        if train.user is None
        else np.unique(train.user, return_inverse=True)[1].astype(np.int64)
    )
    return DataSet(name, _scale(train.x), train.y, _scale(test.x), test.y, classes, users)


def _scale(x: np.ndarray) -> Any:
    """Scale bytes, or floats in [0, 1], to float32 in [-1, 1]. Integers, which are numbers of
    characters, are not changed.
    """
    if x.dtype == np.int64:
        return x
    if x.dtype == np.uint8:
        return Pixels.from_bytes(x)
    scaled = x.astype(np.float32)
    scaled *= 2.0
    scaled -= 1.0
    return scaled


def _first_complete(folders: list[Path], files: Sequence[str]) -> Path | None:
    for folder in folders:
        if all(_matching_files(folder, pattern) for pattern in files):
            return folder.resolve()
    return None


def may_download(allowed: bool) -> bool:
    """Whether the caller allows downloads and the environment variable FEDLGM_OFFLINE does not
    forbid them.
    """
    return allowed and os.environ.get("FEDLGM_OFFLINE", "") in ("", "0")


def _download(name: str, spec: FileSet, store: Path, allowed: bool) -> str:
    """Try to download the set into `store`. Return a sentence about the failure, or ""."""
    if spec.torchvision is None:
        return "No ready-made files of it are published."
    if not may_download(allowed):
        return "Downloads are off."
    from torchvision import datasets

    constructor = getattr(datasets, spec.torchvision)
    try:
        with _socket_timeout(_TIMEOUT):
            if name == "svhn":
                for split in ("train", "test"):
                    constructor(store / spec.layout, split=split, download=True)
            else:
                constructor(store, download=True)
    except (OSError, RuntimeError) as error:
        return (
            explain_failure(
                "The download failed", OSError(" ".join(str(error).split())), "check the network"
            )
            + "."
        )
    return ""


@contextmanager
def _socket_timeout(seconds: float) -> Iterator[None]:
    """Set a timeout for all connections that are opened in the block, because torchvision sets
    none.
    """
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds)
    try:
        yield
    finally:
        socket.setdefaulttimeout(before)
