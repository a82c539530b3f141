"""The runs of a comparison: which there are, what each does, and the keys of its noise."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from fedlgm import mechanisms
from fedlgm.errors import ConfigError
from fedlgm.keys import KeyRing
from simulations.compare.methods import named, options, usual
from simulations.config import recipe as recipes
from simulations.config.recipe import Recipe

_OWN_KEYS = ("name", "variant", "group_by")
_COMMON = {  # what tells the runs of a comparison apart, and the option that sets it
    "name": "--out",
    "mechanism.name": "--methods",
    "mechanism.variant": "--methods",
    "privacy.epsilon": "--epsilon",
    "data.partition": "--partition",
    "run.seed": "--seeds and run.seed of all methods",
    "model.seed": "--seeds and run.seed of all methods",
}
_NAMING = ("mechanism.name", "mechanism.variant")


@dataclass(frozen=True)
class Job:
    """One run of a set.

    Attributes:
        method: "mechanism", "mechanism:variant" or "package.module:Class".
        epsilon: budget; None for runs without privacy, which no budget changes.
        partition: partition scheme.
        repetition: number of the repetition, from 0.
        recipe: everything that the run does.
    """

    method: str
    epsilon: float | None
    partition: str
    repetition: int
    recipe: Recipe

    @property
    def folder(self) -> str:
        """Name of the run's folder."""
        return self.recipe.name


def jobs(
    recipe: str | None,
    methods: Sequence[str] | None,
    seeds: int,
    overrides: Iterable[str] = (),
    epsilons: Sequence[float] = (),
    partitions: Sequence[str] = (),
) -> list[Job]:
    """Every run of a set, the first method's first.

    Args:
        recipe: bundled name or path; its mechanism section gives options to every method that knows them.
        methods: "mechanism", "mechanism:variant" or "package.module:Class"; None compares the recipe's own mechanism
            with plain ones, see `simulations.compare.methods.usual`.
        seeds: repetitions of each method. With a seed in the recipe a run's keys are derived from it and from all that
            the run does; without one they come from the operating system. Repetitions of all methods start from the
            same initial models, which are public.
        overrides: "section.key=value" for all methods, "METHOD/section.key=value" for one of them. Keys of [mechanism]
            reach the methods that have such an option.
        epsilons: budgets; the recipe's own if empty.
        partitions: partition schemes; the recipe's own if empty. Other schemes take the options that they know.

    Raises:
        ConfigError: an unknown method, key or value.
    """
    if methods is not None and (not methods or len(set(methods)) != len(methods)):
        raise ConfigError(f"--methods takes different mechanisms, got {', '.join(methods) or 'none'}")
    if seeds < 1:
        raise ConfigError(f"--seeds must be at least 1, got {seeds}")
    given = list(overrides)
    if methods is None:
        whole = recipes.load(recipe, [text for text in given if "/" not in _key(text)])
        methods, given = usual(whole), [text for text in given if _key(text) not in _NAMING]
        base, (_, mechanism, own) = whole, _sorted_overrides(methods, given)
    else:
        common, mechanism, own = _sorted_overrides(methods, given)
        base = recipes.load(recipe, common)
    known = {m: {*_OWN_KEYS, *options(m)} for m in methods}
    for text in mechanism:
        option = text.partition("=")[0].removeprefix("mechanism.").strip()
        if not any(option in options for options in known.values()):
            raise ConfigError(f"--set {text}: none of {', '.join(methods)} has the option {option}")
    made = []
    for method in methods:
        # A value that is given twice is one cell, not twice as many seeds.
        budgets: tuple[float | None, ...] = tuple(dict.fromkeys(epsilons)) or (base.privacy.epsilon,)
        for epsilon in budgets if mechanisms.is_private(named(method)[0]) else (None,):
            for partition in tuple(dict.fromkeys(partitions)) or (base.data.partition,):
                for repetition in range(seeds):
                    raw = _raw(base, method, known[method], mechanism)
                    recipes.override(raw, own[method])
                    if epsilon is not None:
                        raw["privacy"]["epsilon"] = epsilon
                    recipes.override(raw, [f"data.partition={partition}"])
                    raw["model"].setdefault("seed", (base.run.seed or 0) + repetition)
                    budget = "" if epsilon is None else f"-eps{epsilon:g}"
                    # A dotted name of a user's own mechanism or partitioner may hold characters that folders may not.
                    words = f"{method}{budget}-{partition}".replace(":", "-").replace("/", "-")
                    raw["name"] = f"{words}-run{repetition}"
                    if base.run.seed is not None:
                        raw["run"]["seed"] = derived_seed(base.run.seed, raw, repetition)
                    made.append(Job(method, epsilon, partition, repetition, recipes.validate(raw)))
    return made


def derived_seed(seed: int, raw: dict[str, Any], repetition: int) -> int:
    """Seed of one run of a set: another one for every mechanism, option, budget, partition and repetition.

    Args:
        seed: the recipe's.
        raw: the run's plain values.
        repetition: number of the repetition.
    """
    facts = {section: values for section, values in raw.items() if section not in ("run", "name", "title")}
    return KeyRing.from_seed(seed).derive(json.dumps(facts, sort_keys=True).encode(), str(repetition).encode()).root


def _raw(base: Recipe, method: str, known: set[str], overrides: list[str]) -> dict[str, Any]:
    """The base recipe with another mechanism, which keeps the options it knows."""
    raw = base.model_dump(exclude_none=True)
    name, variant = named(method)
    own = [text for text in overrides if text.partition("=")[0].removeprefix("mechanism.").strip() in known]
    recipes.override(raw, [f"mechanism.name={name}", f"mechanism.variant={variant or 'sound'}", *own])
    if not variant:
        raw["mechanism"].pop("variant")  # seeds are derived from what a method says
    if name == "none" and raw["run"].get("audit"):
        raw["run"]["audit"] = False  # there is no noise to audit
    return raw


def _key(text: str) -> str:
    return text.partition("=")[0].strip()


def _sorted_overrides(
    methods: Sequence[str], overrides: Iterable[str]
) -> tuple[list[str], list[str], dict[str, list[str]]]:
    """Overrides for everything, for the mechanism sections of all methods, and for single methods."""
    common: list[str] = []
    mechanism: list[str] = []
    own: dict[str, list[str]] = {method: [] for method in methods}
    for text in overrides:
        key = _key(text)
        method, slash, _ = key.partition("/")
        single = text.removeprefix(f"{method}/") if slash else text
        if slash and method not in own:
            raise ConfigError(f"--set {text}: {method!r} is not among the methods {', '.join(methods)}")
        option = _COMMON.get(_key(single)) if slash or key in ("name", *_NAMING) else None
        if option is not None:
            raise ConfigError(f"--set {text}: the runs of a comparison are named by it, so it comes from {option}")
        if slash:
            own[method].append(single)
        else:
            (mechanism if key.startswith("mechanism.") else common).append(text)
    return common, mechanism, own
