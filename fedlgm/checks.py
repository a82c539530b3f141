"""Checks of arguments. A check refuses an invalid value with a message that names the argument."""

from __future__ import annotations

import math
import numbers
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from functools import cache, partial
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from fedlgm.errors import ConfigError


def check_positive(owner: str = "", /, **values: Any) -> None:
    """Refuse values that are not finite numbers above zero.

    Args:
        owner: name of the object whose arguments are checked, for the message.
        values: the values, by the names of the arguments.

    Raises:
        ConfigError: a value is not a finite number above zero.

    >>> check_positive(epsilon="8")
    Traceback (most recent call last):
        ...
    fedlgm.errors.ConfigError: epsilon must be finite and positive, got '8'
    """
    _check(owner, values, lambda number: 0 < number < math.inf, "be finite and positive")


def check_share(owner: str = "", /, **values: Any) -> None:
    """Refuse values outside (0, 1); arguments and errors are those of `check_positive`."""
    _check(owner, values, lambda number: 0 < number < 1, "lie in (0, 1)")


def check_below_one(owner: str = "", /, **values: Any) -> None:
    """Refuse values outside [0, 1); arguments and errors are those of `check_positive`."""
    _check(owner, values, lambda number: 0 <= number < 1, "lie in [0, 1)")


def check_rate(owner: str = "", /, **values: Any) -> None:
    """Refuse values outside (0, 1]; arguments and errors are those of `check_positive`."""
    _check(owner, values, lambda number: 0 < number <= 1, "lie in (0, 1]")


def check_fraction(owner: str = "", /, **values: Any) -> None:
    """Refuse values outside [0, 1]; arguments and errors are those of `check_positive`."""
    _check(owner, values, lambda number: 0 <= number <= 1, "lie in [0, 1]")


def check_non_negative(owner: str = "", /, **values: Any) -> None:
    """Refuse values that are not finite numbers of at least 0; see `check_positive`.

    Example:
        >>> check_non_negative(threshold=0.0)
    """
    _check(owner, values, lambda number: 0 <= number < math.inf, "be finite and at least 0")


def check_at_least_zero(owner: str = "", /, **values: Any) -> None:
    """Refuse values that are not numbers of at least 0. Infinity is allowed; see `check_positive`.

    Example:
        >>> check_at_least_zero(sigma=float("inf"))
    """
    _check(owner, values, lambda number: number >= 0, "be a number of at least 0")


def check_at_least_one(owner: str = "", /, **values: Any) -> None:
    """Refuse values that are not finite numbers of at least 1; see `check_positive`."""
    _check(owner, values, lambda number: 1 <= number < math.inf, "be finite and at least 1")


def _check(
    owner: str, values: Mapping[str, Any], fits: Callable[[float], bool], wanted: str
) -> None:
    for name, value in values.items():
        if not fits(_number(value)):
            raise ConfigError(f"{_of(owner)}{name} must {wanted}, got {value!r}")


def check_count(name: str, value: Any, least: int = 1, most: int | None = None) -> int:
    """Refuse a value that is not a whole number from `least` to `most`.

    Args:
        name: the argument's name, for the message.
        value: the given value; a float without a fraction counts as a whole number.
        least: smallest allowed value.
        most: largest allowed value; None sets no limit.

    Returns:
        The value as an `int`.

    Raises:
        ConfigError: the value is not such a number.

    >>> check_count("rows", 1.5)
    Traceback (most recent call last):
        ...
    fedlgm.errors.ConfigError: rows must be a whole number of at least 1, got 1.5
    """
    number = _number(value)
    if not (number % 1 == 0 and least <= number <= (math.inf if most is None else most)):
        limits = f" of at least {least}" if most is None else f", {least} to {most}"
        raise ConfigError(f"{name} must be a whole number{limits}, got {value!r}")
    return int(number)


def check_known(what: str, value: Any, known: Any, owner: str = "") -> None:
    """Refuse a value that is not one of the known names.

    Args:
        what: name of the option.
        value: the value.
        known: the known names, or a `Literal` that lists them.
        owner: see `check_positive`.

    Raises:
        ConfigError: the value is unknown.

    Example:
        >>> check_known("accountant", "pld", ["pld", "rdp"])
    """
    names = getattr(known, "__args__", None) or tuple(known)  # the names in a Literal
    if value not in names:
        raise ConfigError(f"{_of(owner)}unknown {what} {value!r}; known: {', '.join(names)}")


