"""Checks of a mechanism's options against the annotations of its class."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from fedlgm.checks import check_annotated
from fedlgm.errors import ConfigError
from fedlgm.wording import alternatives

NOT_OPTIONS = frozenset({"name"})


def names(kind: type) -> tuple[str, ...]:
    """Return the names of a mechanism's options, which are the dataclass fields of `kind` without
    `name`.
    """
    return tuple(
        field.name
        for field in dataclasses.fields(kind)
        if field.name not in NOT_OPTIONS and field.init
    )


def check_values(owner: str, kind: type, values: Mapping[str, Any]) -> dict[str, Any]:
    """Check that the values have the types that the class declares, and return them with lists
    converted to tuples.

    Raises:
        ConfigError: an option is unknown, or a value has the wrong type; the message names the
            option and the type.
    """
    options = names(kind)
    unknown = sorted(set(values) - set(options))
    if unknown:
        wrong = ", ".join(map(repr, unknown))
        raise ConfigError(
            f"mechanism {owner!r} has no option {wrong}; {alternatives(unknown[0], options)}"
        )
    check_annotated(owner, kind, values)
    return {
        option: tuple(value) if isinstance(value, list) else value
        for option, value in values.items()
    }
