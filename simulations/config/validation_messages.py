"""Messages for wrong values in a recipe, with key, problem and remedy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from fedlgm import data, mechanisms
from fedlgm.errors import ConfigError
from fedlgm.training import kinds, models, tasks
from fedlgm.wording import FOREIGN, describe_problem, prefix_key
from simulations.config.named_sections import (
    Data,
    MechanismSection,
    Model,
    TaskSection,
    TrainerSection,
)

SECTIONS: dict[str, type[BaseModel]] = {
    "mechanism": MechanismSection,
    "model": Model,
    "task": TaskSection,
    "trainer": TrainerSection,
    "data": Data,
}
OPTIONS: dict[str, Callable[[str], Iterable[str]]] = {
    "mechanism": mechanisms.options,
    "model": models.options,
    "task": tasks.options,
    "trainer": kinds.options_of,
    "data": data.scheme_options,
}


@contextmanager
def in_section(section: str, name: str, path: str = "") -> Iterator[None]:
    """Prefix a ConfigError's message with its key in a section that names an object.

    Args:
        section: "mechanism", "model", "task", "trainer" or "data".
        name: the named object; for "data" the partition scheme, to which the section's options
            belong.
        path: key for a message that does not begin with one; default: the section.
    """

    def keys() -> set[str]:
        options: Iterable[str] = ()
        with suppress(ConfigError):
            options = OPTIONS[section](name)
        return {*SECTIONS[section].model_fields, *options}

    with prefix_key(path or section, name, keys):
        yield


def section_kind(field: FieldInfo) -> type[BaseModel] | None:
    """The model of a recipe's section, which may be missing; None for plain keys."""
    kinds = (field.annotation, *get_args(field.annotation))
    return next(
        (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None
    )


_SAID = {  # for keys for which the checker has several messages, or a message that names no values
    ("training", "device"): "must be auto, cpu, cuda, cuda:N, mps or xpu",
    ("training", "compile"): "must be true, false or 'auto'",
    ("data", "pixels"): "must be two numbers, the lower one first, such as [0, 1]",
    ("run", "engine"): "is not a key of a recipe: use --engine NAME, or simulate(engine=NAME)",
}


def explain(raw: dict[str, Any], problems: Iterable[Any], whole: type[BaseModel]) -> str:
    """All mistakes in a recipe, one line each.

    Args:
        raw: its plain values.
        problems: pydantic's `ValidationError.errors()`.
        whole: the model of a recipe.
    """
    return "\n".join(dict.fromkeys(_explain(raw, item, whole) for item in problems))


def _explain(raw: dict[str, Any], item: Any, recipe_model: type[BaseModel]) -> str:
    place = item["loc"][:2]
    if place in _SAID:
        item = item | {
            "loc": place,
            "type": "value_error",
            "msg": _SAID[place],
            "input": raw[place[0]][place[1]],
        }
    if place == ("extends",):
        return "extends belongs in a recipe's file: name the other recipe directly, or write a file that extends it"
    kind = (
        section_kind(recipe_model.model_fields[place[0]])
        if len(place) > 1 and place[0] in recipe_model.model_fields
        else None
    )
    if (
        item["type"] == "extra_forbidden"
        and len(item["loc"]) < 3
        and (keys := keys_like(str(place[-1]), recipe_model))
    ):
        keys = [key for key in keys if key.startswith(f"{place[0]}.")] or keys
        return f"{'.'.join(map(str, place))}: unknown key; did you mean {' or '.join(map(repr, keys))}?"
    if (
        len(place) == 1
        and isinstance(item["input"], str)
        and (keys := keys_like(str(place[0]), recipe_model))
    ):
        return f"{place[0]}: is a section, not {item['input']!r}; did you mean {keys[0]!r}?"
    return describe_problem(item, (kind or recipe_model).model_fields)


def keys_like(name: str, whole: type[BaseModel]) -> list[str]:
    """Keys "section.key" of a recipe that a bare name may mean: `key`, `num_key`, `section_key` or
    `section`.

    Names that other libraries give to a key are known too.

    Args:
        name: the name as written.
        whole: the model of a recipe.
    """
    name = FOREIGN.get(name, name).removeprefix("num_")
    if name == "bound":
        return ["mechanism.bound"]
    kinds = {section: section_kind(field) for section, field in whole.model_fields.items()}
    return [
        f"{section}.{key}"
        for section, kind in kinds.items()
        for key in (kind.model_fields if kind else ())
        if (name == section if key == "name" else name in (key, f"{section}_{key}"))
    ]
