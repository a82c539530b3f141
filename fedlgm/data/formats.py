"""Readers of the files in which public data sets are published. For a damaged file, a reader raises
a `DataError` that names the file.

The readers accept the files that torchvision reads, and also compressed or partial copies.
torchvision, in contrast, requires unpacked files with the MD5 sums of the original release, and
unpickles CIFAR's files without restrictions.
"""

from __future__ import annotations

import gzip
import json
import math
import pickle
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedlgm.errors import DataError
from fedlgm.files import explain_failure


class Samples(NamedTuple):
    """Samples that a reader found in the files of a set.

    Attributes:
        x: images [n, C, H, W], uint8, or float32 in [0, 1].
        y: labels, int64 [n].
        user: name of each sample's user, str [n], or None.
    """

    x: np.ndarray
    y: np.ndarray
    user: np.ndarray | None = None


def read_idx(path: Path) -> np.ndarray:
    """Read an array of unsigned bytes from an IDX file (MNIST's format), which may be gzipped.

    Raises:
        DataError: the file cannot be read, is not an IDX file of unsigned bytes, or is damaged.
    """
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            content = file.read()
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(explain_failure(f"{path} cannot be read", error)) from error
    # The header is two zero bytes, the type (8 = unsigned byte), the number of dimensions, and the
    # size of each dimension (big-endian).
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise DataError(f"{path} is not an IDX file of unsigned bytes")
    start = 4 + 4 * content[3]
    if len(content) < start:
        raise DataError(f"{path} is damaged: it ends within its header")
    shape = tuple(np.frombuffer(content[4:start], dtype=">u4").tolist())
    if len(content) - start != math.prod(shape):
        raise DataError(
            f"{path} is damaged: it has {len(content) - start} bytes for an array of shape {shape}"
        )
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def read_idx_pair(image_files: Sequence[Path], label_files: Sequence[Path]) -> Samples:
    """Read grey images and their labels from two IDX files. Only the first file of each sequence is
    read.

    Raises:
        DataError: a file cannot be read, or images and labels do not match.
    """
    images, labels = image_files[0], label_files[0]
    x, y = read_idx(images), read_idx(labels)
    if x.ndim != 3 or y.shape != x.shape[:1]:
        raise DataError(
            f"{labels} holds labels of shape {y.shape}, which do not match the images {x.shape} of "
            f"{images}"
        )
    return Samples(x[:, None], y.astype(np.int64))


class _ArrayUnpickler(pickle.Unpickler):
    """An unpickler that accepts only arrays and plain containers, because a data file must not be
    able to run code.
    """

    _ALLOWED = frozenset({"_reconstruct", "ndarray", "dtype", "scalar", "_frombuffer"})

    def find_class(self, module: str, name: str) -> Any:
        if (module.split(".")[0] == "numpy" and name in self._ALLOWED) or (module, name) == (
            "_codecs",
            "encode",
        ):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"it refers to {module}.{name}, which is not part of the CIFAR format"
        )


def read_cifar(*files: Sequence[Path], label_key: str) -> Samples:
    """Read the images of CIFAR's Python version from all batches.

    Args:
        files: files with one pickled batch each. A batch is a dict with "data" (uint8 [n, 3072],
            channel first) and `label_key`.
        label_key: "labels" for CIFAR-10, "fine_labels" for CIFAR-100.

    Returns:
        Images uint8 [n, 3, 32, 32] and labels.

    Raises:
        DataError: a file is not a batch of CIFAR's Python version.
    """
    xs, ys = [], []
    for (path,) in files:
        try:
            with path.open("rb") as file:
                batch = _ArrayUnpickler(file, encoding="latin1").load()
            xs.append(np.asarray(batch["data"], dtype=np.uint8).reshape(-1, 3, 32, 32))
            ys.append(np.asarray(batch[label_key], dtype=np.int64))
            if ys[-1].shape != xs[-1].shape[:1]:
                raise ValueError(f"{len(xs[-1])} images but {len(ys[-1])} labels")
        # A damaged pickle can raise nearly anything.
        except Exception as error:
            raise DataError(
                f"{path} is not a batch of CIFAR's Python version: {error!r}"
            ) from error
    return Samples(np.concatenate(xs), np.concatenate(ys))


def read_svhn(files: Sequence[Path]) -> Samples:
    """Read the cropped digits of SVHN from one MATLAB file. The label 10 in the file, which stands
    for the digit 0, becomes 0.

    Raises:
        DataError: the file is not one of SVHN's cropped digits, or is damaged.
    """
    from scipy.io import loadmat

    (path,) = files
    try:
        content = loadmat(path)
        x = np.ascontiguousarray(np.asarray(content["X"], dtype=np.uint8).transpose(3, 2, 0, 1))
        y = np.asarray(content["y"]).astype(np.int64).reshape(-1)
    # A damaged MATLAB file can raise nearly anything.
    except Exception as error:
        raise DataError(f"{path} is not a cropped-digits file of SVHN: {error!r}") from error
    if y.shape != x.shape[:1]:
        raise DataError(f"{path} is damaged: {len(x)} images but {len(y)} labels")
    return Samples(x, np.where(y == 10, 0, y))


def read_leaf(paths: Sequence[Path]) -> Samples:
    """Read the images of LEAF's FEMNIST (Caldas et al., 2018) from JSON files, with the writer of
    each image.

    Args:
        paths: files with "users" and "user_data": user -> {"x": [784 numbers in [0, 1]], "y":
            [labels]}.

    Returns:
        Images float32 [n, 1, 28, 28], labels and users. In the images, ink is 1 and paper is 0,
        whereas LEAF stores paper as 1.

    Raises:
        DataError: a file is not a LEAF file of FEMNIST, or the files contain no users.
    """
    xs: list[np.ndarray] = []
    ys: list[np.ndarray] = []
    users: list[np.ndarray] = []
    for path in paths:
        try:
            content = json.loads(path.read_bytes())
            for user in content["users"]:
                samples = content["user_data"][user]
                y = np.asarray(samples["y"], dtype=np.int64)
                xs.append(
                    1.0 - np.asarray(samples["x"], dtype=np.float32).reshape(len(y), 1, 28, 28)
                )
                ys.append(y)
                users.append(np.full(len(y), str(user)))
        except (OSError, ValueError, KeyError, TypeError) as error:
            what = f"{path} is not a LEAF file of FEMNIST"
            raise DataError(explain_failure(what, error)) from error
    if not ys:
        raise DataError(f"no users in {', '.join(map(str, paths))}")
    return Samples(np.concatenate(xs), np.concatenate(ys), np.concatenate(users))
