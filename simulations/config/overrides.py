"""Changes of a recipe's plain values, from the command line or from Python values."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from fedlgm import mechanisms
from fedlgm.errors import ConfigError
from simulations.config import public_seed
from simulations.config.named_sections import READING
from simulations.config.validation_messages import OPTIONS, SECTIONS

Overrides = Iterable[str] | Mapping[str, Any]
"""Changes of a recipe's values: "section.key=value" strings, or {"section.key": value}."""

_REPLACING = {
    "federation": frozenset({"rate", "cohort", "participations"}),
    "privacy": frozenset({"epsilon", "noise_multiplier"}),
}
"""Keys of a section that replace each other."""
_NAMING = {
    "mechanism": "name",
    "model": "name",
    "task": "name",
    "trainer": "name",
    "data": "partition",
}
_TAKES_NONE = {*_NAMING.items(), ("statement", "searched")}
"""Keys for which "none" is a value: a mechanism of this name, or the statement that there was no
search.
"""


def override(raw: dict[str, Any], texts: Overrides) -> None:
    """Set values in a recipe's plain values.

    If the mechanism, the variant or the partition scheme changes, options that the new choice does
    not have are removed. If the model changes, all keys of [model] except `seed` are removed.
    `rate`, `cohort` and `participations` of [federation] replace each other, and so do `epsilon`
    and `noise_multiplier` of [privacy]. The title is removed if keys outside [run] change, because
    it describes the recipe as written. A bundled recipe's seed is removed with its published data
    (see `public_seed.drop`).

    Args:
        raw: changed in place.
        texts: "section.key=value" with a TOML value, or "key=value" at the top; a value that is not
            TOML is a string. "section.key=none" removes a value, so that the default holds;
            mechanism.name=none is a mechanism, and statement.searched=none says that there was no
            search. Or a mapping {"section.key": value}, in which None removes a value.

    Raises:
        ConfigError: a string is malformed, or a value replaces a section.

    Example:
        >>> from simulations.config.recipe import read
        >>> raw = read("digits")
        >>> override(raw, ["privacy.epsilon=2", "mechanism.name=gaussian"])
        >>> raw["privacy"]["epsilon"], raw["mechanism"]["name"]
        (2, 'gaussian')
    """
    layer: dict[str, Any] = {}
    for path, value in settings(texts):
        section, *keys = path.split(".")
        if not section or len(keys) > 1 or not all(keys):
            raise ConfigError(
                f"--set and overrides take section.key=value, got {path!r}{_table(path)}"
            )
        if not keys:
            raw.pop(section, None)
            layer[section] = value
        elif isinstance((raw | layer).get(section, {}), dict | None):
            layer[section] = (layer.get(section) or {}) | {keys[0]: value}
        else:
            raise ConfigError(f"--set {path!r}: {section} is not a section")
    lay_over(raw, layer)


def lay_over(raw: dict[str, Any], layer: Mapping[str, Any]) -> None:
    """Lay the values of a later source over a recipe's plain values; see `override`. The source is
    a file that extends the recipe, or overrides.

    Args:
        raw: changed in place.
        layer: sections and values of the later source; None removes a value.
    """
    if layer.keys() - {"name", "run"}:
        raw.pop("title", None)  # the title described the recipe before the changes
    for section, value in layer.items():
        below = raw.pop(section, {})
        if isinstance(value, dict) and isinstance(below, dict):
            raw[section] = _merge(section, below, value)
        elif value is not None:
            raw[section] = value
    public_seed.drop(raw)


def settings(overrides: Overrides) -> Iterator[tuple[str, Any]]:
    """(path, value) of each override; the value None removes the key.

    Raises:
        ConfigError: an override has no path, or is not a string.

    Example:
        >>> list(settings(["privacy.epsilon=2", "run.seed=none"]))
        [('privacy.epsilon', 2), ('run.seed', None)]
    """
    if isinstance(overrides, Mapping):
        for path, value in overrides.items():
            if not isinstance(path, str):
                raise ConfigError(f"overrides map 'section.key' to a value, got the key {path!r}")
            if isinstance(value, Mapping) and "." not in path:
                keys = ", ".join(f"'{path}.{key}': {item!r}" for key, item in value.items())
                raise ConfigError(
                    f"overrides name a key by its section, without nesting: {{{keys}}}"
                )
            yield path.strip(), value
        return
    if isinstance(overrides, str) or not isinstance(overrides, Iterable):
        kind = type(overrides).__name__
        raise ConfigError(
            f"overrides must be a list of 'section.key=value' strings or a mapping, got {kind}: "
            f"{overrides!r}"
        )
    for text in overrides:
        if not isinstance(text, str):
            raise ConfigError(
                "overrides must be a list of 'section.key=value' strings or a mapping, got "
                f"{text!r} in the list"
            )
        path, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not path:
            raise ConfigError(f"--set and overrides take section.key=value, got {text!r}")
        section, _, key = path.partition(".")
        if removes(section, key, value):
            yield path, None
            continue
        try:
            yield path, tomllib.loads(f"value = {value}")["value"]
        except (ValueError, RecursionError):
            # the value is not TOML, has thousands of digits, or has lists that are nested too
            # deeply
            yield path, value


def removes(section: str, key: str, value: Any) -> bool:
    """Whether a value removes its key, so that the default holds.

    Example:
        >>> removes("run", "seed", "none"), removes("mechanism", "name", "none")
        (True, False)
    """
    return bool(value == "none") and (section, key) not in _TAKES_NONE


def _merge(section: str, below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """A section's values, merged over the previous values. Options that only the previously named
    object has are dropped.
    """
    removed = {
        key
        for key, value in above.items()
        if value is None or (below and removes(section, key, value))
    }
    below = {key: value for key, value in below.items() if key not in removed}
    above = {key: value for key, value in above.items() if key not in removed}
    replaced = _REPLACING.get(section, frozenset())
    replaced = frozenset() if replaced.isdisjoint(above) else replaced
    base = {key: value for key, value in below.items() if key not in replaced}
    if section == "data" and above.get("name", below.get("name")) != below.get("name"):
        base.pop("pixels", None)  # other examples have another interval
        # The new set is not a part of the previous set.
        if not str(above["name"]).startswith(f"{str(below.get('name')).partition('/')[0]}/"):
            base = {key: value for key, value in base.items() if key not in READING}
    naming = _NAMING.get(section, "")
    name = above.get(naming, below.get(naming))
    variant = (
        above.get("variant", below.get("variant", "sound")) if section == "mechanism" else None
    )
    if section == "model" and name != below.get("name"):
        # `hidden` of another model may be a number
        base = {key: value for key, value in base.items() if key == "seed"}
    elif name != below.get(naming) or variant not in (None, below.get("variant", "sound")):
        with suppress(ConfigError):  # an unknown name is reported when the whole recipe is checked
            options = (
                OPTIONS[section](str(name))
                if variant is None
                else mechanisms.options(str(name), str(variant))
            )
            base = {
                key: value
                for key, value in base.items()
                if key in {*SECTIONS[section].model_fields, *options}
            }
    return base | above


def _table(path: str) -> str:
    """A hint for a path such as "section.key.entry", where the key holds a table: the override that
    sets the whole table.
    """
    section, _, rest = path.partition(".")
    key, _, entry = rest.partition(".")
    if not (section and key and entry):
        return ""
    return f"; a table is set as a whole: --set '{section}.{key}={{{entry} = VALUE}}'"
