"""Figures and tables of `fedlgm compare`, a study of methods, budgets and partitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import numpy as np
from pandas import DataFrame
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from fedlgm_lab.studies import frames, joint
from fedlgm_lab.studies.noise import model_noise
from fedlgm_lab.studies.records import rows_of
from fedlgm_lab.studies.results import Study, pair_seeds
from fedlgm_lab.studies.statistics import difference
from fedlgm_lab.studies.study_rows import Row
from simulations.runs.folder import RunFolder
from simulations.runs.headline import format_metric, headline, is_share
from simulations.summaries.terminal import number
from simulations.tables import table

LAST = 5
"""Number of evaluated rounds at a run's end whose mean is the run's figure, as in the papers."""

_OF_A_CELL = ("delta", "guarantee", "guarantee_status", "noise_reproducible")
_NOISES = {"noise_scale": "noise scale", "model_noise": "noise of the model"}
_NAMES = {
    "privacy.epsilon": "epsilon_budget",
    "data.partition": "partition",
    "seed": "repetition",
    "n": "seeds",
}


def summarise(found: Study) -> Row:
    """Compute the figures of a finished comparison.

    A run's figure is the mean of the headline metric over the last `LAST` evaluated rounds.
    `noise_scale` sums the norms of the noise in the rounds' means; `model_noise` is the norm of the
    noise in the last model (see `fedlgm_lab.studies.noise.model_noise`). Methods are compared as in
    `Study.difference`.

    Args:
        found: the runs (see `fedlgm_lab.studies.jobs.jobs`).

    Returns:
        A mapping with the names of the "methods", one row per run in "runs", one row per cell
        (method, budget, partition) in "cells", the first method's lead over the others in
        "differences", the runs without figures and the reasons in "failed", and the joint cost in
        "together".

    Raises:
        RunError: no run is finished.
        LedgerError: the verification of a run's ledger fails.
    """
    frame = _figures(found)
    done = frame[frame["status"] == "finished"]
    frames.require_finished(frame)
    measured = [found.headline, *_NOISES]
    cells = []
    for cell in rows_of(frames.cells(done, found.keys, [*measured, "seconds"])):
        first = rows_of(frames.at(done, {key: cell[key] for key in found.keys}))[0]
        cells.append(cell | {name: first[name] for name in _OF_A_CELL})
    methods = list(dict.fromkeys(frame["method"]))
    return {
        "methods": methods,
        "headline": found.headline,
        "runs": _rename_columns(rows_of(done)),
        "cells": _rename_columns(cells),
        "differences": _rename_columns(
            [row for other in methods[1:] for row in _leads(found, done, methods[0], other)]
        ),
        "failed": _rename_columns(rows_of(frame[frame["status"] != "finished"])),
        "together": found.joint,
    }


def _figures(study: Study) -> DataFrame:
    """Extend the study's frame by the columns that only a comparison has."""
    frame = study.to_frame().rename(columns={"guarantee": "guarantee_status"})
    frame = frame.assign(model_noise=np.nan, guarantee="", delta=np.nan)
    for index, path in frame.loc[frame["status"] == "finished", "folder"].items():
        folder = RunFolder.open(path)
        result = folder.verified_result()
        rows = folder.every_row(result)
        last = [headline(row)[1] for row in rows if "loss" in row][-LAST:]
        figures = [
            np.mean(last),
            model_noise(folder, rows)[-1],
            result["guarantee"],
            result["delta"],
        ]
        frame.loc[index, [study.headline, "model_noise", "guarantee", "delta"]] = figures
    return frame


def _leads(study: Study, done: DataFrame, first: str, other: str) -> list[Row]:
    """Compute the differences between two methods in the cells with at least two seeds of both."""
    leads = []
    for cell in frames.cells_of(done, study.compared_keys, {}):
        for metric in (study.headline, *_NOISES, "claimed_epsilon"):
            both, _ = pair_seeds(done, cell, ("method", first, other), metric)
            if len(both) > 1:
                lead = asdict(difference(both["a"], both["b"]))
                leads.append({"method": other, **cell, "metric": metric, **lead})
    return leads


def _rename_columns(rows: Sequence[Row]) -> list[Row]:
    return [
        {_NAMES.get(name, name): value for name, value in row.items() if name != "mechanism"}
        for row in rows
    ]


def tables(summary: Row) -> Group:
    """Lay out the accuracy, noise and privacy of every cell, the first method's lead over the other
    methods, and explanatory sentences.
    """
    cells, score = summary["cells"], summary["headline"]
    columns = (
        "method",
        "budget",
        "partition",
        score,
        *_NOISES.values(),
        "guarantee",
        "proven",
        "claimed",
        "found at 1 % false alarms",
        "seconds",
    )
    main_table = table(
        "Accuracy, noise and privacy spent",
        columns,
        left=("method", "partition", "guarantee"),
        keys=3,
    )
    for cell in cells:
        main_table.add_row(
            *_names(cell),
            *(_mean_and_std(cell, name) for name in (score, *_NOISES)),
            *_cost_columns(cell),
        )
    for row in summary["failed"]:
        main_table.add_row(*_names(row), row["status"])
    notes = [
        f"note: {row['method']}, run {row['repetition']}: {row['reason']}"
        for row in summary["failed"]
    ]
    notes.append(
        f"{score}: mean of the last {LAST} evaluated rounds; noise scale: l2 norm of the noise in "
        "a round's mean, summed over the rounds; noise of the model: l2 norm of the noise in all "
        "rounds' means together; found: the largest share of the units that an attacker who accepts 1 % "
        "false alarms can find"
    )
    sentences = dict.fromkeys(f"{cell['method']}: {cell['guarantee']}" for cell in cells)
    leads = [_lead_table(summary)] if summary["differences"] else []
    return Group(
        main_table,
        *leads,
        *map(escape, sentences),
        "",
        joint.sentence(summary["together"]),
        *map(escape, notes),
    )


def _lead_table(summary: Row) -> Table:
    title = f"Differences: {summary['methods'][0]} minus the others, with the 95 % interval and p"
    differences = table(
        title,
        ("method", "budget", "partition", "figure", "difference"),
        left=("method", "partition", "figure"),
        keys=4,
    )
    for row in summary["differences"]:
        mean, low, high = (
            row[name] * (100 if is_share(row["metric"]) else 1) for name in ("mean", "low", "high")
        )
        figure = f"{row['metric'].replace('_', ' ')}{' in %' if is_share(row['metric']) else ''}"
        differences.add_row(
            *_names(row), figure, f"{mean:+.3g} ({low:.3g} to {high:.3g}; p = {row['p']:.2g})"
        )
    return differences


def _names(row: Row) -> list[str]:
    return [escape(row["method"]), budget(row), escape(str(row["partition"]))]


def budget(row: Row) -> str:
    """Format a row's budget."""
    return "-" if row["epsilon_budget"] is None else f"{row['epsilon_budget']:g}"


def _mean_and_std(cell: Row, name: str) -> str:
    """Format mean and standard deviation; for a single run, only its figure."""
    spread = f" ± {format_metric(name, cell[f'{name}_std'])}" if cell["seeds"] > 1 else ""
    return f"{format_metric(name, cell[name])}{spread}"


def _cost_columns(cell: Row) -> list[str]:
    figures = [
        f"{number(cell[name])} at {cell['delta']:g}" for name in ("epsilon", "claimed_epsilon")
    ]
    return [
        cell["guarantee_status"],
        *figures,
        frames.share_found(cell),
        f"{cell['seconds']:.2f}",
    ]
