"""The node's examples, which the training process reads when it starts."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clients.source import ClientData
from fedlgm import libraries
from fedlgm.data import named_tables, tables
from fedlgm.data.formats import read_idx
from fedlgm.data.names import refuse_masked
from fedlgm.data.pixels import fit_image, readable, upright
from fedlgm.errors import DataError
from fedlgm.files import path_of
from fedlgm.training import inputs
from fedlgm.training.tasks import Task
from fedlgm_nodes.policy import Data, People
from fedlgm_nodes.service import people
from fedlgm_nodes.service.people import Counted

_IMAGES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif", ".tif", ".tiff", ".webp"})


def read(section: Data, folder: Path) -> ClientData:
    """Read the examples as `read_with_people` does, and return only them."""
    return read_with_people(section, folder)[0]


def read_with_people(section: Data, folder: Path) -> tuple[ClientData, Counted | None]:
    """Read the inputs, float32 [n, *shape], and the targets, [n, ...], that the policy describes.
    Targets are int64 if all of them are whole numbers, and otherwise float32. `targets` converts
    them to the form that a task needs.

    Inputs that are unsigned bytes are scaled to [-1, 1] by a factor that does not depend on the
    data. Other numbers are unchanged, unless the policy says how to standardise columns. The rows
    of people who count at other nodes are left out. The second value holds the people who count at
    this node and elsewhere; it is None if the policy has no section about people.

    Args:
        section: [data] of the policy.
        folder: folder to which relative paths refer.

    Raises:
        ConfigError: the system refuses access to a path, for example in another user's folder.
        DataError: files are missing or damaged, or the data hold NaN or do not have the shape that
            the policy states.
    """
    reader: Callable[[Data, Path], Sequence[Any]] = _READERS[section.kind]
    counted: Counted | None = None
    if section.kind != "loader":
        for key, name in (
            ("path", section.path),
            ("labels", "" if section.is_table else section.labels),
        ):
            if name and not path_of(f"data.{key}", folder / name).exists():
                raise DataError(f"data.{key}: there is nothing at {folder / name}")
    try:
        given = reader(section, folder)
        if section.people is not None:
            *given, counted = given
        x, y = given
        refuse_masked(x, "data: inputs")
        refuse_masked(y, "data: labels")
        x, y = np.asarray(x), np.asarray(y)
        y = y.reshape(-1) if y.ndim == 2 and y.shape[1] == 1 else y
    except DataError:
        raise
    except Exception as error:  # readers of files and a user's own function may raise anything
        raise DataError(f"data: the {section.kind} data cannot be read: {error!r}") from error
    if len(x) != len(y):
        raise DataError(f"data: {len(x)} inputs, but {len(y)} labels")
    if x.size != len(x) * int(np.prod(section.shape)):
        raise DataError(
            f"data.shape: inputs are of shape {list(x.shape[1:])}, but the policy says "
            f"{list(section.shape)}"
        )
    if x.dtype == np.uint8:
        x = x.astype(np.float32) / np.float32(127.5) - np.float32(1)
    if x.dtype.kind not in "fiub" or y.dtype.kind not in "fiub":
        raise DataError(
            f"data: inputs and labels must be numbers, got {x.dtype} and {y.dtype}; replace class "
            "names by the numbers 0, 1, ... that all nodes use"
        )
    x = np.ascontiguousarray(x, dtype=np.float32).reshape(len(x), *section.shape)
    if not np.isfinite(x).all():
        raise DataError("data: inputs hold NaN or Inf")
    integers = y.astype(np.int64, copy=True) if np.isfinite(y).all() else y
    y = integers if (integers == y).all() else y.astype(np.float32)
    return ClientData(torch.from_numpy(x), torch.from_numpy(y)), counted


def targets(section: Data, y: Tensor, task: Task) -> Tensor:
    """Convert the targets to the form that a task needs.

    Raises:
        DataError: the task does not accept the targets, or labels lie outside [0, classes).
    """
    values = task.targets(y.numpy(), "node's")
    if task.name == "classification" and ((values < 0) | (values >= section.classes)).any():
        raise DataError(f"data.classes: labels must be whole numbers in [0, {section.classes})")
    return torch.from_numpy(np.ascontiguousarray(values))


def digest(data: ClientData) -> str:
    """SHA-256 of the examples in their order."""
    total = hashlib.sha256()
    for part in (inputs.first(data.x), data.y):
        array = part.numpy()
        total.update(f"{array.dtype.str}{array.shape}".encode())
        total.update(array.reshape(-1).view(np.uint8).data)
    return total.hexdigest()


def _numpy(section: Data, folder: Path) -> tuple[Any, Any]:
    path = folder / section.path
    if path.suffix == ".npy":
        if not section.labels:
            raise DataError("data.labels: a .npy of inputs needs labels = a .npy of labels")
        return np.load(path, allow_pickle=False), np.load(
            folder / section.labels, allow_pickle=False
        )
    with np.load(path, allow_pickle=False) as arrays:
        missing = {"x", "y"} - set(arrays)
        if missing:
            raise DataError(
                f"{path} has no array {', '.join(sorted(missing))}; it must hold x and y"
            )
        return arrays["x"], arrays["y"]


def _idx(section: Data, folder: Path) -> tuple[Any, Any]:
    return read_idx(folder / section.path), read_idx(folder / section.labels)


def _images(section: Data, folder: Path) -> tuple[Any, Any]:
    from PIL import Image

    path = folder / section.path
    if len(section.shape) != 3 or section.shape[0] not in (1, 3):
        raise DataError(
            "data.shape: images are [1, height, width] or [3, height, width], not "
            f"{list(section.shape)}"
        )
    channels, height, width = section.shape
    pixels, labels = [], []
    for number, name in enumerate(section.class_names):
        if not (path / name).is_dir():
            raise DataError(f"data.class_names: there is no folder {path / name}")
        for file in sorted(
            entry for entry in (path / name).rglob("*") if entry.suffix.lower() in _IMAGES
        ):
            with readable(str(file)), Image.open(file) as picture:
                if height == width:  # as in simulations
                    array = fit_image(picture, height, channels)
                else:
                    resized = upright(picture, channels).resize((width, height))
                    array = fit_image(resized, None, channels)
            pixels.append(array)
            labels.append(number)
    return np.stack(pixels) if pixels else np.zeros((0, *section.shape), np.float32), np.array(
        labels, np.int64
    )


def _table(section: Data, folder: Path) -> tuple[Any, ...]:
    """Read and check the rows of a table as in simulations.

    The node has no public rows, so only the policy says which names are classes.
    """
    path = folder / section.path
    marked = section.people
    counted: list[Counted] = []
    frame = read_rows(path, section.labels, *([marked.column] if marked else []))
    if marked is not None:
        frame, *counted = _used_rows(marked, folder, frame)
    features = section.features or tuple(name for name in frame.columns if name != section.labels)
    tables.require_columns([section.labels, *features], frame.columns, str(path))
    x = numbers(frame, features)
    if section.standardise:
        described = tables.describe(frame, features, x, section.standardise)
        x = x if described is None else tables.standardise(x, described)
    return x, _classes_of(section, frame), *counted


def _used_rows(
    marked: People, folder: Path, frame: libraries.DataFrame
) -> tuple[libraries.DataFrame, Counted]:
    """The rows of the people who count at this node, without the column of pseudonyms, and the
    people who count at this node and elsewhere.
    """
    tables.require_columns([marked.column], frame.columns, "data.people")
    pseudonyms = people.pseudonyms(frame.pop(marked.column), marked.column)
    elsewhere = people.read_list(marked, folder)
    used = [pseudonym not in elsewhere for pseudonym in pseudonyms]
    here = frozenset(pseudonyms) - elsewhere
    return frame[used].reset_index(drop=True), Counted(here, elsewhere)


def read_rows(path: Path, *text: str) -> libraries.DataFrame:
    """Read a table's rows. In a CSV file the columns in `text`, such as the targets, are read as
    text.

    Raises:
        DataError: the file cannot be used.
    """
    if path.is_dir():
        import pandas

        return pandas.read_parquet(path)
    return named_tables.read_frame(path, "path", text)


def numbers(frame: libraries.DataFrame, features: Sequence[str]) -> np.ndarray:
    """Join columns of numbers, and of lists of numbers, side by side, float64 [n, k].

    Raises:
        DataError: there is no column, or a column has missing values or holds something other than
            numbers.
    """
    remedy = "convert it, or list only the columns to use in data.features"
    columns = [
        tables.numbers(frame[name].to_numpy(), f"data.features: column {name!r}", remedy)
        for name in features
    ]
    wide = [column[:, None] if column.ndim == 1 else column for column in columns]
    if not wide:
        raise DataError("data.features: there is no column besides the labels")
    return np.concatenate(wide, axis=1)


def _classes_of(section: Data, frame: libraries.DataFrame) -> Any:
    """The targets of a table. Names of classes are replaced by the numbers that the policy gives
    them.
    """
    column, names = section.labels, section.class_names
    named_tables.convert_targets(frame, frame, column, names or None)
    y = frame[column].to_numpy()
    if not any(isinstance(value, str) for value in y):
        return y
    numbers = {name: number for number, name in enumerate(names)}
    unknown = [row for row, value in enumerate(y) if value not in numbers]
    if unknown:
        raise DataError(
            f"data.class_names: {len(unknown)} targets in column {column!r}, the first in row "
            f"{unknown[0]}, counted from 0, are none of its classes "
            f"({', '.join(names) or 'it is empty'}): list the names of all classes, in the order "
            "that all nodes use, and leave out rows without a target"
        )
    return np.array([numbers[value] for value in y], dtype=np.int64)


def _loader(section: Data, folder: Path) -> tuple[Any, Any]:
    module, _, name = section.loader.partition(":")
    try:
        load = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise DataError(f"data.loader: {section.loader} cannot be imported: {error}") from error
    return load(**section.options)  # type: ignore[no-any-return]


_READERS: dict[str, Callable[[Data, Path], tuple[Any, Any]]] = {
    "numpy": _numpy, "images": _images, "idx": _idx, "csv": _table, "parquet": _table,
    "loader": _loader,
}  # fmt: skip
