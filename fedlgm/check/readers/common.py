"""Parts that all readers use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedlgm.check.report import Report, check
from fedlgm.check.settings import build_settings
from fedlgm.check.verdict import Verdict
from fedlgm.errors import ConfigError


def report(read: Mapping[str, Any], settings: Mapping[str, Any], *reading: Verdict) -> Report:
    """Report on what was read, with further settings in its place."""
    values = {name: value for name, value in read.items() if value is not None}
    if "rounds" in settings:
        values.pop("steps", None)
    return check(build_settings({**values, **settings}), *reading)


def attribute(thing: Any, name: str, owner: str) -> Any:
    """An attribute of an object.

    Raises:
        ConfigError: the object has none of this name.
    """
    try:
        return getattr(thing, name)
    except AttributeError:
        raise ConfigError(
            f"{owner} has no attribute {name!r}: got {type(thing).__name__}"
        ) from None
