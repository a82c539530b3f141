"""Noise over the rounds times its split over the layers: accuracy at one proven epsilon.

Noise: independent with secret Poisson sampling; independent, banded or blt where ten groups take
turns in public. Split: flat, uniform, SNR-consistent, adaptive. Every cell gets the same search
(server learning rate, on a separate seed) and is then run on other seeds.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fedlgm import data
from fedlgm.data import DataSet
from fedlgm_lab.studies.tables import searched
from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.pages import spread, table
from fedlgm_lab.studies.tables.searched import Search, measure_cells
from fedlgm_lab.studies.tables.store import CHANGE, Kept, Row, change, figures

WINDOWS, TESTED = 8, 2000
CYCLE = "federation.sampling=cyclic"
NOISES = {
    "independent, secret Poisson sampling": (
        "federation.sampling=poisson",
        "privacy.noise=independent",
    ),
    "independent, public cycle": (CYCLE, "privacy.noise=independent"),
    "banded, public cycle": (CYCLE, "privacy.noise=banded"),
    "blt, public cycle": (CYCLE, "privacy.noise=blt"),
}
MECHANISMS: dict[str, tuple[str, ...]] = {
    "flat": ("mechanism.name=gaussian",),
    "uniform": ("mechanism.name=uniform",),
    "SNR-consistent": ("mechanism.name=snr-consistent",),
    "adaptive": ("mechanism.name=adaptive", "mechanism.span=8"),
    "adaptive, span 2": ("mechanism.name=adaptive", "mechanism.span=2"),
}
*FIXED, ADAPTIVE, NARROW = MECHANISMS
SPLITS = (*FIXED, ADAPTIVE)
Cell = tuple[str, str]
CELLS: tuple[Cell, ...] = tuple(itertools.product(NOISES, SPLITS))
NARROW_CELLS: tuple[Cell, ...] = tuple(itertools.product(NOISES, [NARROW]))


@dataclass(frozen=True)
class Task:
    """A recipe, its changes for all cells, and its search.

    Attributes:
        recipe: bundled recipe.
        overrides: changes for all cells.
        search: search of the server learning rate.
        seeds: seeds of every cell, in this order.
    """

    recipe: str
    overrides: tuple[str, ...]
    search: Search
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)


def beginnings() -> DataSet:
    """The chapters of `text-gru`, each cut to 8 windows of 32 characters to train on; 2,000 windows
    to test on.
    """
    whole = data.load("bible-kjv-chapters")
    assert isinstance(whole.train_x, np.ndarray)
    assert isinstance(whole.test_x, np.ndarray)
    assert whole.train_user is not None
    user = whole.train_user  # in order: every chapter's windows lie together
    first = np.arange(len(user)) - np.searchsorted(user, user) < WINDOWS
    x, y = whole.train_x[first], whole.train_y[first]
    tested = np.linspace(0, len(whole.test_y) - 1, TESTED).astype(int)  # through the whole book
    return DataSet(
        "bible-kjv-beginnings",
        x,
        y,
        whole.test_x[tested],
        whole.test_y[tested],
        whole.classes,
        user[first],
    )


LAST = "run.evaluate_every=1000"  # the last round is always evaluated
MLP = (
    *(
        "data.pixels=[0, 1]",
        "model.name=mlp",
        "model.hidden=[32, 32]",
        "model.activation=tanh",
        "training.epochs=1",
    ),
    *("federation.rounds=60", LAST),
)
_CNN = ("data.pixels=[0, 1]", "federation.rounds=100", LAST)
_GRU = (
    *(
        "data.name=fedlgm_lab.studies.tables.noise_and_split:beginnings",
        "model.hidden=32",
        "federation.rounds=40",
    ),
    *("training.batch_size=8", "run.block_size=32", LAST),
)
TASKS = {
    "FashionMNIST, MLP": Task("fashion-mnist", MLP, Search((0.25, 0.5, 1.0, 2.0), 0.125, 8.0)),
    "FashionMNIST, CNN": Task("fashion-mnist", _CNN, Search((0.5, 1.0), 0.125, 8.0)),
    "text, GRU": Task("text-gru", _GRU, Search((0.25, 0.5), 0.0625, 4.0, better=-1)),
    "text, whole recipe": Task("text-gru", (LAST,), Search((0.5, 1.0), 0.0625, 8.0, better=-1)),
}

NARROWED = ("FashionMNIST, MLP", "text, GRU")
"""Tasks with runs of the adaptive split at span 2."""


def runs_of(store: Kept, name: str, cell: Cell) -> searched.Cell:
    """The runs of a cell of a task."""
    task, (noise, split) = TASKS[name], cell

    def run(rate: float, seed: int) -> Row:
        changes = [*task.overrides, *NOISES[noise], *MECHANISMS[split]]
        return figures(task.recipe, [*changes, f"federation.server_lr={rate}"], seed)

    label = {"task": name, "noise": noise, "split": split}
    return searched.Cell(store, label, task.search, run)


def measure_all(store: Kept) -> None:
    """Make missing runs, task by task."""
    jobs = [(CELLS, name) for name in TASKS] + [(NARROW_CELLS, name) for name in NARROWED]
    for cells, name in jobs:
        measure_cells([runs_of(store, name, cell) for cell in cells], TASKS[name].seeds)


def figures_by_cell(
    store: Kept, name: str, cells: Iterable[Cell] = CELLS
) -> dict[Cell, dict[int, float]]:
    """Figures of every cell at the rate that its search chose, by seed."""
    return {cell: runs_of(store, name, cell).figures() for cell in cells}


def mean(
    cells: dict[Cell, dict[int, float]], noises: Iterable[str], splits: Iterable[str]
) -> dict[int, float]:
    """For every seed that all of these cells have: the mean over them."""
    own = [cells[cell] for cell in itertools.product(noises, splits)]
    return {
        seed: statistics.fmean(figures[seed] for figures in own)
        for seed in set.intersection(*map(set, own))
    }


def best_fixed(cells: dict[Cell, dict[int, float]], noise: str, better: int) -> str:
    """The fixed split that is best on average under this noise."""
    return max(FIXED, key=lambda split: better * statistics.fmean(cells[noise, split].values()))


def tables(store: Kept, name: str) -> str:
    """The figure of every cell, with its server learning rate."""
    cells = figures_by_cell(store, name)
    if not all(cells.values()):
        return ""
    seeds = {len(figures) for figures in cells.values()}
    rows = []
    for noise in NOISES:
        row = [noise]
        for split in SPLITS:
            rate, figures = (
                runs_of(store, name, (noise, split)).best(),
                list(cells[noise, split].values()),
            )
            row.append(f"{spread(figures)} (lr {rate:g})")
        rows.append(row)
    count = f"{min(seeds)}" if len(seeds) == 1 else f"{min(seeds)} to {max(seeds)}"
    return f"Seeds per cell: {count}.\n\n{table(['noise', *SPLITS], rows)}"


def changes(store: Kept, name: str) -> str:
    """Differences between noises, in the mean of the fixed splits, and between splits."""
    cells, task = figures_by_cell(store, name), TASKS[name]
    if not all(cells.values()):
        return ""
    text: list[str] = []

    def add(header: str, compared: dict[str, tuple[dict[int, float], dict[int, float]]]) -> None:
        lines = [[label, *change(*pair)] for label, pair in compared.items()]
        text.extend([table([header, *CHANGE], lines), ""])

    for at, reference in enumerate(tuple(NOISES)[:2]):
        base = mean(cells, [reference], FIXED)
        others = {other: (mean(cells, [other], FIXED), base) for other in tuple(NOISES)[at + 1 :]}
        add(f"against {reference}; fixed splits", others)
    flat, *others_fixed = FIXED
    base = mean(cells, NOISES, [flat])
    add(
        f"against {flat}; all noises",
        {split: (mean(cells, NOISES, [split]), base) for split in others_fixed},
    )
    pairs = {}
    for noise in NOISES:
        best = best_fixed(cells, noise, task.search.better)
        pairs[f"{noise}: {best}"] = cells[noise, ADAPTIVE], cells[noise, best]
    add("adaptive against the best fixed split", pairs)
    return "\n".join(text).rstrip()


def narrow(store: Kept, name: str) -> str:
    """The adaptive split at span 2 against the best fixed split, and against span 8."""
    cells, better = figures_by_cell(store, name, (*CELLS, *NARROW_CELLS)), TASKS[name].search.better
    if not all(cells.values()):
        return ""
    rows = []
    for noise in NOISES:
        own, best = cells[noise, NARROW], best_fixed(cells, noise, better)
        shown = (
            f"{spread(list(own.values()))} (lr {runs_of(store, name, (noise, NARROW)).best():g})"
        )
        rows.append(
            [
                noise,
                shown,
                best,
                *change(own, cells[noise, best]),
                *change(own, cells[noise, ADAPTIVE]),
            ]
        )
    return table(["noise", NARROW, "best fixed", *CHANGE, "change to span 8", *CHANGE[1:]], rows)


def search(store: Kept, name: str) -> str:
    """What the search found so far, on its own seed: a row for each cell, a column for each
    rate.
    """
    found = {cell: runs_of(store, name, cell).figures_by_rate() for cell in CELLS}
    rates = sorted(set(itertools.chain.from_iterable(found.values())))
    rows = [
        [*cell, *(f"{own[rate]:.1f}" if rate in own else "" for rate in rates)]
        for cell, own in found.items()
        if own
    ]
    return table(["noise", "split", *(f"lr {rate:g}" for rate in rates)], rows) if rows else ""


def texts(store: Kept) -> Pages:
    """Results by task; differences and searches; the narrow span on the page of adaptive splits."""
    return {
        "correlated.md": {f"noise and split: {name}": tables(store, name) for name in TASKS},
        "data/noise-and-split.md": {
            f"{what}: {name}": text(store, name)
            for name in TASKS
            for what, text in (("changes", changes), ("search", search))
        },
        "adaptive.md": {f"span: {name}": narrow(store, name) for name in TASKS},
    }


MAKER = Maker("noise-and-split.json", texts, measure_all, partial=True)
