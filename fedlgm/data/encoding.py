"""Encoding of tables: columns of text are converted to columns of Booleans by public categories,
and gaps are filled with public values.

Neither the categories nor the values for gaps depend on private rows, because a value that depends
on private rows would be a release.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import numpy as np

from fedlgm import libraries
from fedlgm.data.dataset import DataSet
from fedlgm.data.names import missing
from fedlgm.data.tables import Column, describe, require_columns
from fedlgm.errors import DataError

OPTIONS = ("categories", "fill")
"""Keys of a mapping of tables that describe an encoding."""


@dataclass(frozen=True)
class Encoding:
    """Public categories of a table's columns of text, and public values that fill gaps in columns.

    Attributes:
        categories: for each column of text, the list of its categories. Each category after the
            first becomes a column of Booleans, such as "sex=M"; the first category is the reference
            and has no column.
        fill: for each column, the value that replaces gaps: a number, or one of the column's
            categories.

    Raises:
        DataError: a column has fewer than two categories or a category occurs twice; a value for
            gaps is not one of the categories of its column or, for a column without categories, is
            not a finite number.

    Example:
        >>> import pandas
        >>> rows = pandas.DataFrame({"sex": ["F", "M"], "age": [52.0, None]})
        >>> encoding = Encoding({"sex": ["F", "M"]}, {"age": 60})
        >>> encoding.apply(rows, "rows").to_dict("list")
        {'sex=M': [False, True], 'age': [52.0, 60.0]}
    """

    categories: Mapping[str, Sequence[str]] = field(default_factory=dict)
    fill: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for option, example in (("categories", "{'sex': ['F', 'M']}"), ("fill", "{'age': 60}")):
            if not isinstance(getattr(self, option), Mapping):
                raise DataError(
                    f"data.{option}: must name columns, as in {example}, got "
                    f"{getattr(self, option)!r}"
                )
        for name, values in self.categories.items():
            texts = [] if isinstance(values, str) else [as_text(value) for value in values]
            if len(set(texts)) < max(2, len(texts)):
                raise DataError(
                    f"data.categories: {name!r} needs two or more categories, each once, as in "
                    f"['F', 'M'], got {values!r}"
                )
        for name, value in self.fill.items():
            if name in self.categories:
                if as_text(value) not in self.texts(name):
                    raise DataError(
                        f"data.fill: {value!r} is none of the categories of {name!r} "
                        f"({', '.join(self.texts(name))})"
                    )
            elif not isinstance(value, Real) or not np.isfinite(float(value)):
                raise DataError(f"data.fill: {name!r} needs a finite public number, got {value!r}")

    def texts(self, name: str) -> list[str]:
        """Return the categories of a column as the texts that stand for them in a file."""
        return [as_text(value) for value in self.categories[name]]

    def faults(self, table: libraries.DataFrame) -> list[str]:
        """Describe the unfilled gaps and the unknown categories in the columns with categories. The
        descriptions contain no values of the table.
        """
        faults = []
        for name in self.categories:
            if name in table:
                values = self._filled(table[name].to_numpy(dtype=object), name)
                absent = missing(values) | (values == "")
                unknown = ~absent & ~np.isin([as_text(value) for value in values], self.texts(name))
                faults += [f"gaps in {name!r} ({absent.sum()} rows)"] if absent.any() else []
                faults += (
                    [f"other values of {name!r} than its categories ({unknown.sum()} rows)"]
                    if unknown.any()
                    else []
                )
        return faults

    def apply(self, table: libraries.DataFrame, where: str) -> libraries.DataFrame:
        """Replace columns of text by columns of Booleans, and fill the gaps.

        Args:
            table: the table.
            where: name of the table in messages.

        Raises:
            DataError: a column of the encoding is missing; or a column with categories has a gap
                that is not filled, or a value that is not one of its categories.
        """
        import pandas

        require_columns([*self.categories, *self.fill], map(str, table.columns), where)
        if faults := self.faults(table):
            raise DataError(
                f"{where}: {'; '.join(faults)}: list all categories in data.categories, and the "
                "category of a gap in data.fill"
            )
        columns = {}
        for name in table.columns:
            values = table[name]
            for column in self._columns(str(name)):
                columns[column["name"]] = input_values(column, values.to_numpy(dtype=object))
            if name not in self.categories:
                columns[name] = values.fillna(self.fill[name]) if name in self.fill else values
        return pandas.DataFrame(columns, index=table.index)

    def inputs(self, names: Sequence[str]) -> list[str]:
        """Convert names of columns before `apply` to the names of the corresponding columns after
        `apply`.
        """
        return [
            column
            for name in names
            for column in ([each["name"] for each in self._columns(name)] or [name])
        ]

    def describe(self, columns: Sequence[Column] | None) -> tuple[Column, ...] | None:
        """Add to the descriptions of the columns after `apply` the information that predictions
        need: the original column, its categories and the value for gaps.
        """
        if columns is None:
            return None
        by_name = {each["name"]: each for name in self.categories for each in self._columns(name)}
        completed: list[Column] = []
        for column in columns:
            more: Any = by_name.get(column["name"], {})
            if column["name"] in self.fill:
                more = {"fill": self.fill[column["name"]]}
            completed.append({**column, **more})
        return tuple(completed)

    def _columns(self, name: str) -> list[Column]:
        """Describe the columns of Booleans that replace a column of text; the list is empty for any
        other column.
        """
        if name not in self.categories:
            return []
        texts = self.texts(name)
        columns: list[Column] = [
            {"name": f"{name}={text}", "dtype": "bool", "of": name, "categories": texts}
            for text in texts[1:]
        ]
        for column in columns if name in self.fill else ():
            column["fill"] = as_text(self.fill[name])
        return columns

    def _filled(self, values: np.ndarray, name: str) -> np.ndarray:
        return fill_gaps(values, self.fill[name]) if name in self.fill else values


def as_text(value: Any) -> str:
    """Convert a category to the text that stands for it in a file. The numbers 2 and 2.0 are the
    same category.

    Example:
        >>> as_text(2.0), as_text("II")
        ('2', 'II')
    """
    if isinstance(value, Real) and not isinstance(value, bool) and float(value).is_integer():
        return f"{float(value):.0f}"
    return str(value)


def fill_gaps(values: np.ndarray, value: Any) -> np.ndarray:
    """Replace missing values and empty texts among values [n] of any type by `value`."""
    filled = values.astype(object)
    filled[missing(filled) | (filled == "")] = value
    return filled


def input_values(column: Column, values: np.ndarray) -> np.ndarray:
    """Compute the values of one of the model's inputs from the values [n], of any type, of the
    table's column.

    Example:
        >>> sex = {"name": "sex=M", "dtype": "bool", "of": "sex", "categories": ["F", "M"]}
        >>> input_values(sex, np.array(["M", "F"], dtype=object)).tolist()
        [True, False]
    """
    if "fill" in column:
        values = fill_gaps(values, column["fill"])
    if "of" not in column:
        return values
    category = column["name"].removeprefix(f"{column['of']}=")
    return np.array([as_text(value) == category for value in values], dtype=bool)


def from_columns(
    inputs: Sequence[str] = (),
    labels: Sequence[str] | None = None,
    classes: int | None = None,
    standardise: Any = None,
    **others: Any,
) -> DataSet | None:
    """Make a data set without rows from a description of the columns and classes. Return None if no
    column is named.

    Args:
        inputs: the columns, each with one number per row.
        labels: names of the classes.
        classes: number of classes, if they have no names. If neither labels nor classes are given,
            the targets are real numbers.
        standardise: public means and deviations by column, see `fedlgm.data.tables.as_arrays`.
        others: other options of `load` for a table, which have no effect here.

    Raises:
        DataError: `standardise` does not fit the columns.

    >>> found = from_columns(["age", "dose"], ["benign", "malignant"], standardise={"age": (50, 20)})
    >>> found.shape, found.classes, len(found.test_y), found.columns[0]["mean"]
    ((2,), 2, 0, 50.0)
    """
    if not inputs:
        return None
    count = len(labels) if labels else classes
    x = np.empty((0, len(inputs)), np.float32)
    y = np.empty(0, np.float32 if count is None else np.int64)
    columns = describe(dict.fromkeys(inputs, x), inputs, x, standardise)
    names = tuple(labels) if labels else None
    return DataSet("table", x, y, x, y, count, labels=names, columns=columns)


def from_tables(mapping: Mapping[str, Any]) -> DataSet:
    """Make a data set from a mapping as `DataSet.from_mapping` does. If the mapping has
    `categories` or `fill`, its tables are encoded first.

    Raises:
        DataError: the mapping has `categories` or `fill`, but "train" or "test" is not a pandas
            frame; or `Encoding` or `DataSet.from_mapping` refuses the data.
    """
    given = {key: mapping[key] for key in OPTIONS if mapping.get(key) is not None}
    plain = {key: value for key, value in mapping.items() if key not in OPTIONS}
    if not given:
        return DataSet.from_mapping(plain)
    encoding = Encoding(**given)
    for part in ("train", "test"):
        if not hasattr(plain.get(part), "iloc"):
            raise DataError(
                f"data.{next(iter(given))}: is for pandas frames and CSV files, but {part!r} is of "
                f"type {type(plain.get(part)).__name__}"
            )
        plain[part] = encoding.apply(plain[part], f"data: {part!r}")
    if plain.get("inputs") is not None:
        names = plain["inputs"]
        plain["inputs"] = encoding.inputs([names] if isinstance(names, str) else list(names))
    data = DataSet.from_mapping(plain)
    return replace(data, columns=encoding.describe(data.columns))
