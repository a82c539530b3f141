"""Arguments of the Python functions: a recipe from objects and overrides, and refusals of unknown
arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedlgm.data import DataSet
from fedlgm.data.division import needs_labels
from fedlgm.errors import ConfigError
from fedlgm.extension.loader import shown_name
from fedlgm.training.models.huggingface import instance_of, is_huggingface
from simulations.config import recipe as recipes
from simulations.config.overrides import Overrides, override, settings
from simulations.config.own import Own, few_sites, own_of
from simulations.config.recipe import Recipe
from simulations.config.run_data import RunData
from simulations.config.validation_messages import keys_like

_MEASURES = {
    "metrics": "{'auc': lambda outputs, targets: roc_auc_score(targets, outputs)}",
    "evaluate": "lambda round, module: {'norm': float(module.weight.norm())}",
}
_KEYS = {
    "noise": "privacy.noise",
    "partition": "data.partition",
    "server_optimizer": "federation.server_optimizer",
}
"""Keys of a recipe for arguments without a section."""
_COMPARED = ("mechanism", "model")
# an argument that only studies or only runs have -> its name in the other function
_FOLDERS = {"folder": "run_dir", "run_dir": "folder"}
LORA = "lora"
"""Recipe of a Hugging Face model, if none is named."""
_FIRST = ("run.seed",)  # the key that is meant if several sections have a key of this name


def apart(given: Mapping[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """The arguments that are names, as overrides of the recipe; and the arguments that are objects.

    Args:
        given: arguments of `simulate` that take names or objects.

    Raises:
        ConfigError: `metrics` or `evaluate`, which take functions, is a string.

    Example:
        >>> apart({"task": None, "mechanism": "uniform", "noise": "blt", "model": max})
        (['mechanism.name=uniform', 'privacy.noise=blt'], {'model': <built-in function max>})
    """
    for name, example in _MEASURES.items():
        if isinstance(given.get(name), str):
            raise ConfigError(f"{name} takes functions, such as {example}; got {given[name]!r}")
    texts = [
        f"{_KEYS.get(name, f'{name}.name')}={value}"
        for name, value in given.items()
        if isinstance(value, str)
    ]
    return texts, {
        name: value
        for name, value in given.items()
        if value is not None and not isinstance(value, str)
    }


def refuse_unknown(function: str, options: Mapping[str, Any], known: Sequence[str] = ()) -> None:
    """Refuse an unknown argument of a function, and name the recipe key of that name.

    Args:
        function: name of the function, for the message.
        options: arguments that the function does not have.
        known: names of the arguments that the function passes on.

    Raises:
        ConfigError: an argument is unknown.
    """
    for name, value in options.items():
        if name not in known:
            keys = sorted(keys_like(name, Recipe), key=lambda key: key not in _FIRST)
            hint = (
                f"; a recipe has the key {keys[0]}: overrides={{'{keys[0]}': {value!r}}}"
                if keys
                else ""
            )
            if function == "study" and name.removesuffix("s") in _COMPARED:
                hint = (
                    f"; a study varies it in its grid: grid={{'{name.removesuffix('s')}': [...]}}"
                )
            if name in _FOLDERS:
                hint = f"; did you mean {_FOLDERS[name]}?"
            raise ConfigError(f"{function} has no argument {name!r}{hint}")


def correlation_keys(noise: Any) -> dict[str, Any]:
    """Recipe keys of a correlation passed as an object. The recipe stores the whole correlation.

    Raises:
        ConfigError: the object is not a correlation.
    """
    if noise is None:
        return {}
    if not callable(getattr(noise, "to_dict", None)) or not hasattr(noise, "coefficients"):
        how = "; fedlgm.correlation.register gives a function a name" if callable(noise) else ""
        raise ConfigError(
            "noise must be a name such as 'banded', or a fedlgm.correlation.Correlation, got "
            f"{shown_name(noise)}{how}"
        )
    return {"privacy.noise": "given", "privacy.correlation": dict(noise.to_dict())}


def resolve(
    recipe: str | Path | Recipe | None, given: Mapping[str, Any], *changes: Overrides
) -> tuple[Recipe, Own]:
    """The recipe of a run, with the values of the recipes that it extends, and a user's objects.

    Values of later sources replace values of earlier sources. The order is: the recipe's file,
    arguments that are objects, arguments that are names, and the changes.

    Args:
        recipe: a recipe's name or file, or a `Recipe`. The default is `lora` for a Hugging Face
            model, or for a function that returns such a model. Otherwise the default is `digits`.
        given: arguments of `simulate` that take names or objects, and `noise`.
        changes: overrides, each in turn.

    Returns:
        The recipe, in which objects have their names, and the objects.

    Raises:
        ConfigError, DataError: an argument or a value of the recipe cannot be used.

    Example:
        >>> recipe, own = resolve("digits", {"mechanism": "uniform"}, ["privacy.epsilon=2"])
        >>> recipe.mechanism.name, recipe.privacy.epsilon, own.object_names()
        ('uniform', 2.0, [])
    """
    names, objects = apart(given)
    correlation, own = correlation_keys(objects.pop("noise", None)), own_of(objects)
    default = LORA if recipe is None and is_huggingface(instance_of(own.model)) else recipe
    raw = default.plain_values() if isinstance(default, Recipe) else recipes.read(default)
    if default is not recipe:
        # the recipe's task belongs to its own text; the model's head has another task
        raw.pop("task", None)
    own.into(raw)
    bundled = own.data is not None and (recipe is None or recipe in recipes.names())
    if bundled:
        raw["name"] = "own-data"  # a bundled recipe's name belongs to its public data
        if raw["data"]["partition"] == "natural":
            few_sites(raw)
    for change in (names, correlation, *changes):
        override(raw, change)
    resolved = recipes.Recipe.model_validate(raw)
    if bundled and isinstance(own.data, DataSet) and needs_labels(resolved.data.partition):
        chosen = any("data.partition" in dict(settings(change)) for change in (names, *changes))
        if not chosen and not RunData(resolved, own).task.labels(own.data.train_y):
            for change in (["data.partition=iid"], *changes):
                override(raw, change)  # the user's options of another partition are then refused
            resolved = recipes.Recipe.model_validate(raw)
    return resolved, own
