"""Functions that all readers use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedlgm.check.report import Report, check
from fedlgm.check.settings import build_settings
from fedlgm.check.verdict import Verdict
from fedlgm.errors import ConfigError

_LENGTH, _CLAIM = {"epochs", "steps"}, {"epsilon", "stated_for", "accountant"}


def report(
    facts: Mapping[str, Any],
    settings: Mapping[str, Any],
    *reading: Verdict,
    assumed: Mapping[str, Any] | None = None,
) -> Report:
    """Make the report on a run from what was read and from further settings.

    Args:
        facts: what was read, by name; None stands for what is not known. A further setting may not
            contradict a fact.
        settings: further settings.
        reading: verdicts on what could not be read.
        assumed: what the framework does by default; each value holds unless a fact or a further
            setting replaces it. If the number of epochs or of steps is given, no assumed value for
            either is used. If an epsilon is given, no assumed value about epsilon is used.

    Raises:
        ConfigError: a setting contradicts a fact, or cannot be used.
    """
    assumed = dict(assumed or {})
    stated = join(facts, settings)
    for group, name in ((_LENGTH, _LENGTH), (_CLAIM, {"epsilon"})):
        if name & set(stated):
            assumed = {key: value for key, value in assumed.items() if key not in group}
    known = {name: value for name, value in assumed.items() if value is not None}
    return check(build_settings({**known, **stated}), *reading)


def join(facts: Mapping[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Join facts and further settings, which may repeat facts but not contradict them.

    Raises:
        ConfigError: a setting is given under two names, or a further setting contradicts a fact.

    Example:
        >>> join({"steps": 3, "epochs": None}, {"rounds": 3, "delta": 1e-5})
        {'steps': 3, 'delta': 1e-05}
    """
    values: dict[str, Any] = {}
    for source in (facts, settings):
        if {"rounds", "steps"} <= set(source):
            raise ConfigError("rounds and steps are two names of one setting: give one of them")
        for key, value in source.items():
            name = "steps" if key == "rounds" else key
            if value is None and source is facts:
                continue
            if name in values and values[name] != value:
                raise ConfigError(
                    f"{name} is {values[name]!r} in what was read, and {value!r} in the further "
                    "settings: leave out the wrong one"
                )
            values[name] = value
    return values


def attribute(thing: Any, name: str, owner: str) -> Any:
    """Return an attribute of an object.

    Raises:
        ConfigError: the object has no attribute of this name.
    """
    try:
        return getattr(thing, name)
    except AttributeError:
        raise ConfigError(
            f"{owner} has no attribute {name!r}: got {type(thing).__name__}"
        ) from None
