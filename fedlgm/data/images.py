"""Data sets from folders of images, in which subfolders or an attribute file, as in CelebA,
determine the classes. Each image is resized only once. A folder may have one of the following
forms.

    folder/train/CLASS/*.jpg and folder/test/CLASS/*.jpg
        the images below folder/test are the test images
    folder/CLASS/*.jpg
        every fifth image of a class is a test image
    folder/**/*.jpg and list_attr_celeba.txt (or any .csv)
        the column `attribute` of this file gives the classes; in list_eval_partition.txt, 0 marks
        training images, 2 marks test images, and 1 marks validation images, which are not used;
        without this file every fifth image is a test image

The resized images are stored with the other data sets (in `$FEDLGM_DATA`) and mapped into memory,
so a set may be larger than the memory. If a file in the folder changes, all images are read and
resized again.
"""

from __future__ import annotations

import csv
import hashlib
import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np

from fedlgm.data.dataset import DataSet
from fedlgm.data.names import GAPS
from fedlgm.data.pixels import fit_image, readable
from fedlgm.data.sources import store
from fedlgm.errors import DataError, Notice
from fedlgm.files import explain_failure

NAME = "image-folder"
SIZE = 64
_KINDS = frozenset(
    {".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}
)
_TEST_NAMES = ("test", "val", "valid", "validation")
_EVERY = 5  # every fifth image of a class is a test image, unless the folder marks the test images
_BLOCK = 512
_READING = 2  # version of the code that resizes; files of earlier versions are not used


def load_folder(
    folder: str | Path | None,
    image_size: int = SIZE,
    channels: int = 3,
    attribute: str | None = None,
    train_images: int | None = None,
    image_classes: int | None = None,
) -> DataSet:
    """Load the images of a folder as float32 [n, channels, image_size, image_size] in [-1, 1]; see
    docs/how-to/own-data.md.

    Args:
        folder: the folder, in one of the forms that the docstring of this module describes.
        image_size: height and width of the loaded images. The largest centred square of each image
            is resized to this size bilinearly.
        channels: 3 (RGB) or 1 (grey).
        attribute: column of the attribute file that gives the class of each image. If all values of
            the column are numbers, a number above 0 means class 1 and any other number class 0;
            otherwise the different values are the classes, in alphabetical order. With None, the
            subfolders are the classes.
        train_images: published or agreed number of training images that the folder must have; None
            accepts any number.
        image_classes: published or agreed number of classes that the folder must have; None accepts
            any number.

    Raises:
        DataError: the folder does not exist or has no images; an image cannot be read or has no
            class (the message names the image); or the number of training images or classes differs
            from the given number.
    """
    if folder is None or not Path(folder).is_dir():
        problem = "it is not set" if folder is None else f"{str(folder)!r} is not a folder"
        raise DataError(
            f"data {NAME!r} needs data.dir, a folder of images: {problem}; for a plan, "
            "data.train_images and data.image_classes, the numbers of its training images and "
            "classes, also suffice"
        )
    if channels not in (1, 3) or image_size < 4:
        raise DataError(
            f"data {NAME!r}: channels must be 1 or 3 and image_size at least 4, got {channels}, "
            f"{image_size}"
        )
    listing = (
        _by_attribute(Path(folder), attribute)
        if attribute is not None
        else _by_folder(Path(folder))
    )
    files, labels, tests, names = listing
    train = int((~tests).sum())
    for option, stated, there in (
        ("train_images", train_images, train),
        ("image_classes", image_classes, len(names)),
    ):
        if stated not in (None, there):
            what = option.replace("train_", "training ").replace("image_", "")
            raise DataError(
                f"data.{option} = {stated}, but {folder} has {there} {what}: plans used the stated "
                f"number. Give the whole folder, or set data.{option} to {there} (none accepts "
                "any number)"
            )
    order = np.argsort(tests, kind="stable")  # training images come first
    stamps = [(str(files[i]), files[i].stat().st_size, files[i].stat().st_mtime_ns) for i in order]
    return _load_resized(
        tuple(stamps), tuple(labels[order].tolist()), train, names, image_size, channels
    )


@cache
def _load_resized(
    stamps: tuple[tuple[str, int, int], ...],
    labels: tuple[int, ...],
    train: int,
    names: tuple[str, ...],
    size: int,
    channels: int,
) -> DataSet:
    digest = hashlib.sha256(repr((_READING, stamps, size, channels)).encode()).hexdigest()[:24]
    cache_file = store() / NAME / f"{digest}.npy"
    files = [Path(name) for name, _, _ in stamps]
    x = (
        np.load(cache_file, mmap_mode="r")
        if cache_file.is_file()
        else _read_all(files, cache_file, size, channels)
    )
    y = np.array(labels, dtype=np.int64)
    return DataSet(NAME, x[:train], y[:train], x[train:], y[train:], len(names), labels=names)


def _read_all(files: Sequence[Path], cache_file: Path, size: int, channels: int) -> np.ndarray:
    """Read and resize all images. If possible, the result is written to `cache_file` and mapped
    into memory from there.
    """
    shape, part = (len(files), channels, size, size), cache_file.with_suffix(f".{os.getpid()}.part")
    try:
        # The resized images are as sensitive as the originals: only this user may read them.
        cache_file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(part, os.O_CREAT | os.O_WRONLY, 0o600))
        x: np.ndarray = np.lib.format.open_memmap(part, mode="w+", dtype=np.float32, shape=shape)
    except OSError as error:
        what = f"resized images are held in memory: {cache_file.parent} cannot be written"
        warnings.warn(Notice(explain_failure(what, error)), stacklevel=2)
        part, x = None, np.empty(shape, dtype=np.float32)  # type: ignore[assignment]
    try:
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            for low in range(0, len(files), _BLOCK):
                block = files[low : low + _BLOCK]
                for i, image in enumerate(
                    pool.map(lambda path: _read(path, size, channels), block)
                ):
                    x[low + i] = image
    except BaseException:
        if part is not None:
            part.unlink(missing_ok=True)
        raise
    if part is None:
        return x
    x.flush()  # type: ignore[attr-defined]
    part.replace(cache_file)
    return np.load(cache_file, mmap_mode="r")