def check_counts(owner: str, /, *, least: int = 1, most: int | None = None, **values: Any) -> None:
    """Apply `check_count` to several values by name. `owner` is as in `check_positive`."""
    for name, value in values.items():
        check_count(f"{_of(owner)}{name}", value, least, most)


Positive = Annotated[float, check_positive]
Share = Annotated[float, check_share]
BelowOne = Annotated[float, check_below_one]
Rate = Annotated[float, check_rate]
Fraction = Annotated[float, check_fraction]
NonNegative = Annotated[float, check_non_negative]
AtLeastOne = Annotated[float, check_at_least_one]
Count = Annotated[int, check_counts]
Positives = Annotated[Sequence[float], check_positive]
NonNegatives = Annotated[Sequence[float], check_non_negative]


def check_fields(owner: str, record: Any) -> None:
    """Refuse an object of a dataclass if the value of a field does not fit the field's annotation.

    An annotation may be a plain type; a type of this module, such as `Positive`, which limits a
    number; or a `Literal`, which lists all choices. For an object of a user's class, the
    annotations of the class's nearest base class in this package apply.

    Args:
        owner: see `check_positive`.
        record: the object.

    Raises:
        ConfigError: a value does not fit its annotation.

    Example:
        >>> from fedlgm.mechanisms.mechanism import Bounded
        >>> Bounded("mine", bound=-1)
        Traceback (most recent call last):
            ...
        fedlgm.errors.ConfigError: mine: bound must be finite and positive, got -1
    """
    bundled = next(base for base in type(record).__mro__ if base.__module__.startswith("fedlgm."))
    values = {field.name: getattr(record, field.name) for field in fields(bundled)}
    check_annotated(owner, bundled, values)


def check_annotated(owner: str, kind: type, values: Mapping[str, Any]) -> None:
    """Refuse values that do not fit the annotations of a class's fields of the same names; see
    `check_fields`.

    Example:
        >>> from fedlgm.mechanisms.mechanism import Bounded
        >>> check_annotated("mine", Bounded, {"bound": "1"})
        Traceback (most recent call last):
            ...
        fedlgm.errors.ConfigError: mine: bound must be a number, got '1'
    """
    hints = _hints_of(kind)
    for name, value in values.items():
        _check_hint(owner, name, value, hints[name])


_hints_of: Callable[[type], dict[str, Any]] = cache(partial(get_type_hints, include_extras=True))
_PLAIN: dict[type, tuple[Callable[[Any], bool], str]] = {
    bool: (lambda value: isinstance(value, bool), "true or false"),
    int: (lambda value: _number(value) % 1 == 0, "a whole number"),
    float: (lambda value: _is_number(value), "a number"),
    str: (lambda value: isinstance(value, str), "a string"),
}


def _check_hint(owner: str, name: str, value: Any, hint: Any) -> None:
    """Check one value against its annotation. Annotations with types that no recipe can contain are
    ignored.
    """
    origin, parts = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        if value is not None or NoneType not in parts:
            _check_hint(owner, name, value, next(part for part in parts if part is not NoneType))
    elif origin is Annotated:
        _check_hint(owner, name, value, parts[0])
        for item in value if get_origin(parts[0]) is Sequence else (value,):
            hint.__metadata__[0](owner, **{name: item})
    elif origin is Literal:
        check_known(name, value, hint, owner)
    elif origin in (Sequence, tuple, list):
        fits, wanted = _PLAIN.get(parts[0], (lambda _: True, "a value"))
        is_list = hasattr(value, "__len__") and not isinstance(value, str | Mapping)
        if not (is_list and all(map(fits, value))):
            items = f"{wanted.removeprefix('a ')}s"
            raise ConfigError(f"{_of(owner)}{name} must be a list of {items}, got {value!r}")
    elif hint in _PLAIN and not _PLAIN[hint][0](value):
        raise ConfigError(f"{_of(owner)}{name} must be {_PLAIN[hint][1]}, got {value!r}")


def _is_number(value: Any) -> bool:
    number = _number(value)
    return number is value and (
        not isinstance(value, numbers.Rational) or abs(number) <= sys.float_info.max
    )


def _of(owner: str) -> str:
    return f"{owner}: " if owner else ""


def _number(value: Any) -> Any:
    """Return a number unchanged, and NaN for any other value."""
    return value if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
