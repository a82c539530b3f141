"""Registries of the objects that a recipe can name: bundled objects, users' registered objects, and
references.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Generic, TypeVar

from fedlgm.errors import ConfigError
from fedlgm.extension.loader import OWN, is_reference, load_object, misfit, object_name
from fedlgm.extension.registration import is_repeating, module_of
from fedlgm.wording import alternatives, with_article

T = TypeVar("T")


class Registry(Generic[T]):
    """The objects of one kind, by name.

    Args:
        what: name of the kind in messages, such as "engine".
        items: the library's objects by name. An item may be a string "package.module:name", which
            `find` imports.
        others: descriptions of other values that a recipe may have, for the message about an
            unknown name.

    Example:
        >>> import math
        >>> functions = Registry("function", {"root": math.sqrt, "power": "math:pow"})
        >>> functions.add("log", math.log)
        >>> functions.names(), "sine" in functions
        (('root', 'power', 'log'), False)
        >>> functions.find("root")(9.0), functions.find("power")(2, 3), functions.find("math:sin")(0.0)
        (3.0, 8.0, 0.0)
        >>> functions.find("rot")
        Traceback (most recent call last):
        fedlgm.errors.ConfigError: unknown function 'rot'; did you mean 'root'?
    """

    def __init__(self, what: str, items: Mapping[str, T | str] | None = None, *others: str) -> None:
        self._what, self._items, self._others = what, dict(items or {}), others

    def names(self) -> tuple[str, ...]:
        """Return all names, in the order of registration."""
        return tuple(self._items)

    def __contains__(self, name: object) -> bool:
        """Whether an object is registered under this name; False for references."""
        return isinstance(name, str) and name in self._items

    def items(self) -> tuple[tuple[str, T | str], ...]:
        """Return all names with their objects, or with references that `find` would import."""
        return tuple(self._items.items())

    def check_free(self, name: str, item: Any) -> None:
        """Refuse a name that belongs to another object. A later definition of the same class or
        function, as in a notebook, is accepted.

        Raises:
            ConfigError: the name is taken, or is not a string.
        """
        if not isinstance(name, str):
            raise ConfigError(
                f"the name of {with_article(self._what)} must be a string, got {name!r}"
            )
        if name not in self._items or is_repeating():
            return
        before = self._items[name]
        if before != item and _place(before) != _place(item):
            raise ConfigError(
                f"there is {with_article(self._what)} {name!r} already: choose another name"
            )

    def add(self, name: str, item: T | str) -> None:
        """Register an object, or a later definition of it.

        Raises:
            ConfigError: see `check_free`.
        """
        self.check_free(name, item)
        self._items[name] = item

    def find(self, name: Any) -> Any:
        """Return the object that a recipe's value names: a registered object, or an object to which
        the value refers.

        Args:
            name: one of `names()`, or "package.module:name".

        Raises:
            ConfigError: the name is unknown, an object is given instead of a name, or `load_object`
                fails.
        """
        if name in self:
            item = self._items[name]
            return load_object(item, self._what) if isinstance(item, str) else item
        if is_reference(name):
            return load_object(name, self._what)
        if callable(name):
            raise ConfigError(
                f"{self._what} {object_name(name)!r} is an object: register it and pass its name"
            )
        raise ConfigError(
            f"unknown {self._what} {name!r}; {alternatives(name, self._items, *self._others, OWN)}"
        )

    def find_function(self, name: str, form: str, *arguments: Any) -> Any:
        """Return the function that a recipe's value names.

        Args:
            name: see `find`.
            form: the function's arguments and result, for the message.
            arguments: arguments that the function must take.

        Raises:
            ConfigError: the object is not such a function, or `find` fails.

        Example:
            >>> Registry("schedule").find_function("math:pi", "(round, rounds) -> factor", 1, 2)
            Traceback (most recent call last):
            fedlgm.errors.ConfigError: schedule 'math:pi' must be a function (round, rounds) -> factor: it is ...
        """
        item = self.find(name)
        wrong = misfit(item, *arguments) if callable(item) else "it is not a function"
        if wrong:
            raise ConfigError(f"{self._what} {name!r} must be a function {form}: {wrong}")
        return item


def _place(item: Any) -> Any:
    """Return the module and name under which a registered class or function was defined; return the
    object itself if it has no such name.
    """
    if isinstance(item, Mapping):
        return {key: _place(value) for key, value in item.items()}
    if is_dataclass(item) and not isinstance(item, type):
        return [_place(getattr(item, field.name)) for field in fields(item)]
    name = getattr(item, "__qualname__", "<")  # "<lambda>" and "<locals>" do not identify an object
    return item if "<" in name else (module_of(item), name)
