"""The runs of a study, with their recipes and noise keys."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from fedlgm.errors import ConfigError
from fedlgm.noise.keys import KeyRing
from fedlgm_lab.studies.methods import Method, methods_of, own_name, usual
from fedlgm_lab.studies.networks import Network, networks_of
from simulations.config import recipe as recipes
from simulations.config.fingerprints import object_digest
from simulations.config.grids import values_to_try
from simulations.config.overrides import Overrides, override, settings
from simulations.config.own import Own
from simulations.config.recipe import Recipe

_OWN_KEYS = ("name", "variant", "group_by")
# keys that distinguish the runs of a study -> how to set the key on the command line and in Python
_RESERVED = {
    "name": ("--out", "folder"),
    "mechanism.name": ("--methods", "grid={'mechanism': ...}"),
    "mechanism.variant": ("--methods", "grid={'mechanism': ...}"),
    "privacy.epsilon": ("--epsilon", "grid"),
    "data.partition": ("--partition", "grid"),
    "run.seed": ("--seeds and run.seed of all methods", "seeds and overrides"),
    "model.seed": ("--seeds and run.seed of all methods", "seeds and overrides"),
}
_NAMING = ("mechanism.name", "mechanism.variant")
_NO_AXIS = ("name", "title", *_NAMING, "run.seed", "model.seed")
_PLAIN_NAME = re.compile(r"[^\w.+=-]+")
_LONGEST = 100
MODEL = "model"
"""The key under which a grid lists models (see `fedlgm_lab.studies.networks`)."""


@dataclass(frozen=True)
class Job:
    """One run of a study.

    Attributes:
        method: label of the run's mechanism.
        repetition: number of the repetition, from 0.
        recipe: complete recipe of the run, or the study's own recipe if the run is refused.
        folder: name of the run's folder.
        point: the run's values of the grid's keys.
        own: the run's Python objects.
        refused: reason why the run cannot be started; empty if the run can be started.
    """

    method: str
    repetition: int
    recipe: Recipe
    folder: str
    point: Mapping[str, Any] = field(default_factory=dict)
    own: Own = Own()  # noqa: RUF009  (frozen)
    refused: str = ""


def jobs(
    recipe: str | None,
    methods: Sequence[str] | None,
    seeds: int,
    overrides: Iterable[str] = (),
    epsilons: Sequence[float] = (),
    partitions: Sequence[str] = (),
) -> list[Job]:
    """List the runs of a comparison, which is a study of methods, budgets and partitions.

    The runs of the first method come first.

    Args:
        recipe: name of a bundled recipe, or path of a recipe file. An option in its mechanism
            section applies to every method that has this option.
        methods: "mechanism", "mechanism:variant" or "package.module:Class"; None compares the
            recipe's own mechanism with plain ones (see `fedlgm_lab.studies.methods.usual`).
        seeds: repetitions of each method. If the recipe has a seed, a run's noise keys are derived
            from this seed and from all settings of the run; otherwise the operating system supplies
            them. In each repetition, all methods start from the same initial model, which is
            public.
        overrides: "section.key=value" for all methods, "METHOD/section.key=value" for one method.
            Keys of [mechanism] apply to the methods that have such an option.
        epsilons: budgets; the recipe's budget if empty.
        partitions: partition schemes; the recipe's scheme if empty. A scheme ignores the recipe's
            options that it does not have.

    Raises:
        ConfigError: a method, key or value is unknown.
    """
    if methods is not None and (not methods or len(set(methods)) != len(methods)):
        raise ConfigError(
            f"--methods takes different mechanisms, got {', '.join(methods) or 'none'}"
        )
    if seeds < 1:
        raise ConfigError(f"--seeds must be at least 1, got {seeds}")
    given = list(overrides)
    if methods is None:
        original = recipes.load(recipe, [text for text in given if "/" not in _key(text)])
        methods, given = usual(original), [text for text in given if _key(text) not in _NAMING]
        base, (_, mechanism, by_method) = original, _sorted_overrides(methods, given)
    else:
        common, mechanism, by_method = _sorted_overrides(methods, given)
        base = recipes.load(recipe, common)
    parsed_methods = [
        replace(method, changes=dict(settings(by_method[method.label])))
        for method in methods_of(methods)
    ]
    grid: dict[str, list[Any]] = {
        "privacy.epsilon": list(epsilons) or [base.privacy.epsilon],
        "data.partition": list(partitions) or [base.data.partition],
    }
    return plan_jobs(base, parsed_methods, grid, range(seeds), dict(settings(mechanism)))


def grid_jobs(
    base: Recipe,
    grid: Mapping[str, Any],
    seeds: Sequence[int],
    overrides: Overrides = (),
    own: Own = Own(),  # noqa: B008  (frozen)
) -> list[Job]:
    """List the runs of a study: every combination of a grid's values, repeated with every seed.

    The runs of the first mechanism come first.

    Args:
        base: the recipe, without the options that `overrides` gives to all mechanisms of the grid.
        grid: {"mechanism": entries, "model": entries, any recipe key: values}; without the key
            "mechanism" or "model", the recipe's mechanism or model is used.
        seeds: numbers of the repetitions.
        overrides: {"mechanism.option": value}, for every mechanism of the grid that has the option.
        own: objects of all runs.

    Raises:
        ConfigError: a key, mechanism or value is unknown, or a label occurs twice.
    """
    axes = {
        key: values_to_try(f"grid[{key!r}]", values)
        for key, values in grid.items()
        if key != "mechanism"
    }
    for key in axes:
        if not isinstance(key, str):
            raise ConfigError(
                f"grid[{key!r}]: a recipe has no such key; its keys are strings, such as "
                "'training.lr'"
            )
        if key in _NO_AXIS:
            named = _RESERVED[key][1] if key in _RESERVED else "overrides"
            raise ConfigError(
                f"grid[{key!r}]: the names of a study's runs hold this key, so set it with {named}"
            )
    networks = networks_of(axes.get(MODEL, ()))
    if networks:
        if own.model is not None:
            raise ConfigError("model: give it in the grid or as an argument, not in both")
        axes[MODEL] = list(networks)
    if "mechanism" in grid:
        if own.mechanism is not None:
            raise ConfigError("mechanism: give it in the grid or as an argument, not in both")
        methods = methods_of(values_to_try("grid['mechanism']", grid["mechanism"]))
    elif own.mechanism is not None:
        methods = [Method.of(own.mechanism)]
    else:
        section = base.mechanism
        methods = [Method(own_name(base), section.name, section.variant)]
    options = dict(settings(overrides))
    return plan_jobs(
        base, methods, axes, seeds, options, own, labelled="mechanism" in grid, networks=networks
    )


def plan_jobs(
    base: Recipe,
    methods: Sequence[Method],
    axes: Mapping[str, Sequence[Any]],
    seeds: Sequence[int],
    options: Mapping[str, Any],
    own: Own = Own(),  # noqa: B008  (frozen)
    labelled: bool = True,
    networks: Mapping[str, Network] = MappingProxyType({}),
) -> list[Job]:
    """Make a job for every combination of a method, a value on each axis and a repetition.

    If the recipe's rules refuse a run, its job holds the reason. If they refuse all runs, an error
    is raised.

    Args:
        base: the recipe of all runs.
        methods: result of `methods_of`.
        axes: values by recipe key. A budget or noise multiplier has no effect on a method without
            privacy. An option of [mechanism] has no effect on a method that lacks the option. A
            method that a key does not affect is run once per repetition, and not once for each
            value of the key.
        seeds: numbers of the repetitions.
        options: {"mechanism.option": value}, which apply to the methods that have the option.
        own: objects of all runs.
        labelled: whether "mechanism" is one of the grid's keys.
        networks: the models that the axis "model" names.

    Raises:
        ConfigError: an option fits no method, or every run is refused.
    """
    option_names = {method.label: {*_OWN_KEYS, *method.options} for method in methods}
    for key in (*options, *(key for key in axes if key.startswith("mechanism."))):
        option = key.removeprefix("mechanism.")
        if not any(option in names for names in option_names.values()):
            raise ConfigError(
                f"--set {key}: none of {', '.join(option_names)} has the option {option}"
            )
    # A value that is given twice would only repeat the same runs.
    distinct = {
        key: [v for i, v in enumerate(values) if v not in values[:i]]
        for key, values in axes.items()
    }
    runs: list[Job] = []
    why: ConfigError | None = None
    for method in methods:
        meant = [distinct[key] if _means(key, method, option_names) else (None,) for key in axes]
        for values in itertools.product(*meant):
            point = dict(zip(axes, values, strict=True))
            for repetition in seeds:
                shown = ({"mechanism": method.label} if labelled else {}) | point
                job = Job(method.label, repetition, base, _folder(method, point, repetition), shown)
                try:
                    runs.append(
                        _with_recipe(
                            job, method, option_names[method.label], point, options, own, networks
                        )
                    )
                except ConfigError as error:
                    why = why or error
                    runs.append(replace(job, refused=str(error)))
    if why is not None and all(job.refused for job in runs):
        raise why
    names = [job.folder for job in runs]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ConfigError(
            f"two runs of the study would have the folder {twice}: choose other labels"
        )
    return runs


def derived_seed(
    seed: int, raw: dict[str, Any], repetition: int, own: Mapping[str, str] | None = None
) -> int:
    """Derive the seed of one run, which differs for every mechanism, option, budget, partition and
    repetition.

    Args:
        seed: the recipe's seed.
        raw: the plain values of the run's recipe.
        repetition: number of the repetition.
        own: hashes of the Python objects of which the plain values hold only the names.
    """
    facts = {
        section: values
        for section, values in raw.items()
        if section not in ("run", "name", "title")
    }
    text = json.dumps(facts | ({"own objects": own} if own else {}), sort_keys=True)
    return KeyRing.from_seed(seed).derive(text.encode(), str(repetition).encode()).root


def _with_recipe(
    job: Job,
    method: Method,
    option_names: set[str],
    point: Mapping[str, Any],
    options: Mapping[str, Any],
    own: Own,
    networks: Mapping[str, Network],
) -> Job:
    """Complete a job by its recipe, which is made from the study's recipe, and by its objects."""
    base = job.recipe
    raw = _raw(
        base,
        method,
        {key: v for key, v in options.items() if key.removeprefix("mechanism.") in option_names},
    )
    if MODEL in point:
        own = networks[point[MODEL]].into(raw, own)
    override(raw, method.changes)
    override(
        raw, {key: value for key, value in point.items() if value is not None and key != MODEL}
    )
    raw["model"].setdefault("seed", (base.run.seed or 0) + job.repetition)
    raw["name"] = job.folder
    objects = {} if method.mechanism is None else {method.label: object_digest(method.mechanism)}
    if MODEL in point and own.model is not None:
        objects[MODEL] = point[MODEL]  # the recipe holds only the name of the model's class
    # a point of the grid with its own data has no seed
    if base.run.seed is not None and "seed" in raw["run"]:
        raw["run"]["seed"] = derived_seed(base.run.seed, raw, job.repetition, objects)
    used = own if method.mechanism is None else replace(own, mechanism=method.mechanism)
    return replace(job, recipe=recipes.Recipe.model_validate(raw), own=used)


