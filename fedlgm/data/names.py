"""Conversion of class names in a user's data to numbers, and detection of missing values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from fedlgm.errors import DataError

IGNORED = -100
"""Target of a position that is ignored in the loss. `transformers` and torch's `ignore_index` use
the same value.
"""
GAPS = frozenset(
    [
        "",
        "#N/A",
        "#N/A N/A",
        "#NA",
        "-1.#IND",
        "-1.#QNAN",
        "-NaN",
        "-nan",
        "1.#IND",
        "1.#QNAN",
        "<NA>",
        "N/A",
        "NA",
        "NULL",
        "NaN",
        "None",
        "n/a",
        "nan",
        "null",
    ]
)
"""Texts that mean a missing number, as in pandas by default."""


def class_numbers(
    parts: dict[str, Any], labels: Sequence[str] | None
) -> tuple[Any, Any, tuple[str, ...] | None]:
    """Replace class names among the targets by class numbers. Return the training and the test
    part, and the names of the classes (None if the classes have no names).

    Args:
        parts: the parts "training" and "test", each a pair (inputs, targets).
        labels: names of the classes. With None, they are the names among the test targets, in
            alphabetical order.

    Raises:
        DataError: a target is missing or names no class, or only one part has names.
    """
    targets = {}
    for part, pair in parts.items():
        if not (isinstance(pair, tuple | list) and len(pair) == 2):
            continue
        refuse_masked(pair[1], f"{part} targets")
        if isinstance(pair[1], torch.Tensor):
            continue
        with suppress(ValueError):  # unequal lengths of rows, which `as_numbers` reports
            targets[part] = y = np.asarray(pair[1])
            if y.dtype.kind in "SO" and any(isinstance(value, bytes) for value in y.reshape(-1)):
                raise DataError(
                    f"{part} targets hold byte strings: decode them, as in [one.decode() for one "
                    "in y]"
                )
    texts = {part: y for part, y in targets.items() if _is_text(y)}
    if labels is None and not texts:
        return (*parts.values(), None)
    if labels is None and len(texts) < len(parts):
        raise DataError(
            f"{next(iter(texts))} targets are names, but the targets of the other part are "
            "not: both parts need targets of the same kind"
        )
    for part, y in texts.items():
        if (
            lost := missing(y) | np.array([isinstance(value, str) and not value for value in y])
        ).any():
            raise DataError(
                f"{part} targets: {describe_missing(lost, 'target')}: leave these rows out"
            )
    names = (
        tuple(map(str, labels))
        if labels is not None
        else tuple(sorted({str(text) for text in texts["test"]}))
    )
    if len(set(names)) < max(len(names), 2):
        raise DataError(
            "labels: must name two or more classes, each once, got "
            f"{', '.join(names[:8]) or 'none'}"
        )
    number, numbers = {name: i for i, name in enumerate(names)}, dict(parts)
    for part, y in targets.items():
        if part in texts:
            unknown = [
                i for i, value in enumerate(y) if not isinstance(value, str) or value not in number
            ]
            numbers[part] = (
                parts[part][0],
                np.array([number.get(str(value), 0) for value in y], dtype=np.int64),
            )
        else:
            classes = {*range(len(names)), *((IGNORED,) if y.ndim > 1 else ())}
            unknown = [i for i, value in enumerate(y.reshape(-1)) if value not in classes]
        if unknown:
            source = "data.labels names" if labels is not None else "the public test part has"
            raise DataError(
                f"data.labels: {len(unknown)} {part} targets, the first in row {unknown[0]}, are "
                f"none of the classes that {source} "
                f"({', '.join(names[:8])}{', ...' if len(names) > 8 else ''}): list the names of "
                "all classes in data.labels (from Python: data={..., 'labels': [...]})"
            )
    return numbers["training"], numbers["test"], names


def missing(values: np.ndarray) -> np.ndarray:
    """Return, for each value, whether it is missing: None, NaN, infinite in an array of floats, or
    pandas' NA or NaT; bool [n].

    Example:
        >>> missing(np.array(["a", None, float("nan")], dtype=object)).tolist()
        [False, True, True]
    """
    if values.dtype.kind in "mM":
        return np.isnat(values)
    if values.dtype.kind == "f":
        return ~np.isfinite(values)
    if values.dtype != object:
        return np.zeros(len(values), dtype=bool)
    return np.array(
        [
            value is None or type(value).__name__ in ("NAType", "NaTType") or value != value
            for value in values
        ]
    )


def refuse_masked(values: Any, what: str) -> None:
    """Refuse masked values of `numpy.ma`, because without the mask an array contains other values,
    such as -9999, in their place.

    Args:
        values: an array, or a list or tuple of arrays.
        what: description of the values in the message.

    Raises:
        DataError: a value is masked.

    Example:
        >>> refuse_masked(np.ma.masked_equal([52, -9999], -1), "training inputs")  # nothing is masked
    """
    parts = values if isinstance(values, list | tuple) else [values]
    masked = sum(
        int(np.ma.count_masked(part)) for part in parts if isinstance(part, np.ma.MaskedArray)
    )
    if masked:
        raise DataError(
            f"{what}: {masked} values are masked: leave out their rows, or fill them with a public "
            "figure, as in x.filled(0)"
        )


def describe_missing(lost: np.ndarray, what: str) -> str:
    """Return a text that says how many rows lack a value, and which row is the first of them.

    Example:
        >>> describe_missing(np.array([False, True]), "target")
        '1 of 2 rows have no target (NaN or empty), first row 1, counted from 0'
    """
    return f"{lost.sum()} of {len(lost)} rows have no {what} (NaN or empty), first row {lost.argmax()}, counted from 0"


def spelled_once(values: Mapping[str, Any], what: str) -> None:
    """Refuse two spellings of the same value, because they would become the same class or the same
    user.

    Args:
        values: the value that each spelling stands for.
        what: location of the values, for the message.

    Raises:
        DataError: two spellings have the same value.

    Example:
        >>> spelled_once({"01": 1, "1": 1}, "column 'ward'")
        Traceback (most recent call last):
            ...
        fedlgm.errors.DataError: column 'ward' has '01' and '1', which would become the same value: use one spelling
    """
    first: dict[Any, str] = {}
    for text, value in values.items():
        if (other := first.setdefault(value, text)) != text:
            raise DataError(
                f"{what} has {other!r} and {text!r}, which would become the same value: use one "
                "spelling"
            )


def _is_text(y: np.ndarray) -> bool:
    return y.ndim == 1 and (
        y.dtype.kind in "UT" or (y.dtype == object and any(isinstance(value, str) for value in y))
    )
