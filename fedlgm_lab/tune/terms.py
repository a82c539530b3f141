"""The plan of a search: its candidates and its cost, which do not depend on the data."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from dp_accounting import dp_event

from fedlgm.errors import ConfigError
from fedlgm.planning import charging
from fedlgm.privacy.accounting import composed_epsilon
from fedlgm.privacy.events import encode, gaussian_event, repeat_event
from fedlgm.privacy.selection import Law, selection_event
from fedlgm_lab.tune.score import PrivateScore, Score, TestScore
from fedlgm_lab.tune.search_result import SearchTerms
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly
from simulations.config.decided import resolve_hardware
from simulations.config.grids import values_to_try
from simulations.config.overrides import override
from simulations.config.own import Own
from simulations.config.recipe import Recipe

MOST = 10_000
"""Largest number of combinations of a search."""
_FIXED = ("privacy", "run", "data", "task", "deployment", "risk", "name", "title")


@dataclass(frozen=True)
class Search:
    """A search that can be charged and run.

    Attributes:
        base: the varied recipe.
        candidates: one recipe for each combination, in the grid's order.
        settings: the searched values of each candidate.
        event: event of the search as a whole.
        score: score that compares its runs.
        terms: its public terms.
    """

    base: Recipe
    candidates: tuple[Recipe, ...]
    settings: tuple[dict[str, Any], ...]
    event: dp_event.DpEvent
    score: Score
    terms: SearchTerms

    @classmethod
    def of(
        cls,
        base: Recipe,
        grid: Mapping[str, Sequence[Any]],
        expected_runs: float,
        law: Law,
        own: Own,
        score_epsilon: float | None = None,
    ) -> Search:
        """Plan a search over all combinations of the grid's values; the arguments are those of
        `tune`.

        Raises:
            ConfigError: there is nothing to search, a key may not be searched or does not exist,
                candidates differ in cost, a run is not protected, or clients add the noise
                themselves.
        """
        combinations = _combinations(grid)
        _refuse(base)
        if own.mechanism is not None and any(key.startswith("mechanism.") for key in grid):
            raise ConfigError(
                "search: the mechanism is given as an object, so its options cannot be searched"
            )
        candidates, costs = [], {}
        for settings in combinations:
            raw = base.plain_values()
            override(raw, settings)
            candidate = resolve_hardware(recipes.Recipe.model_validate(raw))
            candidates.append(candidate)
            assembly = Assembly(candidate, own)
            assembly.check()  # refuses a recipe that cannot run, before anything is charged
            if assembly.data.spent is not None:
                raise ConfigError(
                    "tune: these data were standardised with private statistics, which a search "
                    "does not charge: use public figures"
                )
            costs[json.dumps(encode(run_event(assembly)))] = assembly
        if len({candidate.protects.division(candidate) for candidate in candidates}) > 1:
            raise ConfigError(
                f"search ({', '.join(grid)}): the runs divide the data differently, so they have "
                "no common unit of protection: leave out keys that change the division"
            )
        if len(costs) > 1:
            raise ConfigError(
                f"search ({', '.join(grid)}): the runs do not all cost the same, and their joint "
                "cost is proven only for runs of equal cost: leave out keys that change the noise "
                "or the number of releases"
            )
        ((_, assembly),) = costs.items()
        score: Score = TestScore(assembly.data.task)
        if score_epsilon is not None:
            score = PrivateScore.calibrated(assembly, score_epsilon)
        run, scored = run_event(assembly), score.events()
        event = selection_event(
            dp_event.ComposedDpEvent([run, *scored]) if scored else run, expected_runs, law
        )
        plan, delta = assembly.privacy.first_plan(), base.privacy.delta
        epsilon = composed_epsilon([(event, 1)], delta)
        predictable = base.run.seed is not None
        terms: SearchTerms = {
            "recipe": base.name,
            "search": {key: list(values) for key, values in grid.items()},
            "expected_runs": float(expected_runs),
            "law": law,
            "score": score.name,
            "score_epsilon": score_epsilon,
            "score_noise": score.noise,
            "delta": delta,
            "epsilon": epsilon,
            "epsilon_all_runs": composed_epsilon(
                [(part, math.ceil(expected_runs)) for part in (run, *scored)], delta, "rdp"
            ),
            "epsilon_one_run": composed_epsilon([(run, 1)], delta, base.privacy.accountant),
            "accountant": "rdp",
            "guarantee": plan.guarantee.sentence(noise_reproducible=predictable),
            "noise_reproducible": predictable,
            "protects": plan.protects,
        }
        return cls(base, tuple(candidates), combinations, event, score, terms)


def run_event(assembly: Assembly) -> dp_event.DpEvent:
    """Return the accounting event of a complete run, from which a search's event follows.

    Raises:
        ConfigError: the run is not protected, or its rounds differ in cost.
    """
    plan, facts, name = (
        assembly.privacy.first_plan(),
        assembly.privacy.facts,
        assembly.recipe.mechanism.name,
    )
    if not plan.protected:
        raise ConfigError(
            f"mechanism.name: no cost of a search is proven for {name}: {plan.guarantee.reason}"
        )
    if facts.sampling.block is not None:
        raise ConfigError(
            "federation.sampling: a search is charged by Renyi orders, which have no bound for "
            "'allocation' here: use 'poisson'"
        )
    run = charging.of(facts).run
    if run is None:
        costs = assembly.model.mechanism.costs(assembly.model.layers, facts.rounds)
        if not np.allclose(costs, costs[0], rtol=1e-9):
            raise ConfigError(
                f"mechanism.name: {name} spends different shares in different rounds, which no "
                "search can charge"
            )
        return repeat_event(plan.event, facts.rounds)
    events = run.events(facts.least_multiplier)
    gaussian = [(e, n) for e, n in events if isinstance(e, dp_event.GaussianDpEvent)]
    if len(gaussian) + sum(isinstance(e, dp_event.NoOpDpEvent) for e, _ in events) < len(events):
        raise ConfigError(
            "privacy.noise: sampled noise that is correlated over rounds cannot be charged as a "
            "search"
        )
    return gaussian_event(sum(n / e.noise_multiplier**2 for e, n in gaussian) ** -0.5)


def _combinations(grid: Mapping[str, Sequence[Any]]) -> tuple[dict[str, Any], ...]:
    if grid and not isinstance(grid, Mapping):
        raise ConfigError(
            f"search must map keys to lists of values, such as {{'training.lr': [0.1, 0.5]}}, got "
            f"{grid!r}"
        )
    if not grid:
        raise ConfigError(
            "search: give at least one key and its values, such as training.lr=0.1,0.5"
        )
    axes = {key: values_to_try(f"search[{key!r}]", values) for key, values in grid.items()}
    for key in axes:
        if key.partition(".")[0] in _FIXED:
            raise ConfigError(
                f"search: {key} cannot be searched: data, budget and seeds must be the same for "
                "every run"
            )
    count = math.prod(map(len, axes.values()))
    if count > MOST:
        raise ConfigError(f"search: {count:,} combinations are more than {MOST:,}")
    return tuple(
        dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())
    )


def _refuse(base: Recipe) -> None:
    """Refuse recipes whose runs are visible to anybody except the operator."""
    if base.noised_by.uploads_released:
        raise ConfigError(
            f"privacy.trust = {base.noised_by.name!r}: a search hides its losing runs from readers "
            f"of the model, and here the server sees {base.noised_by.observed_rounds} in each of "
            "them, so all of them count: use `fedlgm compare`"
        )
    if base.run.audit:
        raise ConfigError("run.audit: canaries take part in single runs: leave it out in a search")
