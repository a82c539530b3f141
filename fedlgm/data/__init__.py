"""Data sets and their division among clients.

>>> data = load("digits")
>>> clients = divide(data, 20, "dirichlet", alpha=0.1, seed=7)
>>> x, y = data.train_x[clients[3]], data.train_y[clients[3]]
>>> own = load({"train": (x, y), "test": (data.test_x, data.test_y), "clients": [[0, 1, 2], [3, 4]]})
>>> divide(own, 2, "natural").sizes.tolist()
[3, 2]
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fedlgm.data.bundled import MADE_HERE, synthetic
from fedlgm.data.dataset import DataSet
from fedlgm.data.division import divide
from fedlgm.data.encoding import OPTIONS as ENCODING
from fedlgm.data.encoding import from_columns, from_tables
from fedlgm.data.images import NAME as IMAGE_FOLDER
from fedlgm.data.images import SIZE as IMAGE_SIZE
from fedlgm.data.images import load_folder
from fedlgm.data.lazy import LazyArray
from fedlgm.data.named_tables import NAME as TABLE
from fedlgm.data.named_tables import read_files, read_hub, read_parts
from fedlgm.data.partition import Partition, partition, schemes
from fedlgm.data.partition import options as scheme_options
from fedlgm.data.pixels import Pixels, rescale
from fedlgm.data.sources import FILE_SETS, locate, read, read_test
from fedlgm.data.tables import is_table
from fedlgm.data.users import user_numbers
from fedlgm.errors import ConfigError, DataError
from fedlgm.extension.loader import HUB, is_reference, load_object, users_code
from fedlgm.files import path_of
from fedlgm.wording import alternatives

__all__ = [
    "IMAGE_FOLDER",
    "DataSet",
    "LazyArray",
    "Partition",
    "divide",
    "is_bundled",
    "load",
    "names",
    "only_test_examples",
    "outline",
    "overlap",
    "partition",
    "published_examples",
    "reading_options",
    "scheme_options",
    "schemes",
    "synthetic",
    "twin",
    "with_users",
]

_synthetic = cache(synthetic)
_HALF = re.compile(r"([^:/]+)/(public|private)")
_SYNTHETIC = re.compile(r"synthetic(?:-(\d+))?")
_COLUMNS = ("target", "inputs", "users", "labels", "standardise")
OPTIONS = {
    IMAGE_FOLDER: ("image_size", "channels", "attribute", "train_images", "image_classes"),
    TABLE: ("file", "test_file", "classes", *_COLUMNS, *ENCODING),
    f"{HUB}owner/name": ("subset", "splits", *_COLUMNS, "image_size", "channels"),
}
"""Names of the options of `load` for each kind of set that has options besides `pixels`."""


def names() -> tuple[str, ...]:
    """List the names of the sets that `load` knows.

    Example:
        >>> "digits" in names()
        True
    """
    return (*MADE_HERE, *FILE_SETS, "synthetic", IMAGE_FOLDER, TABLE)


def is_bundled(name: str) -> bool:
    """Whether a name belongs to a published set that `load` knows, or to half of such a set. The
    result is False for every name that stands for a user's data.

    Example:
        >>> [is_bundled(name) for name in ("digits/private", "synthetic-10", "table", "image-folder", "my.data:load")]
        [True, True, False, False, False]
    """
    base = _split(name)[0] if isinstance(name, str) else ""
    return base in MADE_HERE or base in FILE_SETS or _SYNTHETIC.fullmatch(base) is not None


Loadable = str | DataSet | Mapping[str, Any] | Callable[[], Any]


def load(
    name: Loadable,
    data_dir: str | Path | None = None,
    *,
    download: bool = True,
    pixels: Sequence[float] | None = None,
    **options: Any,
) -> DataSet:
    """Load a data set. Each process holds a bundled set only once.

    `load` searches for files in `data_dir`, then in `$FEDLGM_DATA` (~/.cache/fedlgm if it is not
    set), then in the folders of Debian's packages. If no folder contains the set, torchvision
    downloads it into `$FEDLGM_DATA`; FEDLGM_OFFLINE=1 forbids downloads.

    Args:
        name: one of `names()`; "synthetic-N" for synthetic data with N training samples; or
            "hf:owner/name" for a data set of the Hugging Face Hub, whose files may be in
            `data_dir`. The suffix "/private" or "/public" selects one half of a bundled set's
            training examples; the division is random but fixed, for runs that need public examples
            of the same kind. Your own data are a `DataSet`, a mapping for `DataSet.from_mapping`,
            or a function without arguments that returns such an object; "package.module:name" may
            refer to any of these three.
        data_dir: directory that contains the set's files, either directly, in a folder with the
            set's name, or in the layout of torchvision or LEAF.
        download: whether to download a missing set.
        pixels: for a bundled image set, the values (low, high) of the darkest and the brightest
            pixel, instead of (-1, 1).
        options: for "image-folder", whose folder is `data_dir`, the options of
            `fedlgm.data.images.load_folder`. For "table": the .csv or .parquet files `file` and
            `test_file`; `target`, `inputs`, `users` and `standardise` (see
            `fedlgm.data.tables.as_arrays`); `labels` and `classes` (see `DataSet.from_arrays`); and
            the options of `fedlgm.data.encoding`. For a set of the Hub: `subset` and `splits` (see
            `fedlgm.data.named_tables.read_hub`), `target`, `inputs`, `users`, `standardise`,
            `labels`, `image_size` and `channels`.

    Returns:
        The set. Unless `pixels` is given, pixels lie in [-1, 1]; in the grey images of digits,
        letters and clothes, -1 is the background. Pixels are scaled by constants that do not depend
        on the data, which costs no privacy. Synthetic inputs are not bounded.

    Raises:
        ConfigError: if the name is unknown or does not import.
        DataError: if the files are missing (the message says where to put them) or damaged (the
            message names the file), if `DataSet.from_arrays` refuses your own data, or if your
            function raised an exception.

    >>> x, y = np.zeros((6, 3)), np.arange(6) % 2
    >>> load({"train": (x, y), "test": (x, y)}).shape, load("synthetic-10").train_x.shape[0]
    ((3,), 10)
    """
    if pixels is not None:
        return _rescale_pixels(load(name, data_dir, download=download, **options), tuple(pixels))
    label = repr(name if isinstance(name, str) else getattr(name, "__name__", type(name).__name__))
    _refuse_others(name, label, options)
    if not isinstance(name, str):
        return _own(name, label)
    if data_dir is not None:
        data_dir = path_of("data.dir", data_dir)
    if name == IMAGE_FOLDER:
        return load_folder(data_dir, **options)
    if name == TABLE:
        return from_tables(read_files(**options))
    if name.startswith(HUB):
        return DataSet.from_mapping(read_hub(name, data_dir, download=download, **options))
    if is_reference(name):
        return _own(load_object(name, "data set"), repr(name))
    base, half = _split(name)
    if half:
        return _part(load(base, data_dir, download=download, **options), name, half)
    if name in MADE_HERE:
        return MADE_HERE[name][0]()
    if name in FILE_SETS:
        return read(name, locate(name, data_dir, download=download))
    if (size := _SYNTHETIC.fullmatch(name)) is not None:
        return _synthetic(int(size[1])) if size[1] else _synthetic()
    if name.lower().endswith((".csv", ".csv.gz", ".parquet")):
        raise ConfigError(
            f"{name!r} is a file: set data.name = {TABLE!r}, data.file = {name!r}, data.test_file "
            "and data.target; in Python pass tables, data={'train': pandas.read_csv(...), 'test': "
            "..., 'target': column}"
        )
    if name.lower().endswith((".tsv", ".npz", ".npy", ".json", ".xlsx")):
        raise ConfigError(
            f"{name!r} is a file: read it in Python and pass data={{'train': (x, y), 'test': (x, "
            f"y)}}"
        )
    if path_of("data.name", name).is_dir():
        raise ConfigError(
            f"{name!r} is a folder: for images set data.name = {IMAGE_FOLDER!r}, data.dir = "
            f"{name!r}"
        )
    others = ("synthetic-N with N samples", f"{HUB}owner/name", "your own as package.module:name")
    raise ConfigError(f"unknown data set {name!r}; {alternatives(name, names(), *others)}")


def only_test_examples(
    name: str,
    data_dir: str | Path | None = None,
    *,
    pixels: Sequence[float] | None = None,
    **options: Any,
) -> DataSet:
    """Load a bundled set in which the test examples take the place of the training examples.

    If the training examples are in separate files, these files are not opened and need not exist.
    Generated sets, sets from scikit-learn, and texts have no such files, so the whole set is
    loaded; all examples of these sets are public.

    Args:
        name: the name of a bundled set, or of half of such a set; see `load`.
        data_dir: see `load`.
        pixels: see `load`.
        options: ignored; sets that take such options are refused.

    Raises:
        ConfigError: the name is unknown, or it stands for a user's data, whose test examples would
            be read together with private training examples.
        DataError: see `load`.

    >>> found = only_test_examples("digits")
    >>> len(found.train_y), found.train_y is found.test_y
    (355, True)
    """
    base, _ = _split(name)
    if is_reference(name) or base in OPTIONS or base.startswith(HUB):
        raise ConfigError(
            f"the test examples of {name!r} cannot be read without its training examples, which "
            "may be private: give public examples as another set, such as a function of your own "
            "that returns only public examples"
        )
    if base in FILE_SETS and FILE_SETS[base].test:
        data = read_test(base, locate(base, data_dir, download=True, files=FILE_SETS[base].test))
    else:
        full = load(base, data_dir)
        data = DataSet(base, full.test_x, full.test_y, full.test_x, full.test_y, full.classes)
    return data if pixels is None else _rescale_pixels(data, tuple(pixels))


def reading_options(name: str) -> tuple[str, ...]:
    """List the names of the options that `load` accepts for a set.

    >>> reading_options("image-folder")[:2], reading_options("hf:owner/name")[:2], reading_options("my.data:faces")
    (('image_size', 'channels'), ('subset', 'splits'), ())
    """
    base, _ = _split(name)
    kind = f"{HUB}owner/name" if base.startswith(HUB) else base
    pictures = base in ("digits", IMAGE_FOLDER) or (
        base in FILE_SETS and len(FILE_SETS[base].shape) == 3
    )
    return OPTIONS.get(kind, ()) + (("pixels",) if pictures else ())


def _refuse_others(name: Loadable, label: str, options: Mapping[str, Any]) -> None:
    """Raise ConfigError if `load` does not accept one of the options for the set."""
    for key in options:
        if not isinstance(name, str) or key not in reading_options(name):
            kinds = " or ".join(repr(kind) for kind, keys in OPTIONS.items() if key in keys)
            if key == "dir":
                raise ConfigError(
                    "load takes a folder as data_dir=...; dir is the name of the recipe's key, "
                    "data.dir"
                )
            if not kinds:
                options_of = ", ".join(reading_options(name) if isinstance(name, str) else ())
                raise ConfigError(
                    f"{label} has no option {key!r}; its options: {options_of or 'none'}"
                )
            raise ConfigError(f"{key} is for data.name = {kinds}, not for {label}")


def outline(
    name: str,
    *,
    image_classes: int | None = None,
    image_size: int = IMAGE_SIZE,
    channels: int = 3,
    **options: Any,
) -> DataSet | None:
    """Make a set without examples that has the shapes and classes of a set. The result is None if
    the shapes and classes are unknown before the set is loaded.

    Args:
        name: see `load`.
        image_classes: number of classes of an "image-folder", as the user states it; None if
            unknown.
        image_size: height and width of the images of an "image-folder".
        channels: channels of the images of an "image-folder".
        options: further options of `load`. For a table without files, `inputs` determines the
            shape, and `labels` or `classes` the classes; if neither `labels` nor `classes` is
            given, the targets are real numbers.

    >>> outline("fashion-mnist").shape, outline("fashion-mnist").classes
    ((1, 28, 28), 10)
    >>> outline("image-folder"), outline("image-folder", image_classes=2).shape
    (None, (3, 64, 64))
    """
    base, _ = _split(name)
    if base == TABLE:
        return None if "test_file" in options else from_columns(**options)
    if base in FILE_SETS:
        shape, classes = FILE_SETS[base].shape, FILE_SETS[base].classes
    elif base == IMAGE_FOLDER and image_classes is not None:
        shape, classes = (channels, image_size, image_size), image_classes
    else:
        return None
    text = len(shape) == 1
    x = np.empty((0, *shape), dtype=np.int64 if text else np.float32)
    y = np.empty((0, *shape) if text else 0, dtype=np.int64)
    return DataSet(name, x, y, x, y, classes)


def published_examples(name: str, train_images: int | None = None) -> int | None:
    """Return the number of training examples of a set or of half of a set; None if the number is
    unknown before the set is loaded.

    Args:
        name: see `load`.
        train_images: number of training images of an "image-folder", as the user states it; None if
            unknown.

    >>> published_examples("cifar10"), published_examples("mnist/public"), published_examples("femnist")
    (50000, 30000, None)
    >>> published_examples("image-folder", 162_770)
    162770
    """
    base, half = _split(name)
    if base in FILE_SETS:
        count = FILE_SETS[base].examples
    elif base in MADE_HERE:
        count = MADE_HERE[base][1]
    else:
        count = train_images if base == IMAGE_FOLDER else None
    return count if count is None or not half else len(range(count)[_rows(count, half)])


def with_users(data: Any, users: Any) -> Any:
    """Add to your own data the user of each training example.

    Args:
        data: your own data, as for `load`.
        users: the name of a column of the tables, or the user of each training example [n]; with
            None the data are returned unchanged.

    Raises:
        DataError: `users` is given, and the data are a name or a function.

    >>> x, y = np.zeros((4, 3)), np.arange(4) % 2
    >>> load(with_users({"train": (x, y), "test": (x, y)}, ["ann", "ann", "ben", "cleo"])).train_user.tolist()
    [0, 0, 1, 2]
    """
    if users is None:
        return data
    if isinstance(data, DataSet):
        return dataclasses.replace(
            data, train_user=user_numbers(users, len(data.train_y)), clients=None, sites=None
        )
    if isinstance(data, Mapping):
        return {**_two_parts(data), "users": users}
    if is_table(data):
        return data  # `load` refuses this
    raise DataError(
        "users names the users of your own data: pass data={'train': ..., 'test': ...} with it"
    )


def _two_parts(data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return only the splits "train" and "test" of a `datasets.DatasetDict`; return any other
    mapping unchanged.
    """
    if not hasattr(data, "push_to_hub") or "test" not in data:
        return data  # `load` then says which part may be the test part
    return {part: data[part] for part in ("train", "test") if part in data}


