"""Tables that a recipe or a user gives by the name of a file or of a data set of the Hugging Face
Hub.

This module reads CSV files, Parquet files and data sets of the Hub as tables. `fedlgm.data.tables`
converts these tables to arrays, in the same way as tables that a user passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedlgm import libraries
from fedlgm.data.encoding import OPTIONS as ENCODING
from fedlgm.data.encoding import Encoding
from fedlgm.data.names import GAPS, spelled_once
from fedlgm.data.site_files import Sites, is_pattern, mark_of, paths_of
from fedlgm.data.sources import may_download
from fedlgm.data.tables import TARGETS
from fedlgm.errors import DataError
from fedlgm.extension.loader import HUB
from fedlgm.files import explain_failure, path_of

NAME = "table"
SPLITS: tuple[str, str] = ("train", "test")
_ENDINGS = (".csv", ".csv.gz", ".parquet")


def read_files(
    file: str | Path | Sequence[str | Path] | None = None,
    test_file: str | Path | None = None,
    **columns: Any,
) -> dict[str, Any]:
    """Read the files of a training and a test table into a mapping for
    `fedlgm.data.encoding.from_tables`.

    A pattern such as "sites/*.csv", or a list, stands for several training files, one from each
    site. The sites are then the users, unless `users` names a column. All files must have the
    columns of the test file, in any order.

    Users and targets in CSV files are read as text, so that the users `007` and `7` stay different
    and `NA` is a name. Targets are then converted to numbers if all of them are numbers, and to
    Booleans if all of them are "true" or "false", unless all targets of the test file are names in
    `labels`.

    Args:
        file: .csv, .csv.gz or .parquet file of the training examples; or a pattern or list of such
            files.
        test_file: file of the test examples, which are public.
        columns: further keys of the mapping, such as "target", "inputs", "users", "labels",
            "categories" and "fill".

    Raises:
        DataError: no file is named; a file is missing, is damaged or has no rows; or a value occurs
            among the targets in two spellings. If there are several sites, one message reports the
            faults in all of their files.
    """
    return _tables((file, test_file), columns, ("file", "test_file"))


def read_parts(mapping: Mapping[str, Any]) -> Mapping[str, Any]:
    """Read the tables in the files that a mapping names under "train" and "test". A mapping that
    names no files is returned unchanged.

    Raises:
        DataError: only one of "train" and "test" names a file, or `read_files` refuses the files.
    """
    parts = [mapping.get(part) for part in SPLITS]
    names = [
        isinstance(part, str | Path)
        or (isinstance(part, list) and all(isinstance(each, str | Path) for each in part))
        for part in parts
    ]
    if not any(names):
        return mapping
    if not all(names):
        part, other = SPLITS if names[0] else SPLITS[::-1]
        raise DataError(
            f"data: {part!r} names a file, but {other!r} does not: name both, or read the file with "
            "pandas.read_csv(...)"
        )
    columns = {key: value for key, value in mapping.items() if key not in SPLITS}
    return _tables((parts[0], parts[1]), columns, SPLITS)


def _tables(
    files: tuple[Any, Any], columns: Mapping[str, Any], keys: tuple[str, str]
) -> dict[str, Any]:
    """Read the training and the test file for `read_files`; messages call these files by the names
    `keys`.
    """
    names = _text_columns(columns)
    file, test = files[0], read_frame(files[1], keys[1], names)
    several = isinstance(file, list | tuple) or (
        file is not None and is_pattern(path_of(f"data.{keys[0]}", file))
    )
    if not several:
        return _as_mapping(NAME, read_frame(file, keys[0], names), test, columns)
    given = {key: columns[key] for key in ENCODING if columns.get(key) is not None}
    sites = Sites(test, Path(files[1]), Encoding(**given), columns, lambda path: _read(path, names))
    train, owners = sites.table(paths_of(f"data.{keys[0]}", file))
    mapping = _as_mapping(NAME, train, test, columns)
    of_sites = {"users": owners, "sites": True}
    return mapping if columns.get("users") is not None else mapping | of_sites


def _text_columns(columns: Mapping[str, Any]) -> list[str]:
    """List the names of the columns that are read as text: targets, users and columns with
    categories. Not all of these columns need exist.
    """
    target = columns.get("target")
    names = (
        *(TARGETS if target is None else (target,)),
        columns.get("users"),
        *(columns.get("categories") or ()),
    )
    return [name for name in names if isinstance(name, str)]


def _as_mapping(name: str, train: Any, test: Any, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Make the mapping for `DataSet.from_mapping`. Targets in pandas frames are converted as
    `read_files` describes.
    """
    target = columns.get("target")
    if target is None:
        target = next((each for each in TARGETS if each in train), None)
    frames = hasattr(train, "iloc") and isinstance(target, str) and target != columns.get("users")
    if frames and target in train and target in test:
        convert_targets(train, test, str(target), columns.get("labels"))
    return {"name": name, "train": train, "test": test, **columns}


