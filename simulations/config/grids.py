"""Values to try, by recipe key, from the command line or from lists of Python values."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from fedlgm.errors import ConfigError


def parse_grid(texts: Iterable[str], option: str = "--grid") -> dict[str, list[Any]]:
    """A grid from the command line's "key=v1,v2" texts.

    Args:
        texts: one text for each key.
        option: the command's option, for messages.

    Raises:
        ConfigError: a string is malformed, or a key is given twice.

    Example:
        >>> parse_grid(["mechanism=uniform,ladp:published", "privacy.epsilon=8,2", "model.hidden=[8],[16, 8]"])
        {'mechanism': ['uniform', 'ladp:published'], 'privacy.epsilon': [8, 2], 'model.hidden': [[8], [16, 8]]}
    """
    grid: dict[str, list[Any]] = {}
    for text in texts:
        key, equals, values = (part.strip(" ,") for part in text.partition("="))
        if not equals or not key or not values:
            raise ConfigError(f"{option} takes key=value,value, got {text!r}")
        if key in grid:
            raise ConfigError(f"{option} has {key} twice: put all of its values into one list")
        try:
            grid[key] = tomllib.loads(f"values = [{values}]")["values"]
        except (ValueError, RecursionError):
            grid[key] = [_single(part.strip()) for part in values.split(",") if part.strip()]
    return grid


def _single(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def values_to_try(name: str, values: Any, least: int = 1) -> list[Any]:
    """The values to try. NumPy's numbers become Python's numbers, because TOML holds no others.

    Args:
        name: name of the values' key, for the message.
        values: any iterable except a string or a mapping.
        least: least number of values.

    Raises:
        ConfigError: the values are not a list, or there are too few.

    Example:
        >>> values_to_try("search['training.lr']", (0.1, 0.5))
        [0.1, 0.5]
    """
    several = isinstance(values, Iterable) and not isinstance(values, (str, Mapping))
    candidates = list(values) if several else []
    if len(candidates) < least:
        wanted = "a list of values" if least == 1 else f"a list of at least {least} values"
        raise ConfigError(f"{name} must be {wanted}, got {values!r}")
    return [value.item() if hasattr(value, "item") else value for value in candidates]
