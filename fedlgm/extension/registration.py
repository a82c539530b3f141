"""Registrations of users' objects. The other processes of a run repeat these registrations before
they make the run's objects.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from functools import wraps
from typing import Any, TypeVar

from fedlgm.package_conflicts import PACKAGES

F = TypeVar("F", bound=Callable[..., Any])
Call = tuple[str, str, Mapping[str, Any]]
"""One registration: module and name of the function, and its arguments."""

_calls: dict[tuple[str, str], Call] = {}
_repeating: ContextVar[bool] = ContextVar("repeating", default=False)


def registers(function: F) -> F:
    """Decorate a function that registers users' objects, so that its calls are recorded for
    `registrations` and `repeat`.
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
    """Return the registrations of users' objects in this process."""
    return tuple(_calls.values())


def repeat(calls: Iterable[Call]) -> None:
    """Repeat in this process the registrations that another process has sent with a message.

    A function without a name, or from a notebook, arrives as a new object with every message. The
    new object replaces the old one under the registered name.
    """
    before = _repeating.set(True)
    try:
        for module, name, given in calls:
            getattr(importlib.import_module(module), name)(**given)
    finally:
        _repeating.reset(before)


def is_repeating() -> bool:
    """Whether this process is repeating the registrations of another process, which replace this
    process's registrations.
    """
    return _repeating.get()


def _is_users(value: Any) -> bool:
    """Whether a registered value is an object that was defined outside these packages; False for
    names and None.
    """
    return not isinstance(value, str | None) and module_of(value).partition(".")[0] not in PACKAGES


def module_of(value: Any) -> str:
    """Return the module in which a class or function, or an object's class, is defined."""
    return getattr(value, "__module__", None) or type(value).__module__