def convert_targets(
    train: libraries.DataFrame, test: libraries.DataFrame, column: str, labels: Sequence[str] | None
) -> None:
    """Convert targets that were read as text to numbers or Booleans if all of them are numbers or
    all of them are "true" or "false".

    Args:
        train: table with the column; changed in place.
        test: the public table; changed in place. A node that has no public rows passes its training
            table for both arguments.
        column: name of the column of targets.
        labels: names of the classes. If all public targets are among these names, all targets stay
            text.

    Raises:
        DataError: a value occurs in two spellings, or some targets of a table are missing although
            all other targets of this table are numbers.
    """
    import pandas

    public = test[column]
    if not _are_texts(public) or (labels is not None and set(public) <= set(map(str, labels))):
        return
    frames = [frame for frame in (train, test) if _are_texts(frame[column])]
    if set(public.str.lower()) <= {"true", "false"}:
        both = set(pandas.concat([frame[column] for frame in frames]))
        if {word.lower() for word in both} <= {"true", "false"}:
            truths = {word: word.lower() == "true" for word in sorted(both)}
            spelled_once(truths, f"data.target: column {column!r}")
            for frame in frames:
                frame[column] = frame[column].map(truths)
        return
    if not _is_number(public).any():
        return
    for frame, part in zip((train, test), SPLITS, strict=True):
        if not _are_texts(frame[column]):
            continue
        absent = frame[column].isin(GAPS)
        if absent.any() and _is_number(frame[column])[~absent].all():
            row = int(absent.to_numpy().argmax())
            raise DataError(
                f"data.target: column {column!r} of {part!r} holds numbers, but "
                f"{frame[column].iloc[row]!r} in {int(absent.sum())} rows, first in row {row}, "
                "counted from 0: leave these rows out, or list the names of all classes in "
                "data.labels"
            )
    if _is_number(public).all() and all(_is_number(frame[column]).all() for frame in frames):
        numbers = {text: float(text) for frame in frames for text in frame[column].unique()}
        if all(value.is_integer() for value in numbers.values()):  # such numbers may be classes
            spelled_once(numbers, f"data.target: column {column!r}")
        for frame in frames:
            frame[column] = pandas.to_numeric(frame[column])


def _are_texts(column: libraries.Series[Any]) -> bool:
    return all(isinstance(value, str) for value in column)


def _is_number(column: libraries.Series[Any]) -> libraries.Series[bool]:
    """Return, for each text, whether it is a finite number."""
    import pandas

    return pandas.to_numeric(column, errors="coerce").abs() < float("inf")


def read_hub(
    name: str,
    folder: str | Path | None = None,
    subset: str | None = None,
    splits: Sequence[str] = SPLITS,
    download: bool = True,
    **columns: Any,
) -> dict[str, Any]:
    """Read two splits of a data set of the Hub into a mapping for `DataSet.from_mapping`.

    Users and targets in CSV files are read as `read_files` describes.

    Args:
        name: "hf:owner/name".
        folder: folder with a copy of the data set's files. With None, the data set is read from the
            local cache, after a download if the cache does not contain it.
        subset: name of the configuration to read, for a data set that has several configurations.
        splits: names of the training and the test split; slices such as "train[:80%]" are allowed.
        download: whether a download from the Hub is allowed.
        columns: further keys of the mapping.

    Raises:
        DataError: the data set is not stored locally and cannot be downloaded, or it has no such
            subset or split.
    """
    import datasets

    if len(splits) != 2 or splits[0] == splits[1]:
        raise DataError(
            f"data.splits: must be two different splits, for training and test; got {list(splits)}"
        )
    if folder is not None and not Path(folder).is_dir():
        raise DataError(
            f"data.dir: {str(folder)!r} is not a folder; it must hold the files of {name!r}"
        )
    path = name.removeprefix(HUB) if folder is None else str(Path(folder).resolve())
    texts = _text_columns(columns)
    try:
        try:
            train, test = _offline(path, subset, splits, texts)
        except ConnectionError:
            if not may_download(download):
                raise
            train, test = _load(path, subset, splits, texts)
    except ConnectionError as error:
        raise DataError(
            f"data: {name!r} is not in the local cache, and the Hugging Face Hub cannot be reached "
            "or has no such data set: check name and network, or set data.dir to a folder with "
            "its files"
        ) from error
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        where = f"{name!r}" if folder is None else f"{name!r} in {path}"
        raise DataError(explain_failure(f"data: {where} cannot be read", error)) from error
    return _as_mapping(name, train, test, columns)


