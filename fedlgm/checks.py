"""Checks of arguments: each refuses a value with one message that names it."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

from fedlgm.errors import ConfigError


def check_positive(owner: str = "", /, **values: Any) -> None:
    """Refuse values that are not finite numbers above zero.

    Args:
        owner: object that the values are arguments of, for the message.
        values: the values by name.

    Raises:
        ConfigError: another value is given.

    >>> check_positive(epsilon="8")
    Traceback (most recent call last):
        ...
    fedlgm.errors.ConfigError: epsilon must be finite and positive, got '8'
    """
    _check(owner, values, lambda number: 0 < number < math.inf, "be finite and positive")


def check_share(owner: str = "", /, **values: Any) -> None:
    """Refuse values outside (0, 1); arguments and errors as in `check_positive`."""
    _check(owner, values, lambda number: 0 < number < 1, "lie in (0, 1)")


def check_below_one(owner: str = "", /, **values: Any) -> None:
    """Refuse values outside [0, 1); arguments and errors as in `check_positive`."""
    _check(owner, values, lambda number: 0 <= number < 1, "lie in [0, 1)")


def check_rate(owner: str = "", /, **values: Any) -> None:
    """Refuse values outside (0, 1]; arguments and errors as in `check_positive`."""
    _check(owner, values, lambda number: 0 < number <= 1, "lie in (0, 1]")


def check_fraction(owner: str = "", /, **values: Any) -> None:
    """Refuse values outside [0, 1]; arguments and errors as in `check_positive`."""
    _check(owner, values, lambda number: 0 <= number <= 1, "lie in [0, 1]")


def _check(
    owner: str, values: Mapping[str, Any], fits: Callable[[float], bool], wanted: str
) -> None:
    for name, value in values.items():
        if not fits(_number(value)):
            raise ConfigError(f"{_of(owner)}{name} must {wanted}, got {value!r}")


def check_count(name: str, value: Any, least: int = 1) -> int:
    """Refuse a value that is not a whole number of at least `least`.

    Args:
        name: the argument's name, for the message.
        value: the given value; a float without a fraction counts as a whole number.
        least: smallest allowed value.

    Returns:
        The number.

    Raises:
        ConfigError: any other value.

    >>> check_count("rows", 1.5)
    Traceback (most recent call last):
        ...
    fedlgm.errors.ConfigError: rows must be a whole number of at least 1, got 1.5
    """
    number = _number(value)
    if not (number % 1 == 0 and number >= least):
        raise ConfigError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return int(number)


def check_known(what: str, value: Any, known: Any, owner: str = "") -> None:
    """Refuse a value that is not one of the known names.

    Args:
        what: name of the option.
        value: the value.
        known: the names, or a `Literal` of them.
        owner: beginning of the message.

    Raises:
        ConfigError: an unknown value.

    Example:
        >>> check_known("accountant", "pld", ["pld", "rdp"])
    """
    names = getattr(known, "__args__", None) or tuple(known)  # a Literal's; every plan asks
    if value not in names:
        raise ConfigError(f"{_of(owner)}unknown {what} {value!r}; known: {', '.join(names)}")


def _of(owner: str) -> str:
    return f"{owner}: " if owner else ""


def _number(value: Any) -> Any:
    """A number; NaN for anything else."""
    return value if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan
