"""Methods of a study, which are mechanisms as names, with a variant and options, or as objects."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedlgm import mechanisms
from fedlgm.errors import ConfigError
from fedlgm.mechanisms import Mechanism
from fedlgm.mechanisms.layerwise_gaussian import NoPrivacy
from fedlgm.privacy.guarantee import Unit
from simulations.config.recipe import Recipe

PLAIN: dict[Unit, tuple[str, ...]] = {
    "client": ("uniform", "gaussian"),
    "example": ("dp-sgd", "auto-s"),
}
"""Mechanisms with which a recipe's mechanism is compared by default, by unit."""

FORMS = {
    "mechanism": "an entry of grid['mechanism'] must be a name, 'name:variant', "
    "'package.module:Class', a mechanism or a class of mechanisms, or (label, one of these[, "
    "{option: value}])",
    "model": "an entry of grid['model'] must be a name, 'package.module:Class', a module, a class "
    "or function that makes one, or (label, one of these[, {option: value}])",
}
"""Accepted forms of an entry of a grid's list of mechanisms or models, by the grid's key."""


@dataclass(frozen=True)
class Method:
    """One entry of a study's mechanisms.

    Attributes:
        label: label of the entry in tables.
        name: name of the mechanism.
        variant: "sound", "published", or "" if the entry states none.
        changes: changes of the recipe by key; a key may be a mechanism option or any other key.
        mechanism: the object, if one was passed.
    """

    label: str
    name: str
    variant: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    mechanism: Mechanism | None = None

    @classmethod
    def of(cls, entry: Any) -> Method:
        """Parse an entry of a grid's mechanisms.

        Raises:
            ConfigError: the entry is malformed, or a mechanism, variant or option is unknown.

        Example:
            >>> Method.of(("small bound", "uniform", {"bound": 0.1})).changes
            {'mechanism.bound': 0.1}
            >>> Method.of(("plain", "gaussian")).label
            'plain'
        """
        label, what, given = parse_entry(entry, "mechanism")
        further = {key: value for key, value in given.items() if "." in key}  # keys of the recipe
        mechanism_options = {key: value for key, value in given.items() if "." not in key}
        if isinstance(what, type) and issubclass(what, Mechanism):
            what, mechanism_options = _build(what, mechanism_options), {}
        if isinstance(what, Mechanism):
            if mechanism_options:
                raise ConfigError(
                    f"{label!r}: a mechanism object takes no further options, got "
                    f"{sorted(mechanism_options)}"
                )
            name = what.name.strip("<>")
            return cls(label or _label(name, what.variant), name, what.variant, further, what)
        if not isinstance(what, str):
            raise ConfigError(f"{FORMS['mechanism']}; got {entry!r}")
        option_names = options(what)
        for key in mechanism_options:
            if key not in option_names:
                raise ConfigError(
                    f"{label!r}: {what} has no option {key!r}; its options: {', '.join(option_names)}"
                )
        changes = {f"mechanism.{key}": value for key, value in mechanism_options.items()} | further
        return cls(label or what, *mechanisms.split(what), changes)

    @property
    def options(self) -> tuple[str, ...]:
        """Names of the method's options in a recipe's [mechanism]; a mechanism object has no
        options.
        """
        return (
            ()
            if self.mechanism is not None
            else mechanisms.options(self.name, self.variant or "sound")
        )

    @property
    def private(self) -> bool:
        """Whether the method adds noise, so that a budget has an effect on it."""
        if self.mechanism is not None:
            return not isinstance(self.mechanism, NoPrivacy)
        return mechanisms.is_private(self.name)


def parse_entry(entry: Any, key: str) -> tuple[str | None, Any, Mapping[str, Any]]:
    """Divide an entry into its label, its object or name, and its options; the entry is a table of
    a study's file, a tuple, or an object or name without a label.

    Args:
        entry: an entry of the grid's `key`.
        key: "mechanism" or "model".

    Raises:
        ConfigError: the table has other keys, or the tuple is malformed.

    Example:
        >>> parse_entry({"label": "wide", "name": "mlp"}, "model"), parse_entry("mlp", "model")
        (('wide', 'mlp', {}), (None, 'mlp', {}))
    """
    if isinstance(entry, Mapping):
        if not {"label", "name"} <= entry.keys() <= {"label", "name", "options"}:
            raise ConfigError(
                f"a table in grid.{key} must have label, name and options, got {sorted(entry)}"
            )
        entry = entry["label"], entry["name"], entry.get("options", {})
    if not isinstance(entry, (tuple, list)):
        return None, entry, {}
    label, what, options = (
        (*entry, {}) if len(entry) == 2 else entry if len(entry) == 3 else (None, None, None)
    )
    if not isinstance(label, str) or not isinstance(options, Mapping):
        raise ConfigError(f"{FORMS[key]}; got {entry!r}")
    return label, what, options


def methods_of(entries: Iterable[Any]) -> list[Method]:
    """Parse the mechanisms of a study, whose labels must differ.

    Raises:
        ConfigError: two entries have the same label; or as in `Method.of`.
    """
    methods = [Method.of(entry) for entry in entries]
    for index, method in enumerate(methods):
        if method.label in [other.label for other in methods[:index]]:
            raise ConfigError(
                f"two mechanisms have the label {method.label!r}: label one of them, as (label, "
                f"{method.label!r}, "
                f"{{option: value}}) in Python or {{label = ..., name = {method.label!r}, options "
                f"= ...}} in a file"
            )
    return methods


def _build(kind: type[Mechanism], values: Mapping[str, Any]) -> Mechanism:
    """Make a mechanism of a user's class, named after the class if the class gives it no name."""
    unnamed = (
        next(field for field in dataclasses.fields(kind) if field.name == "name").default
        is dataclasses.MISSING
    )
    try:
        return kind(**({"name": kind.__name__} if unnamed else {}), **values)
    except TypeError as error:
        raise ConfigError(f"{kind.__name__}: {error}") from error


def options(method: str) -> tuple[str, ...]:
    """List the options of a mechanism, which may be named with a variant.

    Raises:
        ConfigError: the mechanism or variant is unknown.
    """
    name, variant = mechanisms.split(method)
    return mechanisms.options(name, variant or "sound")


def usual(recipe: Recipe) -> tuple[str, ...]:
    """List the recipe's mechanism, then the plain mechanisms for the recipe's unit.

    >>> from simulations.config import recipe as recipes
    >>> usual(recipes.load("digits")), usual(recipes.load("dp-sgd-digits"))
    (('snr-consistent', 'uniform', 'gaussian'), ('dp-sgd', 'auto-s'))
    """
    label = own_name(recipe)
    return (label, *(name for name in PLAIN[recipe.protects.mechanisms] if name != label))


def own_name(recipe: Recipe) -> str:
    """Name the recipe's mechanism, with its variant unless the variant is "sound"."""
    return _label(recipe.mechanism.name, recipe.mechanism.variant)


def _label(name: str, variant: str) -> str:
    return name if variant == "sound" else f"{name}:{variant}"