def _read(path: Path, size: int, channels: int) -> np.ndarray:
    """Read one image as [channels, size, size] in [-1, 1]."""
    from PIL import Image

    with readable(str(path)), Image.open(path) as image:
        return fit_image(image, size, channels)


def _images(folder: Path) -> list[Path]:
    return sorted(
        path for path in folder.rglob("*") if path.suffix.lower() in _KINDS and path.is_file()
    )


_Found = tuple[list[Path], np.ndarray, np.ndarray, tuple[str, ...]]


def _by_folder(folder: Path) -> _Found:
    """Return the files, the label of each file, whether each file is a test image, and the names of
    the classes, which are the names of subfolders.
    """
    test = next((folder / name for name in _TEST_NAMES if (folder / name).is_dir()), None)
    roots = (
        [(folder, None)]
        if test is None or not (folder / "train").is_dir()
        else [(folder / "train", False), (test, True)]
    )
    names = sorted(
        {
            child.name
            for root, _ in roots
            for child in root.iterdir()
            if child.is_dir() and _images(child)
        }
    )
    if len(names) < 2:
        raise DataError(
            f"{folder}: {len(names)} subfolders with images; give one subfolder per class (also "
            "within train/ and test/), or name an attribute of an attribute file"
        )
    files, labels, tests = [], [], []
    for root, is_test in roots:
        for label, name in enumerate(names):
            images = _images(root / name)
            files += images
            labels += [label] * len(images)
            tests += [
                i % _EVERY == _EVERY - 1 if is_test is None else is_test for i in range(len(images))
            ]
    return _check_classes(
        folder, files, np.array(labels), np.array(tests, dtype=bool), tuple(names)
    )


def _by_attribute(folder: Path, attribute: str) -> _Found:
    """Return the same values as `_by_folder`, with classes from an attribute file."""
    table = next(
        (
            path
            for path in sorted(folder.glob("*attr*.txt")) + sorted(folder.glob("*.csv"))
            if path.is_file()
        ),
        None,
    )
    if table is None:
        raise DataError(
            f"{folder}: no attribute file (list_attr_celeba.txt or a .csv of file names and "
            "attributes)"
        )
    words = _words_of(table, attribute)
    places = _find_images(folder, words, table)
    labels, names = _label_words(words, attribute, f"{table}: attribute {attribute!r}")
    files = [places[name] for name in words]
    split = folder / "list_eval_partition.txt"
    tests = np.arange(len(words)) % _EVERY == _EVERY - 1
    if split.is_file():
        parts = dict(
            line.split()[:2]
            for line in split.read_text(encoding="utf-8").splitlines()
            if line.strip()
        )
        unknown = next((name for name in words if parts.get(name) not in ("0", "1", "2")), None)
        if unknown is not None:
            raise DataError(
                f"{split} does not say whether {unknown!r} is for training (0), validation (1) or "
                "test (2)"
            )
        use = np.array([parts[name] != "1" for name in words])
        tests, labels = np.array([parts[name] == "2" for name in words])[use], labels[use]
        files = [places[name] for name in words if parts[name] != "1"]
    return _check_classes(
        folder, files, labels, tests, names, stated=names[0] == f"not {attribute}"
    )