def _raw(base: Recipe, method: Method, options: Mapping[str, Any]) -> dict[str, Any]:
    """Give the base recipe another mechanism, together with the options that this mechanism has."""
    raw = base.plain_values()
    if method.mechanism is not None:
        Own(mechanism=method.mechanism).into(raw)
    elif (method.name, method.variant) != (base.mechanism.name, base.mechanism.variant):
        naming = {"mechanism.name": method.name, "mechanism.variant": method.variant or "sound"}
        override(raw, naming | dict(options))
        if not method.variant:
            raw["mechanism"].pop(
                "variant"
            )  # seeds are derived only from the values that the method states
    else:
        override(raw, options)
    if method.name == "none" and raw["run"].get("audit"):
        raw["run"]["audit"] = False  # without noise, there is nothing to audit
    return raw


def _folder(method: Method, point: Mapping[str, Any], repetition: int) -> str:
    """Name a run's folder; the name is the same in every study that contains the run."""
    words = [method.label]
    for key, value in point.items():
        if value is not None:
            number = f"{value:g}" if isinstance(value, float) else str(value)
            word = {"privacy.epsilon": f"eps{number}", "data.partition": number}
            words.append(word.get(key, f"{key.rpartition('.')[2]}={number}"))
    full_name = "-".join(words)
    # a label, or the dotted name of a user's object, may hold characters that a folder's name may
    # not
    plain = full_name.replace(":", "-").replace("/", "-")
    name = _PLAIN_NAME.sub("-", plain)
    if name != plain or len(name) > _LONGEST:
        name = f"{name[:_LONGEST]}-{hashlib.sha256(full_name.encode()).hexdigest()[:8]}"
    return f"{name}-run{repetition}"


