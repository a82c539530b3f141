"""The JSON schema of recipes."""

from __future__ import annotations

from typing import Any

from simulations.config.recipe import Recipe

_DRAFT = "https://json-schema.org/draft/2020-12/schema"


def recipe_schema() -> dict[str, Any]:
    """JSON schema of a recipe's file. No key is required, because a recipe may extend another.

    The schema knows keys, types and ranges; `fedlgm plan FILE` also checks how they fit together.

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
    return schema
