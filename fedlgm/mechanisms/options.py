"""Options of a mechanism, checked against its annotations, with one message per wrong value."""

from __future__ import annotations

import dataclasses
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fedlgm.errors import ConfigError
from fedlgm.wording import alternatives

NOT_OPTIONS = frozenset({"name"})


def names(kind: type) -> tuple[str, ...]:
    """Option names of a mechanism's class: its dataclass fields without `name`."""
    return tuple(
        field.name
        for field in dataclasses.fields(kind)
        if field.name not in NOT_OPTIONS and field.init
    )


def check_values(owner: str, kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values, each of the type that the class declares.

    Raises:
        ConfigError: an option is unknown or a value has another type; the message names option and
            type.
    """
    options = names(kind)
    unknown = sorted(set(values) - set(options))
    if unknown:
        wrong = ", ".join(map(repr, unknown))
        raise ConfigError(
            f"mechanism {owner!r} has no option {wrong}; {alternatives(unknown[0], options)}"
        )
    hints = get_type_hints(kind)
    for option, value in values.items():
        problem = _problem(value, hints[option])
        if problem:
            choices = get_origin(hints[option]) is Literal
            prefix = (
                f"{owner}: unknown {option} {value!r}; known: "
                if choices
                else f"{owner}: {option} must be "
            )
            raise ConfigError(prefix + problem + ("" if choices else f", got {value!r}"))
    return {
        option: tuple(value) if isinstance(value, list) else value
        for option, value in values.items()
    }


def _problem(value: Any, hint: Any) -> str | None:
    """Description of type `hint` if `value` does not match it."""
    origin, arguments = get_origin(hint), get_args(hint)
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    number = number and (isinstance(value, float) or abs(value) <= sys.float_info.max)
    if origin is Literal:
        return None if value in arguments else ", ".join(map(str, arguments))
    if origin in (Union, types.UnionType):
        problems = [_problem(value, argument) for argument in arguments]
        return None if None in problems else " or ".join(p for p in problems if p)
    if hint is bool:
        return None if isinstance(value, bool) else "true or false"
    if hint is int:
        return None if number and value % 1 == 0 else "a whole number"
    if hint is float:
        return None if number else "a number"
    if hint is str:
        return None if isinstance(value, str) else "a string"
    if hint is type(None):
        return None if value is None else "left out"
    if origin in (Sequence, tuple, list):
        items = isinstance(value, (list, tuple)) and all(
            _problem(item, arguments[0]) is None for item in value
        )
        what = {float: "numbers", int: "whole numbers", str: "strings"}.get(arguments[0], "values")
        return None if items else f"a list of {what}"
    return None  # an object that only Python code can pass
