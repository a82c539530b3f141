"""The JSON schema of recipes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fedlgm import data, mechanisms
from fedlgm.training import kinds, models, tasks
from simulations.config import recipe as recipes
from simulations.config.recipe import Recipe
from simulations.config.validation_messages import OPTIONS, SECTIONS

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_NAMES: dict[str, Callable[[], Iterable[str]]] = {
    "mechanism": lambda: mechanisms.names(None),
    "model": models.names,
    "task": tasks.names,
    "trainer": kinds.names,
    "data": data.schemes,
}
"""Names whose options are known, by section."""


def recipe_schema() -> dict[str, Any]:
    """JSON schema of a recipe's file. No key is required, because a recipe may extend another.

    The schema knows keys, types and ranges, and the names of the options of all bundled and
    registered parts; `fedlgm plan FILE` also checks how they fit together.

    Example:
        >>> schema = recipe_schema()
        >>> schema["$defs"]["Privacy"]["properties"]["epsilon"]["exclusiveMinimum"]
        0
    """
    schema: dict[str, Any] = {"$schema": _DRAFT, **Recipe.model_json_schema()}
    schema["properties"]["extends"] = {
        "type": "string",
        "title": "Extends",
        "description": "bundled recipe or file whose values this one changes",
    }
    for section in (schema, *schema["$defs"].values()):
        section.pop("required", None)
    inherited = {
        section: _limit_options(section, schema["$defs"][kind.__name__])
        for section, kind in SECTIONS.items()
    }
    # A section without a name has the options of a bundled part, unless the recipe extends a file.
    schema["if"] = {"properties": {"extends": {"enum": list(recipes.names())}}}
    schema["then"] = {"properties": inherited}
    return schema


def _limit_options(section: str, schema: dict[str, Any]) -> dict[str, Any]:
    """Limit a section's further keys to the options of the part that it names, and return the
    limits of a section without a name.

    Args:
        section: name of the section.
        schema: its schema, changed in place.
    """
    key, fixed = "partition" if section == "data" else "name", schema["properties"]
    names_of: dict[tuple[str, ...], list[str]] = {}
    for name in _NAMES[section]():
        names_of.setdefault(tuple(sorted(OPTIONS[section](name))), []).append(name)
    schema["allOf"] = [
        {
            "if": {"properties": {key: {"enum": names}}, "required": [key]},
            "then": _only(fixed, options),
        }
        for options, names in names_of.items()
    ]
    known = {option for options in names_of for option in options}
    return {"anyOf": [{"required": [key]}, {"type": "null"}, _only(fixed, sorted(known))]}


def _only(fixed: Mapping[str, Any], options: Iterable[str]) -> dict[str, Any]:
    return {"properties": dict.fromkeys([*fixed, *options], True), "additionalProperties": False}
