"""The function `study`, which runs a grid of settings from Python in one call."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from fedlgm import data as data_sets
from fedlgm.checks import check_count
from fedlgm.errors import ConfigError, FedlgmError
from fedlgm.files import path_of
from fedlgm.training import models
from fedlgm.training.devices import plain_defaults
from fedlgm.training.tasks import Metric
from fedlgm.training.tasks.own_figures import Evaluate
from fedlgm_lab.studies import frames, networks, running
from fedlgm_lab.studies.jobs import MODEL, Job, grid_jobs
from fedlgm_lab.studies.progress import Line
from fedlgm_lab.studies.records import FILE, Records, Searched, plain_values, writing
from fedlgm_lab.studies.results import Study
from fedlgm_lab.studies.search import LEAST_SEEDS, Point, Search, Shift
from simulations.arguments import refuse_unknown, resolve
from simulations.config.assembly import Assembly
from simulations.config.overrides import Overrides, settings
from simulations.config.own import Own
from simulations.config.recipe import Recipe
from simulations.runs import strict_json


@plain_defaults()
def study(
    recipe: str | Path | Recipe | None = None,
    *,
    model: Any = None,
    data: Any = None,
    users: Any = None,
    task: Any = None,
    grid: Mapping[str, Sequence[Any]] | None = None,
    seeds: int = 3,
    workers: int | str = 1,
    overrides: Overrides = (),
    folder: Path | str | None = None,
    metrics: Mapping[str, Metric] | None = None,
    evaluate: Evaluate | None = None,
    search: Mapping[str, Sequence[Any]] | None = None,
    search_seeds: int = LEAST_SEEDS,
    progress: bool = True,
    **options: Any,
) -> Study:
    """Run every combination of a grid several times.

    A repeated call with the same folder makes only the missing runs.

    Runs with the same seed start from the same initial model and share the division of the data, so
    methods are compared in pairs of runs. No two runs share noise.

    Args:
        recipe: a bundled recipe's name, a file, or a `Recipe`; default: the recipe that `simulate`
            takes for the model, or for all models of the grid.
        model: see `simulations.simulate`; pass a class or function for a different initial model
            with each seed.
        data: see `simulations.simulate`.
        users: see `simulations.simulate`.
        task: see `simulations.simulate`.
        grid: {"mechanism": entries, "model": entries, any recipe key: values}. A mechanism is an
            object, a class, a name, "name:variant", "package.module:Class", or (label, one of
            these[, {option: value}]). Options with a dot are keys of the recipe, for this entry
            only. A model is any value of the argument `model`, or (label, one of these).
        seeds: repetitions of each combination.
        workers: processes that take one run each, or the address of a Ray cluster.
        overrides: changes of the recipe for all runs; options of [mechanism] apply to the entries
            that have them.
        folder: folder of the run folders; default: `runs/study-NAME`.
        metrics: see `simulations.simulate`.
        evaluate: see `simulations.simulate`.
        search: {recipe key: values}. Each method and cell takes the best of these values, chosen on
            separate seeds. The final runs are made at the best values and at the values next to
            them.
        search_seeds: repetitions of each value of the search, at least 3.
        progress: whether to show a line of progress.
        options: unknown arguments. They are refused, and the message names the recipe key that may
            be meant.

    Returns:
        The finished runs. A run that diverged, or that the recipe's rules refuse, is a row with its
        reason.

    Raises:
        ConfigError: an argument is wrong, or the folder holds runs of other settings or objects,
            such as a module with other initial weights. Nothing new is then run, and
            `Study.read(folder)` reads the finished runs.
        LedgerError: a run's spending is unknown.
    """
    refuse_unknown("study", options)
    if isinstance(seeds, Sequence):
        raise ConfigError(
            "seeds must be the number of repetitions (their seeds follow from run.seed), got "
            f"{seeds!r}"
        )
    seeds = check_count("seeds", seeds)
    if not isinstance(workers, str):
        check_count("workers", workers)
    if not isinstance(grid, Mapping | None):
        raise ConfigError(
            f"grid must map keys to lists, such as {{'mechanism': ['uniform', 'gaussian']}}, got "
            f"{grid!r}"
        )
    axes = dict(grid or {})
    given = {
        "model": model,
        "data": data_sets.with_users(data, users),
        "metrics": metrics,
        "evaluate": evaluate,
        "task": task or (networks.task_of(axes[MODEL]) if MODEL in axes else models.task_of(model)),
    }
    base, own, shared = base_of(recipe, axes, given, overrides)
    out = (
        Path("runs") / f"study-{base.name}" if folder is None else path_of("folder", folder)
    ).absolute()
    if search is None:
        todo = grid_jobs(base, axes, range(seeds), shared, own)
        failed = complete(todo, out, workers, progress)
        return _save(out, Records.of_runs(out, todo, failed))
    wanted = Search.of(search, search_seeds, axes)
    trials = grid_jobs(base, axes | dict(wanted.axes), wanted.repetitions, shared, own)
    failed = complete(trials, out, workers, progress)
    finals = grid_jobs(base, axes | dict(wanted.axes), range(seeds), shared, own)
    chosen, shifted = _choose_finals(wanted, trials, finals, out, failed)
    needed = {
        job.folder: job for job in (*chosen, *(job for jobs in shifted.values() for job in jobs))
    }
    failed |= complete(list(needed.values()), out, workers, progress)
    before = Searched(wanted, trials, shifted)
    return _save(out, Records.of_runs(out, chosen, failed, before))


def _save(folder: Path, records: Records) -> Study:
    """Write the figures of a study into its folder, for `Study.read`, and return the study."""
    with writing(folder):
        strict_json.write(folder / FILE, plain_values(records, [records.headline]), indent=1)
    return Study(folder, records)


def base_of(
    recipe: str | Path | Recipe | None,
    grid: Mapping[str, Any],
    given: Mapping[str, Any],
    overrides: Overrides,
) -> tuple[Recipe, Own, dict[str, Any]]:
    """Return the recipe and the Python objects of all runs, and the options of [mechanism] that
    only some of the grid's mechanisms may have.

    Args:
        recipe: see `study`.
        grid: see `study`.
        given: model, data and task as names or objects, and metrics and evaluate as functions.
        overrides: see `study`.

    Raises:
        ConfigError: overrides set [model] although the grid holds models.
    """
    changes = dict(settings(overrides))
    shared = "mechanism" in grid
    if MODEL in grid and any(key.startswith("model.") for key in changes if key != "model.seed"):
        raise ConfigError(
            "overrides of [model]: the models are in grid['model']; give (label, name, {option: "
            "value})"
        )
    options = {
        key: value for key, value in changes.items() if shared and key.startswith("mechanism.")
    }
    common = {key: value for key, value in changes.items() if key not in options}
    transformer = networks.first_of_huggingface(grid.get(MODEL, ()))
    if given.get("model") is not None or transformer is None:
        return *resolve(recipe, given, common), options
    base, own = resolve(recipe, {**given, "model": transformer}, common)
    return base, replace(own, model=None), options


def complete(
    todo: Sequence[Job], out: Path, workers: int | str, progress: bool, engine: str = "local"
) -> dict[str, str]:
    """Complete every run, and show a line of progress (see `running.run`)."""
    line, summary = Line(todo, progress), True
    try:
        return running.run(todo, out, engine, line.on_row, workers=workers, on_end=line.on_end)
    except FedlgmError:
        summary = False
        raise
    finally:
        line.close(summary)


def _choose_finals(
    search: Search,
    trials: Sequence[Job],
    finals: Sequence[Job],
    out: Path,
    failed: Mapping[str, str],
) -> tuple[list[Job], dict[Shift, list[Job]]]:
    """Choose the final runs at each cell's best values, and those one step away from them."""
    task = Assembly(trials[0].recipe, trials[0].own).data.task
    scores: dict[tuple, dict[Point, list[float]]] = defaultdict(lambda: defaultdict(list))
    for job in trials:
        finished = job.folder not in failed
        figure = (
            frames.metrics_at(out / job.folder, job.own)[task.headline] if finished else math.nan
        )
        scores[_cell(job, search)][search.at(job.point)].append(figure)
    at: dict[tuple, list[Job]] = defaultdict(list)
    for job in finals:
        at[_cell(job, search), search.at(job.point)].append(job)
    chosen: list[Job] = []
    shifted: dict[Shift, list[Job]] = {shift: [] for shift in search.shifts()}
    for cell, by_point in scores.items():
        best = search.best(
            {point: float(np.mean(figures)) for point, figures in by_point.items()}, task.better
        )
        if best is None:
            chosen += at[cell, next(iter(by_point))]
            continue
        chosen += at[cell, best]
        for shift, jobs in shifted.items():
            beside = search.neighbour(best, shift)
            jobs += [] if beside is None else at[cell, beside]
    return chosen, shifted


def _cell(job: Job, search: Search) -> tuple:
    return (
        job.method,
        *((key, repr(value)) for key, value in job.point.items() if key not in search.axes),
    )
