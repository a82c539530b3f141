"""Conversion of tables with named columns (pandas frames or `datasets.Dataset` objects) to the
arrays of a data set.

A table of tokens has the columns of a tokenizer (`input_ids`, and optionally `attention_mask` and
`token_type_ids`). These columns become the inputs in this order, and their rows are padded to one
length. Any other table contains numbers or images; all its columns except those of the target and
the user are the features.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from decimal import Decimal
from numbers import Real
from typing import Any, NotRequired

import numpy as np
from typing_extensions import TypedDict

from fedlgm.data.names import IGNORED, refuse_masked
from fedlgm.data.pixels import fit_image, readable
from fedlgm.errors import DataError, Notice
from fedlgm.wording import alternatives

TOKENS = ("input_ids", "attention_mask", "token_type_ids")
TARGETS = ("labels", "label")
OPTIONS = (
    "users",
    "target",
    "inputs",
    "text",
    "tokenizer",
    "length",
    "image_size",
    "channels",
    "standardise",
)
INTERCEPT = "(intercept)"
"""Name of the intercept in the list of a linear model's coefficients. No column of a table may have
this name.
"""
_KINDS = ("bool", "int", "float")
_Columns = dict[str, Any]
_Part = tuple[tuple[np.ndarray, ...] | np.ndarray, np.ndarray]  # inputs and targets


class Column(TypedDict):
    """A feature's public description: its name and type and, if it is standardised, the constants
    with which this is done.

    Attributes:
        name: name of the column.
        dtype: "bool", "int" or "float", as in the public test table.
        mean, deviation: the constants of a standardised feature; the model's input is (value -
            mean) / deviation.
        of, categories: for a feature that indicates one category of a column of text, the name of
            this column and the list of all its categories.
        fill: public value that replaces missing values of the column.
    """

    name: str
    dtype: str
    mean: NotRequired[float]
    deviation: NotRequired[float]
    of: NotRequired[str]
    categories: NotRequired[list[str]]
    fill: NotRequired[Any]


class Unfit(DataError):
    """Error about a column that cannot be a feature. The attribute `fault` gives the reason in a
    few words.
    """

    def __init__(self, message: str, fault: str) -> None:
        super().__init__(message)
        self.fault = fault


def is_table(value: object) -> bool:
    """Whether a value is a pandas frame or a `datasets.Dataset`. The check does not import pandas
    or datasets.

    Example:
        >>> import pandas
        >>> is_table(pandas.DataFrame({"age": [52]})), is_table([1.0])
        (True, False)
    """
    return any(
        package in sys.modules and isinstance(value, getattr(sys.modules[package], name, ()))
        for package, name in (("pandas", "DataFrame"), ("datasets", "Dataset"))
    )


def holds_tables(data: Mapping[str, Any]) -> bool:
    """Whether a mapping's training or test part is a table."""
    return is_table(data.get("train")) or is_table(data.get("test"))


