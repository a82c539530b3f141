"""Tables by name: CSV and Parquet files, and data sets of the Hugging Face Hub.

Both become tables here. `fedlgm.data.tables` makes a data set of them, as of tables that a user passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlgm.data.sources import may_download
from fedlgm.errors import DataError
from fedlgm.extension import HUB

if TYPE_CHECKING:
    from datasets import Dataset
    from pandas import DataFrame

NAME = "table"
SPLITS = ("train", "test")


def read_files(file: str | Path | None = None, test_file: str | Path | None = None, **columns: Any) -> dict[str, Any]:
    """Two files as a mapping of frames for `DataSet.from_mapping`.

    Args:
        file: training examples, .csv or .parquet.
        test_file: test examples, which are public.
        columns: further keys of the mapping: "target", "inputs", "users", "labels".

    Raises:
        DataError: no file is named, or a file is missing or damaged.
    """
    return {"name": NAME, "train": _frame(file, "file"), "test": _frame(test_file, "test_file"), **columns}


def read_hub(
    name: str,
    folder: str | Path | None = None,
    subset: str | None = None,
    splits: Sequence[str] = SPLITS,
    download: bool = True,
    **columns: Any,
) -> dict[str, Any]:
    """Two splits of a data set of the Hub as a mapping for `DataSet.from_mapping`.

    Args:
        name: "hf:owner/name".
        folder: copy of the data set's files; None reads the local cache, or downloads into it.
        subset: configuration, for data sets that have several.
        splits: training and test split; slices such as "train[:80%]" work.
        download: whether the Hub may be asked.
        columns: further keys of the mapping.

    Raises:
        DataError: the data set is neither at hand nor reachable, or has no such subset or split.
    """
    import datasets

    if len(splits) != 2 or splits[0] == splits[1]:
        raise DataError(f"data.splits: must be two different splits, for training and test; got {list(splits)}")
    if folder is not None and not Path(folder).is_dir():
        raise DataError(f"data.dir: {str(folder)!r} is not a folder; it must hold the files of {name!r}")
    path = name.removeprefix(HUB) if folder is None else str(Path(folder).resolve())
    try:
        try:
            train, test = _offline(path, subset, splits)
        except ConnectionError:
            if not may_download(download):
                raise
            train, test = datasets.load_dataset(path, subset, split=list(splits))
    except ConnectionError as error:
        raise DataError(
            f"data: {name!r} is not in the local cache, and the Hugging Face Hub cannot be reached or has no such data "
            "set: check name and network, or set data.dir to a folder with its files"
        ) from error
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        where = f"{name!r}" if folder is None else f"{name!r} in {path}"
        raise DataError(f"data: {where} cannot be read: {_first_line(error)}") from error
    return {"name": name, "train": train, "test": test, **columns}


def _offline(path: str, subset: str | None, splits: Sequence[str]) -> list[Dataset]:
    """The splits from a folder or the local cache; ConnectionError if they are in neither."""
    from datasets import config, load_dataset

    before, config.HF_HUB_OFFLINE = config.HF_HUB_OFFLINE, True
    try:
        found: list[Dataset] = load_dataset(path, subset, split=list(splits))
        return found
    finally:
        config.HF_HUB_OFFLINE = before


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _frame(file: str | Path | None, key: str) -> DataFrame:
    import pandas

    if file is None:
        what = "the training examples" if key == "file" else "public test examples"
        raise DataError(f"data.{key}: name the .csv or .parquet file with {what}")
    readers = {".csv": pandas.read_csv, ".parquet": pandas.read_parquet}
    path = Path(file)
    if path.suffix not in readers:
        raise DataError(f"data.{key}: {str(path)!r} must be a {' or '.join(readers)} file")
    if not path.is_file():
        raise DataError(f"data.{key}: there is no file {str(path)!r}")
    try:
        frame: DataFrame = readers[path.suffix](path)
    except (OSError, ValueError) as error:  # pandas' and pyarrow's errors are among them
        raise DataError(f"data.{key}: {str(path)!r} cannot be read: {_first_line(error)}") from error
    if len(frame.columns) == 1 and (mark := next((one for one in ";\t|" if one in str(frame.columns[0])), None)):
        raise DataError(
            f"data.{key}: {str(path)!r} has {mark!r} between its columns, not commas: write it with commas, or read "
            "it in "
            f"Python and pass the table: pandas.read_csv(file, sep={mark!r})"
        )
    return frame
