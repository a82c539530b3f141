"""Reading of the files of several sites into one table, with one message that reports the faults of
all files.

The public test file determines the columns. Private files do not influence the description of the
data, and the messages contain no values from private files.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedlgm import libraries
from fedlgm.data.encoding import Encoding, as_text
from fedlgm.data.names import missing
from fedlgm.errors import DataError
from fedlgm.files import explain_failure, path_of
from fedlgm.wording import alternatives

_COMMA = re.compile(r"\s*-?\d*,\d+(e[+-]?\d+)?\s*", re.IGNORECASE)
"""A number with a decimal comma."""
_SHOWN = 12  # largest number of categories that a remedy lists
MARKS = ";\t|"
"""Separators of columns in files that are not comma-separated."""


def paths_of(key: str, files: Any) -> list[Path]:
    """List the files for which a name, a pattern such as "sites/*.csv", or a list of names and
    patterns stands.

    Args:
        key: name of the argument in messages.
        files: name, pattern or list.

    Raises:
        DataError: a pattern matches no file, or a file is named twice.

    Example:
        >>> paths_of("data.file", "train.csv")
        [PosixPath('train.csv')]
    """
    paths: list[Path] = []
    for name in files if isinstance(files, list | tuple) else [files]:
        path = path_of(key, name)
        if not is_pattern(path):
            paths.append(path)
            continue
        matches = sorted(map(Path, glob.glob(str(path), recursive=True)))
        if not matches:
            raise DataError(
                f"{key}: no file matches {str(path)!r}: the pattern is read from the folder "
                f"{os.getcwd()}"
            )
        paths += matches
    if twice := [path for i, path in enumerate(paths) if path in paths[:i]]:
        raise DataError(f"{key}: {str(twice[0])!r} is named twice")
    return paths


def is_pattern(path: Path) -> bool:
    """Whether a path is a pattern for several files."""
    return not path.exists() and any(sign in str(path) for sign in "*?[")


def mark_of(header: str) -> str | None:
    """Return the separator of the columns in a header if it is not a comma; otherwise None.

    Example:
        >>> mark_of("age;dose;ill")
        ';'
    """
    return None if "," in header else next((sign for sign in MARKS if sign in header), None)


class Sites:
    """Reader of the files of several sites, each of which must have the columns of a public table.

    Args:
        test: the public table.
        test_path: file of the public table, for messages.
        encoding: public categories of columns, and public values for gaps.
        columns: the further keys of the mapping of tables, such as "target", "inputs", "users" and
            "labels".
        read: function (path) -> frame, which may raise DataError, OSError or ValueError.
    """

    def __init__(
        self,
        test: libraries.DataFrame,
        test_path: Path,
        encoding: Encoding,
        columns: Mapping[str, Any],
        read: Any,
    ) -> None:
        self._test, self._path, self._encoding, self._read = test, test_path, encoding, read
        target, inputs, users = (columns.get(key) for key in ("target", "inputs", "users"))
        self._targets = [target] if isinstance(target, str) else list(target or ())
        self._users = users if isinstance(users, str) else None
        names = [inputs] if isinstance(inputs, str) else inputs
        self._needed = [str(name) for name in test.columns if name != self._users]
        if names is not None:
            self._needed = [*dict.fromkeys([*names, *self._targets])]
        self._open = names is not None  # if the inputs are named, further columns are ignored
        self._labels = columns.get("labels")
        self._texts: set[str] = set()
        self._gaps: set[str] = set()

    def table(self, paths: Sequence[Path]) -> tuple[libraries.DataFrame, np.ndarray]:
        """Read all files; return their rows as one table, and the name of the site of each row. The
        columns are in the order of the public table or, if the inputs are named, in the order of
        the inputs. The name of a site is the name of its file without the ending. If two files have
        the same name, every site is named by the path of its file below the common folder of all
        files.

        Raises:
            DataError: at least one file cannot be used; the message lists the faults of all files.
        """
        import pandas

        if self._path.resolve() in [path.resolve() for path in paths]:
            raise DataError(
                f"data: {str(self._path)!r} is the public test table and must not be one of "
                "the training files: move it, or name the other files"
            )
        found: dict[tuple[str, ...], list[Path]] = {}
        frames = []
        for path in paths:
            frame, faults = self._examine(path)
            frames.append(frame)
            if faults:
                found.setdefault(tuple(faults), []).append(path)
        if public := self._of(self._test):
            found[tuple(public)] = [self._path, *found.get(tuple(public), [])]
        if found:
            raise DataError(self._report(found, len(paths)))
        names = [*self._needed, *([self._users] if self._users else [])]
        sites = [path.name.split(".")[0] for path in paths]
        if len(set(sites)) < len(sites):  # folders above the common one may name a person
            common = os.path.commonpath(map(os.path.abspath, paths))
            sites = [os.path.relpath(path, common) for path in paths]
        owners = np.repeat(sites, [len(frame) for frame in frames])
        return pandas.concat([frame[names] for frame in frames], ignore_index=True), owners

    def _examine(self, path: Path) -> tuple[Any, list[str]]:
        """Read a file as a frame and list the faults in it; the frame is None if the file cannot be
        read.
        """
        try:
            if path.suffix.lower() == ".csv" and (mark := mark_of(_header(path))):
                return None, [_of_mark(path, mark)]
            frame = self._read(path)
        except UnicodeDecodeError:
            return None, ["not UTF-8: write it again as UTF-8"]
        except DataError as error:
            return None, [str(error).removeprefix(f"{path} ")]
        except (OSError, EOFError, ValueError) as error:  # these include the errors of pandas
            return None, [explain_failure("cannot be read", error)]
        faults = [] if len(frame) else ["no rows below its header"]
        return frame, [*faults, *self._of_names(list(map(str, frame.columns))), *self._of(frame)]

    def _of_names(self, header: list[str]) -> list[str]:
        """List the faults in the names of the columns, which may have any order."""
        wanted = [*self._needed, *([self._users] if self._users else [])]
        further = [name for name in header if name not in wanted]
        faults = []
        for name in wanted:
            if name not in header:
                hint = alternatives(name, further)
                similar = [each for each in further if hint == f"did you mean {each!r}?"]
                faults.append(f"no column {name!r}" + (f" ({hint})" if similar else ""))
                further = [each for each in further if each not in similar]
        if further and not self._open:
            faults.append(
                f"extra column{'s'[: len(further) > 1]} {_join(further)}: drop, or name the model's "
                "inputs in 'inputs'"
            )
        return faults

    def _of(self, frame: libraries.DataFrame) -> list[str]:
        """List the faults in the values of a frame. The texts contain no values."""
        import pandas

        numeric = pandas.api.types.is_numeric_dtype
        commas: list[str] = []
        texts: list[str] = []
        faults: list[str] = []
        for name in self._needed:
            if name not in frame or name in self._targets or name in self._encoding.categories:
                continue
            values = frame[name].to_numpy(dtype=object)
            absent = missing(values)
            if numeric(frame[name]) or absent.all():
                if absent.any() and name not in self._encoding.fill:
                    faults.append(f"gaps in {name!r} ({absent.sum()} of {len(values)} rows)")
                    self._gaps.add(name)
            elif _has_commas(values[~absent]):
                commas.append(name)
            elif numeric(self._test[name]):
                wrong = len(values) - int(_are_numbers(frame[name]).sum()) - int(absent.sum())
                faults.append(
                    f"text in {wrong} of {len(values)} rows of {name!r}, a number in {self._path.name}"
                )
            else:
                texts.append(name)
        if commas:
            faults.append(
                f"decimal commas in {_join(commas)}: write it again with pandas.read_csv(file, "
                "decimal=',').to_csv(file, index=False)"
            )
        if texts:
            faults.append(f"text in {_join(texts)}")
            self._texts.update(texts)
        for name in self._targets:
            if (
                name in frame
                and self._labels is None
                and bool(_are_numbers(self._test[name]).all())
            ):
                wrong = int((~_are_numbers(frame[name])).sum())
                faults += [f"no number as target {name!r} in {wrong} rows"] if wrong else []
        return faults + self._encoding.faults(frame)

    def _report(self, found: Mapping[tuple[str, ...], list[Path]], count: int) -> str:
        paths_lost = [path for paths in found.values() for path in paths]
        public = self._path in paths_lost
        lost = len(paths_lost) - public
        files = [f"{lost} of {count} training files"] if lost else []
        files += [f"the public {self._path.name}"] if public else []
        lines = [f"data: {' and '.join(files)} cannot be used:"]
        for faults, paths in found.items():
            names = ", ".join(path.name for path in paths[:3])
            more = f" and {len(paths) - 3} more" if len(paths) > 3 else ""
            lines.append(f"  {names}{more}: {'; '.join(faults)}")
        if self._texts:
            lines.append(f"text needs public categories: 'categories': {self._categories()}")
        if self._gaps:
            example = ", ".join(f"{name!r}: NUMBER" for name in sorted(self._gaps))
            lines.append(f"gaps need public figures: 'fill': {{{example}}}, or other 'inputs'")
        return "\n".join(lines)

    def _categories(self) -> str:
        """Return a text that lists, for each column of text, the categories that occur in the
        public table.
        """
        parts = []
        for name in sorted(self._texts):
            public: list[str] = []
            if name in self._test:
                values = self._test[name].to_numpy(dtype=object)
                public = sorted({as_text(value) for value in values[~missing(values)]})
            listed = public if 1 < len(public) <= _SHOWN else []
            parts.append(f"{name!r}: {listed or '[...]'}")
        return "{" + ", ".join(parts) + "}"


def _join(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def _has_commas(values: np.ndarray) -> bool:
    """Whether all texts are numbers without a decimal point, at least one of which has a decimal
    comma.
    """
    texts = [str(value) for value in values if str(value)]
    numbers = [bool(_COMMA.fullmatch(text)) for text in texts]
    return any(numbers) and all(
        comma or re.fullmatch(r"\s*-?\d+\s*", text)
        for comma, text in zip(numbers, texts, strict=True)
    )


def _header(path: Path) -> str:
    with path.open(encoding="utf-8-sig") as file:
        return file.readline()


def _of_mark(path: Path, mark: str) -> str:
    """Describe the fault of a file whose columns are not separated by commas, and the remedy."""
    import pandas

    rows = pandas.read_csv(path, sep=mark, dtype=str, keep_default_na=False)
    commas = any(_has_commas(rows[name].to_numpy(dtype=object)) for name in rows)
    decimal = ", decimal=','" if commas else ""
    return (
        f"{mark!r} in place of commas between the columns{', and decimal commas' if commas else ''}: "
        f"write it again with pandas.read_csv(file, sep={mark!r}{decimal}).to_csv(file, index=False)"
    )


def _are_numbers(column: libraries.Series[Any]) -> libraries.Series[bool]:
    import pandas

    truths = column.astype(str).str.lower().isin(["true", "false"])
    return truths | pandas.to_numeric(column, errors="coerce").notna()