def as_arrays(data: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a mapping with tables under "train" and "test" to a mapping with arrays, for
    `DataSet.from_mapping`.

    Args:
        data: {"train": table, "test": table} and these optional keys. "users": the column that
            names each example's user. "target": the column of the target, or a list of several such
            columns (default: "labels" or "label"; if a table of tokens has neither column, its
            tokens are the targets, for the task "causal-lm"). "inputs": the feature column or a
            list of feature columns (default: all other columns). "text" and "tokenizer": the column
            of texts and the tokenizer for these texts. "length": the number of tokens to which
            texts are cut and all rows are padded (default: the length of the longest test row; an
            error if a training row is longer). "standardise": public constants {column: (mean,
            deviation)}, or "test" to compute the constants from the test rows, which are public
            (columns of Booleans are not standardised); the model's exports then contain these
            constants. "image_size" and "channels": the size and the number of channels of images,
            see `fedlgm.data.pixels.fit_image`. Other keys are copied to the result.

    Returns:
        The mapping with arrays. If the features are columns of numbers, "columns" holds their
        descriptions. If "labels" is missing and a `datasets.Dataset` names its classes, "labels"
        holds these names.

    Raises:
        DataError: a table or a column is missing, or a feature cannot be converted to numbers.

    Example:
        >>> import pandas
        >>> table = pandas.DataFrame({"site": ["a", "b"], "age": [52.0, 61.0], "dose": [1, 2], "label": [0, 1]})
        >>> arrays = as_arrays({"train": table, "test": table, "users": "site"})
        >>> arrays["train"][0].tolist(), arrays["users"].tolist()
        ([[52.0, 1.0], [61.0, 2.0]], ['a', 'b'])
    """
    parts = {part: _columns(data.get(part), part) for part in ("train", "test")}
    options = {key: data[key] for key in OPTIONS if data.get(key) is not None}
    length = options.get("length")
    if length is not None and not (isinstance(length, int) and length > 0):
        raise DataError(
            "data: length is the maximum number of tokens, a whole number of at least 1, got "
            f"{length!r}"
        )
    arrays = {key: value for key, value in data.items() if key not in (*parts, *OPTIONS)}
    users = options.get("users")
    if isinstance(users, str):
        parts["test"].pop(users, None)
        users = np.asarray(_take_column(parts["train"], users, "train"))
    if users is not None:
        arrays["users"] = users
    if "text" in options or "tokenizer" in options:
        for part, columns in parts.items():
            columns.update(_tokenize(columns, part, options))
    target = options.get("target")
    if target is None:
        target = next((name for name in TARGETS if name in parts["train"]), None)
    if target is None and "input_ids" not in parts["train"]:
        raise DataError(
            f"data.target: which column is the target? It must be one of {_join_names(parts['train'])}"
        )
    if (
        target is not None
        and data.get("labels") is None
        and (classes := _class_names(data["train"], target))
    ):
        arrays["labels"] = classes
    targets = {
        part: None if target is None else _take_target(columns, target, part)
        for part, columns in parts.items()
    }
    if "input_ids" in parts["train"]:
        _refuse_constants(options.get("standardise"))
        padding = getattr(options.get("tokenizer"), "pad_token_id", None) or 0
        return arrays | _of_tokens(parts, targets, padding, length)
    inputs = options.get("inputs", list(parts["train"]))
    names = [inputs] if isinstance(inputs, str) else list(inputs)
    size, channels = options.get("image_size"), options.get("channels", 3)
    x = {part: _features(columns, names, part, size, channels) for part, columns in parts.items()}
    described = describe(parts["test"], names, x["test"], options.get("standardise"))
    if described is not None:
        arrays["columns"] = described
        x = {part: standardise(values, described) for part, values in x.items()}
    return arrays | {part: (x[part], targets[part]) for part in parts}


def describe(
    table: Any,
    names: Sequence[str],
    x: np.ndarray,
    constants: Mapping[str, Any] | str | None = None,
) -> tuple[Column, ...] | None:
    """Describe the features of a public table. Return None for features that are images or arrays,
    because these are not columns of numbers.

    Args:
        table: the table, or its columns by name.
        names: names of the columns that are features.
        x: values of the features [n, ...].
        constants: mean and standard deviation of each column that is standardised, by the column's
            name. With "test", the constants are computed from `x` for all columns except those of
            Booleans.

    Raises:
        DataError: `constants` names an unknown column, or a column's constants are not two finite
            numbers with a deviation above 0; or, with "test", all values of a column are equal.
    """
    if x.ndim != 2 or x.shape[1] != len(names):
        _refuse_constants(constants)
        return None
    kinds = {"b": "bool", "i": "int", "u": "int"}
    columns: list[Column] = [
        {"name": str(name), "dtype": kinds.get(np.asarray(table[name]).dtype.kind, "float")}
        for name in names
    ]
    index = next((name for name in map(str, names) if name.startswith("Unnamed: ")), None)
    if index is not None:
        warnings.warn(
            Notice(
                f"column {index!r} is an input of the model, but it has no name and may be the "
                "index of a table: write tables with index=False, or name the inputs in "
                "data.inputs"
            ),
            stacklevel=2,
        )
    if isinstance(constants, str) and constants == "test":
        constants = _figures(columns, x)
    if not isinstance(constants, Mapping | None):
        raise DataError(f"data.standardise: must be 'test' or name columns, got {constants!r}")
    require_columns(constants or (), names, "data.standardise: the set of inputs")
    for column in columns:
        if constants is not None and column["name"] in constants:
            column["mean"], column["deviation"] = _constants(
                column["name"], constants[column["name"]]
            )
    return tuple(columns)


def _refuse_constants(constants: object) -> None:
    if constants is not None:
        raise DataError(
            "data.standardise: is for columns of numbers, not for images, tokens or arrays"
        )


def _figures(columns: Sequence[Column], x: np.ndarray) -> dict[str, tuple[float, float]]:
    """Compute the mean and standard deviation of each column of public rows [n, d], except for
    columns of Booleans.
    """
    figures = {}
    for column, values in zip(columns, x.T, strict=True):
        if column["dtype"] == "bool":
            continue
        if len(values) and values.min() == values.max():
            raise DataError(
                f"data.standardise: all test rows have the same {column['name']!r}: leave it "
                "out of data.inputs, or give the mean and deviation of each column"
            )
        figures[column["name"]] = float(values.mean()), float(values.std())
    return figures


def _constants(name: str, given: Any) -> tuple[float, float]:
    try:
        mean, deviation = map(float, given)
    except (TypeError, ValueError):
        mean = deviation = float("nan")
    if not (np.isfinite([mean, deviation]).all() and deviation > 0):
        raise DataError(
            f"data.standardise: {name!r} needs (mean, deviation), two finite numbers with a "
            f"deviation above 0, got {given!r}"
        )
    return mean, deviation


def check_columns(columns: Sequence[Column], x: Any, part: str) -> None:
    """Check that the descriptions fit the columns of the inputs.

    Args:
        columns: the descriptions, one for each column of the inputs.
        x: inputs.
        part: "training" or "test", for the message.

    Raises:
        DataError: the number of descriptions is wrong, a description has an invalid name, type or
            constant, or two descriptions have the same name.

    Example:
        >>> check_columns([{"name": "age", "dtype": "int"}], np.zeros((4, 1)), "test")
    """
    shape = tuple(map(np.shape, x)) if isinstance(x, tuple) else tuple(np.shape(x))
    if len(shape) != 2 or shape[1] != len(columns):
        raise DataError(
            f"columns: {len(columns)} {'is' if len(columns) == 1 else 'are'} described, but the "
            f"{part} inputs are {shape}: describe each column of a table [n, d], in their order"
        )
    names = []
    for column in columns:
        if not isinstance(column, Mapping) or not isinstance(column.get("name"), str):
            raise DataError(
                f"columns: each must be a mapping such as {{'name': 'age', 'dtype': 'int'}}, got "
                f"{column!r}"
            )
        name = column["name"]
        if name == INTERCEPT:
            raise DataError(
                f"columns: {name!r} is the name of a linear model's intercept: rename the column"
            )
        if name in names:
            raise DataError(f"columns: two are named {name!r}: rename one of them")
        if column.get("dtype") not in _KINDS:
            raise DataError(
                f"columns: {name!r} must have a dtype, one of {', '.join(_KINDS)}; got "
                f"{column.get('dtype')!r}"
            )
        _constants(name, (column.get("mean", 0.0), column.get("deviation", 1.0)))
        names.append(name)


def standardise(x: np.ndarray, columns: Sequence[Column]) -> np.ndarray:
    """Standardise rows [n, d] with the constants of their columns; the result is float64.

    Example:
        >>> standardise(np.array([[60.0]]), [{"name": "age", "dtype": "float", "mean": 50, "deviation": 20}]).tolist()
        [[0.5]]
    """
    mean = np.array([column.get("mean", 0.0) for column in columns])
    moved: np.ndarray = (x - mean) / np.array([column.get("deviation", 1.0) for column in columns])
    return moved


def features(table: Any, part: str) -> np.ndarray:
    """Convert all columns of a table to features. The conversion and the errors are those of
    `as_arrays`.

    Example:
        >>> import pandas
        >>> features(pandas.DataFrame({"age": [52.0], "smokes": [True]}), "training").tolist()
        [[52.0, 1.0]]
    """
    columns = _columns(table, part)
    return _features(columns, list(columns), part)


def _columns(table: Any, part: str) -> _Columns:
    if not is_table(table):
        hint = (
            "; pandas.concat joins several tables" if isinstance(table, list | tuple | dict) else ""
        )
        kind = type(table).__name__
        raise DataError(
            f"data: 'train' and 'test' must both be tables, but {part!r} is of type {kind}{hint}"
        )
    if hasattr(table, "with_format"):
        pictures = any(type(kind).__name__ == "Image" for kind in table.features.values())
        with readable(f"data: an image of {part!r}") if pictures else nullcontext():
            return dict(table.with_format(None)[:])
    names = [str(name) for name in table.columns]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise DataError(f"data: {part!r} has several columns {twice!r}: rename or drop all but one")
    return dict(zip(names, (table.iloc[:, i].to_numpy() for i in range(len(names))), strict=True))


def _class_names(table: Any, target: str) -> tuple[str, ...] | None:
    """Return the names of a target's classes if the table is a `datasets.Dataset` that names them;
    otherwise None.
    """
    features = getattr(table, "features", {})
    names = getattr(features[target], "names", None) if target in list(features) else None
    return None if names is None else tuple(names)


def _take_column(columns: _Columns, name: Any, part: str) -> Any:
    if not isinstance(name, str):
        got = repr(name) if isinstance(name, list) else type(name).__name__
        raise DataError(
            f"data: a column must be named by one string, got {got}; its columns: "
            f"{_join_names(columns)}"
        )
    require_columns([name], columns, f"data: {part!r}")
    return columns.pop(name)


def _take_target(columns: _Columns, target: Any, part: str) -> Any:
    """Remove the target from `columns` and return it: one column [n], or several columns as one
    array [n, k].
    """
    if isinstance(target, list | tuple) and len(target) > 1:
        remedy = "give numbers"
        return np.stack(
            [
                numbers(_take_column(columns, name, part), f"data: column {name!r}", remedy)
                for name in target
            ],
            axis=1,
        )
    return _take_column(columns, target, part)


def _join_names(columns: Iterable[str]) -> str:
    return ", ".join(map(repr, columns)) or "none"


def _tokenize(columns: _Columns, part: str, options: Mapping[str, Any]) -> dict[str, Any]:
    if not ("text" in options and "tokenizer" in options):
        raise DataError("data: 'text' (the column of texts) and 'tokenizer' must be given together")
    if not callable(options["tokenizer"]):
        raise DataError(
            "data: a tokenizer must be an object, such as AutoTokenizer.from_pretrained(...), got "
            f"{options['tokenizer']!r}"
        )
    column, length = _take_column(columns, options["text"], part), options.get("length")
    lost = [row for row, text in enumerate(column) if not isinstance(text, str)]
    if lost:
        raise DataError(
            f"data: column {options['text']!r} of {part!r} has no text in {len(lost)} of "
            f"{len(column)} rows, first in row {lost[0]}, counted from 0: leave these rows out"
        )
    texts = list(column)
    encoded = options["tokenizer"](texts, truncation=length is not None, max_length=length)
    return {name: encoded[name] for name in TOKENS if name in encoded}


def _of_tokens(
    parts: Mapping[str, _Columns], targets: Mapping[str, Any], padding: int, length: int | None
) -> dict[str, _Part]:
    """Make the inputs and targets of the training and the test part from tables of tokens. Rows are
    padded on the right to the given length, or to the length of the longest test row.
    """
    needed = [name for name in ("input_ids", "token_type_ids") if name in parts["train"]]
    require_columns(needed, parts["test"], "data: 'test'")
    for part, columns in parts.items():
        _check_tokens(columns, part)
    width = _width(parts, length)
    # If the model gets token types, it also gets a mask, because the mask is the input before the
    # token types. For a table without a mask, the mask is 1 for all tokens. Whether there is a mask
    # must not depend on the lengths of private rows.
    lengths = {len(row) for row in parts["test"]["input_ids"]}
    masked = (
        length is not None or len(lengths) > 1 or any(name in parts["train"] for name in TOKENS[1:])
    )
    if not masked and any(len(row) != width for row in parts["train"]["input_ids"]):
        raise DataError(
            f"data: all test rows have {width} tokens, but some training rows have fewer, and one "
            "private row must not decide whether the model gets a mask: give a number of tokens, "
            "as in data={..., 'length': 128}, or a column 'attention_mask'"
        )
    arrays: dict[str, _Part] = {}
    for part, columns in parts.items():
        rows = columns["input_ids"]
        tokens = _pad(rows, width, padding)
        inputs = [tokens]
        mask = _pad(columns.get("attention_mask", [[1] * len(row) for row in rows]), width, 0)
        if masked:
            inputs.append(mask)
        if "token_type_ids" in parts["train"]:
            inputs.append(_pad(columns["token_type_ids"], width, 0))
        target = targets[part]
        if target is None:
            y = np.where(mask == 0, IGNORED, tokens)
        elif len(target) and np.ndim(target[0]) == 1:
            y = _pad(target, width, IGNORED)
        else:
            y = np.asarray(target)
        arrays[part] = (tuple(inputs) if len(inputs) > 1 else tokens, y)
    return arrays


def _width(parts: Mapping[str, _Columns], length: int | None) -> int:
    """Compute the number of tokens that every row has after padding."""
    longest = {
        part: max(map(len, columns["input_ids"]), default=0) for part, columns in parts.items()
    }
    most = max(longest.values())
    if length is None and longest["train"] > longest["test"]:
        raise DataError(
            "data: rows would be padded to the longest training row, which is private: one more "
            "row would change the inputs of all others; give a public number of tokens, as in "
            "data={..., 'length': 128}"
        )
    if length is not None and most > length:
        raise DataError(
            f"data: rows have up to {most} tokens, but length is {length}: cut the rows, or raise "
            "length"
        )
    return most if length is None else length


def _check_tokens(columns: _Columns, part: str) -> None:
    """Raise DataError if a row of a token column is not a list of whole numbers, or is not as long
    as the row's `input_ids`.
    """
    for name in (name for name in TOKENS if name in columns):
        for i, (row, tokens) in enumerate(zip(columns[name], columns["input_ids"], strict=True)):
            values = np.asarray(row)
            if values.ndim != 1 or (len(values) and values.dtype.kind not in "iu"):
                raise DataError(
                    f"data: row {i} of column {name!r} of {part!r} is not a list of whole numbers"
                )
            if len(values) != len(tokens):
                raise DataError(
                    f"data: row {i} of {part!r} has {len(tokens)} tokens, but {len(values)} in "
                    f"{name!r}"
                )


def _pad(rows: Sequence[Any], width: int, value: int) -> np.ndarray:
    padded = np.full((len(rows), width), value, dtype=np.int64)
    for i, row in enumerate(rows):
        padded[i, : len(row)] = row
    return padded


def _features(
    columns: _Columns, names: Sequence[str], part: str, size: int | None = None, channels: int = 3
) -> np.ndarray:
    """Join the named columns of numbers to one array [n, k]. If the only column holds an array per
    row, the result has the shape [n, ...].
    """
    require_columns(names, columns, f"data: {part!r}")
    if not names:
        raise DataError(
            f"data: {part!r} has no column besides target and user: there are no features"
        )
    by_name: dict[str, np.ndarray] = {}
    unfit: list[tuple[str, Unfit]] = []
    for name in names:
        try:
            by_name[name] = _column(columns[name], name, part, size, channels)
        except Unfit as error:
            unfit.append((name, error))
    if unfit:
        others = ", ".join(f"{name!r} ({error.fault})" for name, error in unfit[1:])
        raise DataError(f"{unfit[0][1]}{'; also unsuitable: ' if others else ''}{others}")
    if len(by_name) == 1:
        (values,) = by_name.values()
        return values[:, None] if values.ndim == 1 else values
    wide = next((name for name, values in by_name.items() if values.ndim > 1), None)
    if wide is not None:
        raise DataError(
            f"data.inputs: column {wide!r} holds an array per row: name only it, as data.inputs = "
            f"[{wide!r}]"
        )
    return np.stack(list(by_name.values()), axis=1)


def _column(values: Any, name: str, part: str, size: int | None, channels: int) -> np.ndarray:
    """Convert a column of images to float32 [n, C, H, W], or any other column as `numbers` does."""
    if len(values) and hasattr(values[0], "convert"):
        with readable(f"data: an image of column {name!r} of {part!r}"):
            images = [fit_image(image, size, channels) for image in values]
        if len({image.shape for image in images}) > 1:
            raise DataError(
                f"data.image_size: images of column {name!r} differ in size: set a size in pixels"
            )
        return np.stack(images)
    remedy = (
        f"drop it, or list its public categories, data={{..., 'categories': {{{name!r}: [...]}}}}; the "
        "owners' column belongs under 'users'; give dates as days; text needs a tokenizer: "
        f"data={{..., 'text': {name!r}, 'tokenizer': tokenizer}}"
    )
    return numbers(values, f"data: column {name!r} of {part!r}", remedy)


def require_columns(names: Iterable[str], known: Iterable[str], where: str) -> None:
    """Check that a table has all named columns.

    Args:
        names: names of the required columns.
        known: names of the table's columns.
        where: name of the table in the message.

    Raises:
        DataError: a column is missing.

    Example:
        >>> require_columns(["agee"], ["age", "dose"], "scans.parquet")
        Traceback (most recent call last):
            ...
        fedlgm.errors.DataError: scans.parquet has no column 'agee'; did you mean 'age'?
    """
    known = list(known)
    for name in names:
        if name not in known:
            raise DataError(f"{where} has no column {name!r}; {alternatives(name, known)}")


def numbers(values: Any, column: str, remedy: str) -> np.ndarray:
    """Convert a column of numbers to float64 [n], or a column of lists of numbers to float64 [n,
    ...].

    Args:
        values: the column.
        column: description of the column for messages. The messages contain no values of the
            column.
        remedy: what the user can do about values that are not numbers; the end of the message.

    Raises:
        Unfit: the column contains values that are not numbers, or has gaps.
        DataError: an array has masked values.

    Example:
        >>> numbers(["a-1", "a-2"], "column 'site'", "drop it")
        Traceback (most recent call last):
            ...
        fedlgm.data.tables.Unfit: column 'site' holds text, not numbers: drop it
    """
    refuse_masked([value for value in values if isinstance(value, np.ndarray)], column)
    try:
        lists = len(values) and isinstance(values[0], (list, np.ndarray))
        array = np.asarray([np.asarray(row) for row in values] if lists else values)
    except ValueError as error:
        raise Unfit(f"{column} holds lists of unequal length", "lists") from error
    if array.dtype == object and all(
        isinstance(value, Real | Decimal | None) for value in array.flat
    ):
        array = array.astype(np.float64)
    if array.dtype.kind in "mM":
        raise Unfit(
            f"{column} holds dates or times, not numbers: give days since a public date, as "
            "(column - date).dt.days",
            "dates",
        )
    if not (np.issubdtype(array.dtype, np.number) or array.dtype == np.bool_):
        kind = (
            "text"
            if len(values) and isinstance(values[0], str)
            else f"values of type {array.dtype}"
        )
        raise Unfit(f"{column} holds {kind}, not numbers: {remedy}", kind)
    floats = array.astype(np.float64)
    lost = np.flatnonzero(~np.isfinite(floats).all(axis=tuple(range(1, floats.ndim))))
    if len(lost):
        raise Unfit(
            f"{column} has no finite number in {len(lost)} of {len(floats)} rows, first in row "
            f"{lost[0]}, counted from 0: fill the gaps with a public figure, or leave the column "
            "out",
            f"gaps in {len(lost)} rows",
        )
    return floats
