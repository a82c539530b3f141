"""Data sets and their division among clients.

data = load("fashion-mnist")
clients = divide(data, 500, "dirichlet", alpha=0.1, seed=7)
x = data.train_x[clients[3]]

own = load({"train": (x, y), "test": (test_x, test_y), "clients": [[0, 1, 2], [3, 4]]})
clients = divide(own, 2, "natural")
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fedlgm import inputs
from fedlgm.data.bundled import digits, synthetic
from fedlgm.data.dataset import DataSet
from fedlgm.data.division import divide
from fedlgm.data.images import NAME as IMAGE_FOLDER
from fedlgm.data.images import load_folder
from fedlgm.data.partition import Partition, partition, schemes
from fedlgm.data.partition import options as scheme_options
from fedlgm.data.sources import FILE_SETS, FileSet, locate, read
from fedlgm.errors import ConfigError, DataError, FedlgmError, alternatives
from fedlgm.extension import is_reference, load_object, raised_in

__all__ = [
    "IMAGE_FOLDER",
    "DataSet",
    "Partition",
    "divide",
    "load",
    "names",
    "outline",
    "partition",
    "published_examples",
    "scheme_options",
    "schemes",
    "synthetic",
    "twin",
]

_synthetic = cache(synthetic)
_HALF = re.compile(r"([^:/]+)/(public|private)")


def names() -> tuple[str, ...]:
    """Names that `load` knows."""
    return ("digits", *FILE_SETS, "synthetic", IMAGE_FOLDER)


Loadable = str | DataSet | Mapping[str, Any] | Callable[[], Any]


def load(
    name: Loadable,
    data_dir: str | Path | None = None,
    *,
    download: bool = True,
    pixels: Sequence[float] | None = None,
    **images: Any,
) -> DataSet:
    """Load a data set; a bundled one is held once per process.

    Files are looked for in `data_dir`, then in `$FEDLGM_DATA` (~/.cache/fedlgm when it is not set), then where Debian's
    packages put them; a set that is nowhere is downloaded by torchvision into `$FEDLGM_DATA`. Setting FEDLGM_OFFLINE=1
    forbids downloads.

    Args:
        name: one of `names()`; "synthetic-N" is synthetic data with N training samples. With "/private" or "/public"
            after it, that half of its training examples, dealt out at random once and for all: for runs that need
            public examples of the same kind. Or your own: a `DataSet`, a mapping as `DataSet.from_mapping` takes it, a
            function without arguments that gives one of these, or "package.module:name" of any of them.
        data_dir: directory of the files: bare, in a folder of the set's name, or in torchvision's (LEAF's) layout.
        download: whether to download a missing set.
        pixels: (low, high) that the darkest and the brightest value of a bundled image set become, instead of (-1, 1).
        images: for "image-folder", whose `data_dir` is the folder: `image_size`, `channels` and `attribute`, see
            `fedlgm.data.images.load_folder`.

    Returns:
        The set. Pixels lie in [-1, 1] (grey: from background to ink), scaled by constants that do not depend on the
        data and so cost no privacy; synthetic data are not bounded.

    Raises:
        ConfigError: if the name is unknown or does not import.
        DataError: if the files are missing (the message says where to put them) or damaged (it names the file), or your
            own data are not as `DataSet.from_arrays` wants them, or your function raised something.

    >>> x, y = np.zeros((6, 3)), np.arange(6) % 2
    >>> load({"train": (x, y), "test": (x, y)}).shape, load("synthetic-10").train_x.shape[0]
    ((3,), 10)
    """
    if pixels is not None:
        return _between(load(name, data_dir, download=download, **images), tuple(pixels))
    if name == IMAGE_FOLDER:
        return load_folder(data_dir, **images)
    if images and name not in (f"{IMAGE_FOLDER}/private", f"{IMAGE_FOLDER}/public"):
        raise ConfigError(f"{next(iter(images))} is for data.name = {IMAGE_FOLDER!r}, not for {name!r}")
    if not isinstance(name, str):
        return _own(name, repr(getattr(name, "__name__", type(name).__name__)))
    if is_reference(name):
        return _own(load_object(name, "data set"), repr(name))
    if (half := _HALF.fullmatch(name)) is not None:
        return _part(load(half[1], data_dir, download=download, **images), name, half[2] == "public")
    if name == "digits":
        return digits()
    if name in FILE_SETS:
        return read(name, locate(name, data_dir, download=download))
    size = re.fullmatch(r"synthetic(?:-(\d+))?", name)
    if size is None:
        raise ConfigError(
            f"unknown data set {name!r}; "
            + alternatives(name, names(), "synthetic-N with N samples", "your own as package.module:name")
        )
    return _synthetic(int(size[1])) if size[1] else _synthetic()


def outline(name: str) -> DataSet | None:
    """A bundled set without its examples: shapes and classes, as a model needs them; None where only the files say.

    >>> outline("fashion-mnist").shape, outline("fashion-mnist").classes
    ((1, 28, 28), 10)
    """
    spec = _files_of(name)
    if spec is None:
        return None
    text = len(spec.shape) == 1
    x = np.empty((0, *spec.shape), dtype=np.int64 if text else np.float32)
    y = np.empty((0, *spec.shape) if text else 0, dtype=np.int64)
    return DataSet(name, x, y, x, y, spec.classes)


def published_examples(name: str) -> int | None:
    """Number of training examples of a bundled set, or of its half, without its files; None where only they say.

    >>> published_examples("cifar10"), published_examples("mnist/public"), published_examples("femnist")
    (50000, 30000, None)
    """
    spec, half = _files_of(name), _HALF.fullmatch(name)
    if spec is None or spec.examples is None:
        return None
    return spec.examples if half is None else len(range(spec.examples)[_rows(spec.examples, half[2] == "public")])


def twin(name: str) -> str | None:
    """The public half of the set whose private half is `name`; None for any other name.

    >>> twin("digits/private"), twin("digits")
    ('digits/public', None)
    """
    half = _HALF.fullmatch(name)
    return f"{half[1]}/public" if half is not None and half[2] == "private" else None


def _files_of(name: str) -> FileSet | None:
    """The bundled set of files that `name` is, or is a half of."""
    half = _HALF.fullmatch(name)
    return FILE_SETS.get(name if half is None else half[1])


def _rows(examples: int, public: bool) -> slice:
    """Which of so many shuffled training examples are in a half."""
    return slice(examples // 2, None) if public else slice(examples // 2)


def _part(whole: DataSet, name: str, public: bool) -> DataSet:
    """One of two halves of the training examples; the test examples are the same."""
    order = np.random.default_rng(0).permutation(len(whole.train_y))
    rows = np.sort(order[_rows(len(order), public)])
    users = None if whole.train_user is None else np.unique(whole.train_user[rows], return_inverse=True)[1]
    x, y = inputs.take(whole.train_x, rows), whole.train_y[rows]
    return DataSet(name, x, y, whole.test_x, whole.test_y, whole.classes, users)


def _between(found: DataSet, pixels: tuple[float, ...]) -> DataSet:
    """A bundled set of images in [-1, 1], its values moved to [low, high]."""
    base = found.name.partition("/")[0]
    if base not in ("digits", IMAGE_FOLDER) and not (base in FILE_SETS and len(FILE_SETS[base].shape) == 3):
        raise ConfigError(f"pixels is for bundled sets of images: the values of {found.name!r} are taken as they are")
    if len(pixels) != 2 or not all(map(math.isfinite, pixels)) or not pixels[0] < pixels[1]:
        raise ConfigError(f"pixels must be two numbers, the lower one first, such as [0, 1]; got {list(pixels)}")
    low, half = np.float32(pixels[0]), np.float32((pixels[1] - pixels[0]) / 2)
    train_x, test_x = (low + half * (np.asarray(x) + np.float32(1)) for x in (found.train_x, found.test_x))
    return replace(found, train_x=train_x, test_x=test_x)


def _own(found: Any, label: str) -> DataSet:
    """A user's own set."""
    if callable(found):
        try:
            found = found()
        except (FedlgmError, OSError, MemoryError):
            raise
        except Exception as error:  # a user's function may raise anything
            raise DataError(f"data set {label}: {raised_in(found, error)}") from error
    if isinstance(found, DataSet):
        return found
    if isinstance(found, Mapping):
        return DataSet.from_mapping(found)
    raise DataError(
        f"data set {label} must be a fedlgm.data.DataSet or {{'train': (x, y), 'test': (x, y)}}, or a function that "
        f"gives one; it is of type {type(found).__name__}"
    )