def _offline(
    path: str, subset: str | None, splits: Sequence[str], texts: Sequence[str]
) -> tuple[Any, Any]:
    """Read the splits from a folder or from the local cache. ConnectionError is raised if the
    splits would have to be downloaded.
    """
    from datasets import config

    before, config.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE, True
    try:
        return _load(path, subset, splits, texts)
    finally:
        config.HF_HUB_OFFLINE = before


def _load(
    path: str, subset: str | None, splits: Sequence[str], texts: Sequence[str]
) -> tuple[Any, Any]:
    """Read the splits. If the data set consists of CSV files and has one of the columns `texts`,
    the splits are returned as pandas frames in which these columns contain text, as in `read_csv`.
    """
    from datasets import load_dataset

    parts = load_dataset(path, subset, split=list(splits))
    texts = [name for name in texts if name in parts[0].column_names]
    if parts[0].info.builder_name == "csv" and texts:
        gaps = {column: sorted(GAPS) for column in parts[0].column_names if column not in texts}
        options: Any = {
            "converters": dict.fromkeys(texts, str),
            "keep_default_na": False,
            "na_values": gaps,
        }
        try:
            parts = load_dataset(path, subset, split=list(splits), **options)
        except (ConnectionError, ValueError) as error:
            raise DataError(
                f"data: the CSV files of {path!r} are not on this machine, and users and classes "
                "in the cache have guessed types, so that 007 and 7 may be the same value: set "
                "data.dir to a folder with these files"
            ) from error
        parts = [part.to_pandas() for part in parts]
    return parts[0], parts[1]


def _read(path: Path, names: Sequence[str]) -> libraries.DataFrame:
    import pandas

    return pandas.read_parquet(path) if path.suffix.lower() == ".parquet" else read_csv(path, names)


def read_frame(file: Any, key: str, names: Sequence[str] = ()) -> libraries.DataFrame:
    """Read a file as a pandas frame.

    Args:
        file: .csv, .csv.gz or .parquet.
        key: the key in the recipe's section [data] that names the file, for messages.
        names: columns that contain text, see `read_csv`.

    Raises:
        DataError: no file is named, or the file is missing, damaged or without rows.
    """
    if file is None:
        what = "public test examples" if "test" in key else "the training examples"
        raise DataError(f"data.{key}: name the .csv or .parquet file with {what}")
    path = path_of(f"data.{key}", file)
    if not path.name.lower().endswith(_ENDINGS):
        raise DataError(
            f"data.{key}: {str(path)!r} must be a {', '.join(_ENDINGS[:-1])} or {_ENDINGS[-1]} file"
        )
    if not path.is_file():
        raise DataError(f"data.{key}: there is no file {str(path)!r}")
    try:
        frame = _read(path, names)
    except (OSError, EOFError, ValueError) as error:  # these include errors of pandas and pyarrow
        what = f"data.{key}: {str(path)!r} cannot be read"
        raise DataError(explain_failure(what, error)) from error
    if len(frame.columns) == 1 and (mark := mark_of(str(frame.columns[0]))):
        raise DataError(
            f"data.{key}: {str(path)!r} has {mark!r} between its columns, not commas: write it "
            "with commas, or read it in Python and pass the table: pandas.read_csv(file, "
            f"sep={mark!r})"
        )
    if not len(frame):
        raise DataError(
            f"data.{key}: {str(path)!r} has no rows below its header: give a file with examples"
        )
    return frame


def read_csv(path: Path, names: Sequence[str] = ()) -> libraries.DataFrame:
    """Read a CSV file as a pandas frame. The columns `names` contain text, and each other column
    has one type in all rows.

    Raises:
        DataError: two columns have the same name, or rows have more values than there are columns.
        OSError, ValueError: the file cannot be read.
    """
    import pandas

    packed: Any = {"compression": "gzip" if path.suffix.lower() == ".gz" else None}
    header = (
        pandas.read_csv(path, header=None, nrows=1, dtype=str, keep_default_na=False, **packed)
        .iloc[0]
        .tolist()
    )
    if twice := [name for i, name in enumerate(header) if name and name in header[:i]]:
        raise DataError(f"{path} has several columns {twice[0]!r}: rename or drop all but one")
    columns = pandas.read_csv(path, nrows=0, index_col=False, **packed).columns
    texts: Any = {name: "object" for name in names if name in columns}
    gaps = {name: sorted(GAPS) for name in columns if name not in texts}
    frame = pandas.read_csv(
        path, low_memory=False, dtype=texts, keep_default_na=False, na_values=gaps, **packed
    )
    if not isinstance(frame.index, pandas.RangeIndex):  # the first values became the index
        raise DataError(
            f"{path} has rows with more values than its header has names: name each column"
        )
    return frame