def _split(name: str) -> tuple[str, str]:
    """Split the name of half of a set into the set's name and "public" or "private". Any other name
    is returned whole, together with "".
    """
    half = _HALF.fullmatch(name)
    return (name, "") if half is None else (half[1], half[2])


def overlap(one: str, other: str) -> bool:
    """Whether the sets with these two names may share training examples. The public and the private
    half of a set share no example.

    Example:
        >>> overlap("digits/public", "digits/private"), overlap("digits/public", "digits")
        (False, True)
        >>> overlap("hf:Owner/set", "hf:owner/set")  # one address on the Hub
        True
    """
    if ":" in one:  # a set of the Hub, or a user's set
        return one.casefold() == other.casefold()
    (base, _, half), (other_base, _, own_half) = one.partition("/"), other.partition("/")
    return base == other_base and {half, own_half} != {"private", "public"}


def twin(name: str) -> str | None:
    """Return the name of the public half of a set if `name` names the set's private half; None for
    any other name.

    >>> twin("digits/private"), twin("digits")
    ('digits/public', None)
    """
    base, half = _split(name)
    return f"{base}/public" if half == "private" else None


def _rows(examples: int, half: str) -> slice:
    """Return the slice that selects one half of a permutation of the training examples."""
    return slice(examples // 2, None) if half == "public" else slice(examples // 2)


def _part(data: DataSet, name: str, half: str) -> DataSet:
    """Select one half of a set's training examples, together with all of its test examples."""
    order = np.random.default_rng(0).permutation(len(data.train_y))
    return data.keep(np.sort(order[_rows(len(order), half)]), name)


def _rescale_pixels(data: DataSet, pixels: tuple[float, ...]) -> DataSet:
    """Rescale a bundled set of images from [-1, 1] to `pixels`, the pair (low, high)."""
    if "pixels" not in reading_options(data.name):
        raise ConfigError(
            f"pixels is only for bundled sets of images; the values of {data.name!r} are used "
            "unchanged"
        )
    if len(pixels) != 2 or not all(map(math.isfinite, pixels)) or not pixels[0] < pixels[1]:
        raise ConfigError(
            f"pixels must be two numbers, the lower one first, such as [0, 1]; got {list(pixels)}"
        )
    low, high = pixels
    held: tuple[Any, Any] = data.held("train_x"), data.held("test_x")
    train_x, test_x = (
        x.between(low, high) if isinstance(x, Pixels) else rescale(x, low, high) for x in held
    )
    return dataclasses.replace(data, train_x=train_x, test_x=test_x)  # type: ignore[arg-type]


def _own(source: Any, label: str) -> DataSet:
    """Convert a user's data to a checked set. If `source` is a function, it is called first, and
    its result is converted.
    """
    if callable(source):
        with users_code(f"data set {label}", source, DataError):
            source = source()
    if isinstance(source, DataSet):
        return source.validate()
    if isinstance(source, Mapping):
        return from_tables(read_parts(_two_parts(source)))
    if is_table(source):
        raise DataError(
            "data: one table has no test part of public examples: pass {'train': table, 'test': "
            "table}; for a datasets.Dataset, dataset.train_test_split(test_size=0.1) returns it"
        )
    raise DataError(
        f"data set {label} must be a fedlgm.data.DataSet or {{'train': (x, y), 'test': (x, y)}}, "
        f"or a function that returns one, not an object of type {type(source).__name__}: a pair (x, "
        "y) or a torch data set is only one of the two parts"
    )