def _means(key: str, method: Method, option_names: Mapping[str, set[str]]) -> bool:
    """Tell whether a key of the grid has an effect on a method's runs."""
    if key in ("privacy.epsilon", "privacy.noise_multiplier"):
        return method.private
    return (
        not key.startswith("mechanism.")
        or key.removeprefix("mechanism.") in option_names[method.label]
    )


def _key(text: str) -> str:
    return text.partition("=")[0].strip()


def _sorted_overrides(
    methods: Sequence[str], overrides: Iterable[str]
) -> tuple[list[str], list[str], dict[str, list[str]]]:
    """Divide overrides into those for all runs, those for the mechanism sections of all methods,
    and those for single methods, by label.
    """
    common: list[str] = []
    mechanism: list[str] = []
    by_method: dict[str, list[str]] = {method: [] for method in methods}
    for text in overrides:
        key = _key(text)
        method, slash, _ = key.partition("/")
        single = text.removeprefix(f"{method}/") if slash else text
        if slash and method not in by_method:
            raise ConfigError(
                f"--set {text}: {method!r} is not among the methods {', '.join(methods)}"
            )
        option = _RESERVED.get(_key(single)) if slash or key in ("name", *_NAMING) else None
        if option is not None:
            raise ConfigError(
                f"--set {text}: the names of a comparison's runs hold this key, so set it with "
                f"{option[0]}"
            )
        if slash:
            by_method[method].append(single)
        else:
            (mechanism if key.startswith("mechanism.") else common).append(text)
    return common, mechanism, by_method
