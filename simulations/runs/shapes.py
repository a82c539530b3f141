"""Checks of the values in a run's files. Anyone who can write to the folder can change them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from fedlgm.errors import RunError
from fedlgm.wording import describe_problem


def misfit(value: Any, kind: Any) -> str:
    """The first mistake in a value that was read from a file; empty if it has this type.

    Args:
        value: the value.
        kind: a type, such as a TypedDict.

    Example:
        >>> misfit({"a": 1}, dict[str, float]), misfit({"a": "1"}, dict[str, float])
        ('', "a: must be a number, got '1'")
    """
    try:
        _adapter(kind).validate_python(value, strict=True)
    except ValidationError as error:
        return describe_problem(error.errors()[0])
    return ""


def read_json(path: Path, kind: Any, remedy: str) -> Any:
    """The value in a JSON file.

    Args:
        path: the file.
        kind: its type.
        remedy: what to do about a damaged file.

    Raises:
        RunError: the file is damaged.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        wrong = misfit(value, kind)
    except (ValueError, RecursionError):
        wrong = "it is empty or not JSON"
    if wrong:
        raise RunError(f"{path} is damaged ({wrong}): {remedy}")
    return value


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
