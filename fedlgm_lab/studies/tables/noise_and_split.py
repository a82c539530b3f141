"""Accuracy at one proven epsilon, for each type of noise over the rounds and each split of the
noise over the layers.

The types are independent noise with secret Poisson sampling; and independent, banded and blt noise
with ten groups of clients that take turns in a public order. The splits are flat, uniform,
SNR-consistent and adaptive. In every cell, the server learning rate is searched in the same way on
a separate seed, and the best rate is then run on other seeds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from fedlgm import data
from fedlgm.data import DataSet
from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.pages import spread, table
from fedlgm_lab.studies.tables.runs import (
    Cell,
    Label,
    cells,
    labels,
    measure_cells,
    search_table,
    settings,
)
from fedlgm_lab.studies.tables.store import CHANGE, Kept, change

NAME = "noise-and-split"
WINDOWS, TESTED = 8, 2000
NOISES = labels(NAME, "noise")
*FIXED, ADAPTIVE, NARROW = labels(NAME, "split")
SPLITS = (*FIXED, ADAPTIVE)
TASKS = tuple(group["name"]["task"] for group in settings(NAME)["groups"])
Figures = dict[tuple[Label, Label], pd.Series]
"""Figures of each noise and split by seed, at the learning rate that its search chose."""


def beginnings() -> DataSet:
    """Load the chapters of `text-gru`, each cut to 8 windows of 32 characters for training, with
    2,000 windows for the test.
    """
    whole = data.load("bible-kjv-chapters")
    assert isinstance(whole.train_x, np.ndarray)
    assert isinstance(whole.test_x, np.ndarray)
    assert whole.train_user is not None
    user = whole.train_user  # the windows of a chapter are adjacent
    first = np.arange(len(user)) - np.searchsorted(user, user) < WINDOWS
    x, y = whole.train_x[first], whole.train_y[first]
    tested = np.linspace(0, len(whole.test_y) - 1, TESTED).astype(int)  # evenly over the book
    return DataSet(
        "bible-kjv-beginnings",
        x,
        y,
        whole.test_x[tested],
        whole.test_y[tested],
        whole.classes,
        user[first],
    )


def runs_of(store: Kept, task: str, splits: Sequence[Label] = SPLITS) -> list[Cell]:
    """Return a task's cells, or an empty list until all of them have figures."""
    runs = [cell for cell in cells(store, NAME, task=task) if cell.name["split"] in splits]
    complete = len(runs) == len(NOISES) * len(splits) and all(len(run.figures()) for run in runs)
    return runs if complete else []


def figures_by_cell(runs: Iterable[Cell]) -> Figures:
    """Collect the figures of cells, by noise and split."""
    return {(run.name["noise"], run.name["split"]): run.figures() for run in runs}


def mean(figures: Figures, noises: Sequence[Label], splits: Sequence[Label]) -> pd.Series:
    """Average over these noises and splits, for every seed that all of their cells have."""
    both = itertools.product(noises, splits)
    return pd.concat([figures[cell] for cell in both], axis=1, join="inner").mean(axis=1)


def best_fixed(figures: Figures, noise: Label, better: int) -> Label:
    """Find the fixed split that is best on average under this noise."""
    return max(FIXED, key=lambda split: better * figures[noise, split].mean())


def better_of(runs: Sequence[Cell]) -> int:
    """Return 1 if a higher figure of these runs is better, and -1 if a lower figure is better."""
    assert runs[0].search is not None
    return runs[0].search.better


def tables(store: Kept, task: str) -> str:
    """Make the table of every cell's figure and server learning rate."""
    if not (runs := runs_of(store, task)):
        return ""
    shown = {
        (run.name["noise"], run.name["split"]): f"{spread(run.figures())} (lr {run.rate():g})"
        for run in runs
    }
    seeds = sorted({len(run.figures()) for run in runs})
    count = " to ".join(map(str, dict.fromkeys((seeds[0], seeds[-1]))))
    rows = [[noise, *(shown[noise, split] for split in SPLITS)] for noise in NOISES]
    return f"Seeds per cell: {count}.\n\n{table(['noise', *SPLITS], rows)}"


def changes(store: Kept, task: str) -> str:
    """Make the tables of the differences between noises (averaged over the fixed splits) and
    between splits.
    """
    if not (runs := runs_of(store, task)):
        return ""
    figures, better = figures_by_cell(runs), better_of(runs)
    flat, *fixed = FIXED
    by_noise = {noise: mean(figures, [noise], FIXED) for noise in NOISES}
    by_split = {split: mean(figures, NOISES, [split]) for split in FIXED}
    best = {noise: best_fixed(figures, noise, better) for noise in NOISES}
    compared = {
        f"against {reference}; fixed splits": {
            other: change(by_noise[other], by_noise[reference]) for other in NOISES[at + 1 :]
        }
        for at, reference in enumerate(NOISES[:2])
    }
    compared[f"against {flat}; all noises"] = {
        split: change(by_split[split], by_split[flat]) for split in fixed
    }
    compared["adaptive against the best fixed split"] = {
        f"{noise}: {split}": change(figures[noise, ADAPTIVE], figures[noise, split])
        for noise, split in best.items()
    }
    return "\n\n".join(
        table([header, *CHANGE], [[label, *cells] for label, cells in rows.items()])
        for header, rows in compared.items()
    )


def narrow(store: Kept, task: str) -> str:
    """Make the table that compares the adaptive split at span 2 with the best fixed split and with
    the adaptive split at span 8.
    """
    if not (runs := runs_of(store, task, (*SPLITS, NARROW))):
        return ""
    figures, rows = figures_by_cell(runs), []
    for run in runs:
        if run.name["split"] == NARROW:
            noise, narrowed = run.name["noise"], run.figures()
            best = best_fixed(figures, noise, better_of(runs))
            changed = [change(narrowed, figures[noise, other]) for other in (best, ADAPTIVE)]
            shown = f"{spread(narrowed)} (lr {run.rate():g})"
            rows.append([noise, shown, best, *changed[0], *changed[1]])
    return table(["noise", NARROW, "best fixed", *CHANGE, "change to span 8", *CHANGE[1:]], rows)


def search(store: Kept, task: str) -> str:
    """Make the table of the search's figures so far, with a row for each cell and a column for each
    learning rate.
    """
    runs = [cell for cell in cells(store, NAME, task=task) if cell.name["split"] != NARROW]
    return search_table(runs, {"noise": "noise", "split": "split"}, 1)


def texts(store: Kept) -> Pages:
    """Make the tables of the results, the differences and the searches by task, and of the narrow
    span for the page of adaptive splits.
    """
    return {
        "correlated.md": {f"noise and split: {task}": tables(store, task) for task in TASKS},
        "data/noise-and-split.md": {
            f"{what}: {task}": text(store, task)
            for task in TASKS
            for what, text in (("changes", changes), ("search", search))
        },
        "adaptive.md": {f"span: {task}": narrow(store, task) for task in TASKS},
    }


MAKER = Maker(
    "noise-and-split.json", texts, lambda store: measure_cells(cells(store, NAME)), partial=True
)
