"""Names for users' objects, in this process and in those that make a run's objects again."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from functools import wraps
from typing import Any, TypeVar

from fedlgm.errors import ConfigError, with_article
from fedlgm.package_conflicts import PACKAGES

F = TypeVar("F", bound=Callable[..., Any])
Call = tuple[str, str, Mapping[str, Any]]
"""One registration: module and name of the function, and its arguments."""

_calls: dict[tuple[str, str], Call] = {}
_repeating: ContextVar[bool] = ContextVar("repeating", default=False)


def enter(known: dict[str, Any], name: str, made: Any, what: str) -> None:
    """Register an object under a new name, or again after its class or function was defined again,
    as in a notebook.

    Raises:
        ConfigError: the name belongs to another object.
    """
    if not isinstance(name, str):
        raise ConfigError(f"the name of {with_article(what)} must be a string, got {name!r}")
    same = name not in known or known[name] == made or _place(known[name]) == _place(made)
    if not same and not _repeating.get():
        raise ConfigError(f"there is {with_article(what)} {name!r} already: choose another name")
    known[name] = made


def registers(function: F) -> F:
    """Record the calls of a function that registers users' objects, for `registrations` and
    `repeat`.
    """
    signature = inspect.signature(function)

    @wraps(function)
    def call_and_record(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        given = signature.bind(*arguments, **options).arguments
        if any(_is_users(value) for value in given.values()):
            first = next(iter(given.values()))
            _calls[function.__module__, getattr(first, "name", first)] = (
                function.__module__,
                function.__name__,
                given,
            )
        return result

    return call_and_record  # type: ignore[return-value]


def registrations() -> tuple[Call, ...]:
    """The registrations of users' objects in this process."""
    return tuple(_calls.values())


def repeat(calls: Iterable[Call]) -> None:
    """Make the registrations of another process in this one, again for each of its messages.

    A function without a name, or from a notebook, arrives as a new object each time and takes its
    name again.
    """
    before = _repeating.set(True)
    try:
        for module, name, given in calls:
            getattr(importlib.import_module(module), name)(**given)
    finally:
        _repeating.reset(before)


def _is_users(value: Any) -> bool:
    """Whether a registered object was defined outside these packages; names and None were not."""
    return not isinstance(value, str | None) and _module(value).partition(".")[0] not in PACKAGES


def _module(value: Any) -> str:
    return getattr(value, "__module__", None) or type(value).__module__


def _place(item: Any) -> Any:
    """Module and name under which a registered class or function was defined; the object if it has
    no such place.
    """
    if isinstance(item, Mapping):
        return {key: _place(value) for key, value in item.items()}
    if is_dataclass(item) and not isinstance(item, type):
        return [_place(getattr(item, field.name)) for field in fields(item)]
    name = getattr(item, "__qualname__", "<")
    return (
        item if "<" in name else (_module(item), name)
    )  # "<lambda>" and "<locals>" do not tell objects apart