def _find_images(folder: Path, names: Iterable[str], table: Path) -> dict[str, Path]:
    """Find the image for each name in an attribute file. A name is a path within the folder or the
    end of such a path, or at least has the file name of only one image.
    """
    images: dict[str, list[Path]] = {}
    for path in _images(folder):
        images.setdefault(path.name, []).append(path)
    places: dict[str, Path] = {}
    for name in names:
        alike = images.get(Path(name).name, [])
        ending = [path for path in alike if path.as_posix().endswith(f"/{Path(name).as_posix()}")]
        exact = [path for path in alike if path == folder / name]
        matches = exact or ending or alike
        if not matches:
            count = sum(map(len, images.values()))
            raise DataError(
                f"{table} names {name!r}, which is not among the {count} images of {folder}"
            )
        if len(matches) > 1:
            several = " and ".join(str(path.relative_to(folder)) for path in matches[:2])
            raise DataError(
                f"{table} names {name!r}, which may be {several}: give paths within {folder}"
            )
        places[name] = matches[0]
    first: dict[Path, str] = {}
    for name, path in places.items():
        if (other := first.setdefault(path, name)) != name:
            raise DataError(f"{table} names {path} twice, as {other!r} and {name!r}: drop one row")
    return places


def _label_words(
    words: Mapping[str, str], attribute: str, what: str
) -> tuple[np.ndarray, tuple[str, ...]]:
    """Number the classes of an attribute; return the class of each image and the names of the
    classes. `words` maps the name of each image to its value of the attribute.
    """
    empty = [name for name, word in words.items() if not word.strip()]
    gaps = [name for name, word in words.items() if word in GAPS]
    try:
        numbers = [float(word) for name, word in words.items() if word not in GAPS]
    except ValueError:
        gaps, numbers = empty, []
    if gaps:
        raise DataError(
            f"{what} has no value for {gaps[0]!r} ({len(gaps)} of {len(words)} images): leave out "
            "their rows, or give the values"
        )
    if numbers:
        return (np.array(numbers) > 0).astype(np.int64), (f"not {attribute}", attribute)
    names = tuple(sorted(set(words.values())))
    return np.array([names.index(word) for word in words.values()]), names


def _words_of(path: Path, attribute: str) -> dict[str, str]:
    """Read the value of an attribute for each image from a file in CelebA's format, or from a CSV
    file with a header.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(explain_failure(f"{path} cannot be read", error)) from error
    comma = path.suffix == ".csv"
    rows = [row for row in (csv.reader(lines) if comma else map(str.split, lines)) if row]
    if rows and not comma and len(rows[0]) == 1 and rows[0][0].isdigit():
        del rows[0]  # CelebA's first line is the number of images
    header = rows.pop(0) if rows else []
    if comma:
        header = header[1:]  # without the header of the column of file names
    wrong = next((i for i, row in enumerate(rows) if len(row) != len(header) + 1), None)
    if not rows or wrong is not None:
        what = (
            "is empty"
            if wrong is None
            else f"row {wrong + 1} has {len(rows[wrong]) - 1} values for {len(header)} attributes"
        )
        raise DataError(
            f"{path}: {what}; below a row of attribute names, each row must hold a file name and "
            "its attributes"
        )
    if attribute not in header:
        raise DataError(
            f"{path}: no attribute {attribute!r}; it has "
            f"{', '.join(header[:8])}{', ...' if len(header) > 8 else ''}"
        )
    words: dict[str, str] = {}
    for row in rows:
        if row[0] in words:
            raise DataError(f"{path} names {row[0]!r} twice: drop one row")
        words[row[0]] = row[1 + header.index(attribute)]
    return words


def _check_classes(
    folder: Path,
    files: list[Path],
    labels: np.ndarray,
    tests: np.ndarray,
    names: tuple[str, ...],
    stated: bool = False,
) -> _Found:
    """Check the files and classes, and return them. There must be training and test images, and
    every class must have a test image, because only test images are public. If `stated`, the
    classes are fixed in advance, and a class needs no test image.
    """
    if not (~tests).any() or not tests.any():
        part = "training" if tests.all() else "test"
        raise DataError(f"{folder}: {len(files)} images, but no {part} image among them")
    public = set(labels[tests].tolist())
    if not stated and len(public) < len(names):
        private = [name for i, name in enumerate(names) if i not in public]
        raise DataError(
            f"{folder}: no test image has the class {private[0]!r}, so private images alone would "
            "add an output to the model: add a test image of this class, or leave out its images "
            f"({len(private)} such classes)"
        )
    return files, labels.astype(np.int64), tests, names
