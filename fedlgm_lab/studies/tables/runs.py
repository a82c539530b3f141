"""Runs of recipes for the cells of a table, which a maker's file of settings describes.

    [axes.noise]                                  # label -> changes of the recipe
    independent = {"privacy.noise" = "independent"}
    banded = {"privacy.noise" = "banded"}

    [axes.budget]                                 # or recipe key -> values, which are the labels
    "privacy.epsilon" = [1.0, 2.0]                # (or the name of a maker that has this axis)

    [[groups]]                                    # a cell for every combination on its axes
    name = {task = "digits"}
    recipe = "digits"
    seeds = [1, 2, 3]
    axes = {noise = "all", budget = [1.0]}
    search = {grid = [0.1, 0.2], least = 0.05, most = 0.8}

A run is a row of the maker's file of figures. The group's name, the labels on the axes, the rate
and the seed identify the row.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import pandas as pd

from fedlgm_lab.studies.tables.pages import table
from fedlgm_lab.studies.tables.store import Kept, Row, figures
from simulations.config.overrides import removes

Label = str | float
Run = Callable[[str, Mapping[str, Any], int], Row]


@dataclass(frozen=True)
class Search:
    """A search for one rate in steps of a factor of two. It first tries the rates of a grid, and
    then rates beyond the grid while the best rate lies at an edge.

    Attributes:
        grid: rates that are always tried, each twice the previous one.
        least: smallest rate to try.
        most: largest rate to try.
        better: 1 if a higher figure is better, -1 if a lower figure is better.
        seeds: seeds that only the search uses.
        key: the recipe's key that holds the rate.
        column: the column of the stored rows that holds the rate.
        at: if the search of another cell also serves this cell, the labels in which the other cell
            differs.
        set: changes of the recipe that give the recipe of the other cell.
    """

    grid: Sequence[float]
    least: float
    most: float
    better: int = 1
    seeds: Sequence[int] = (100,)
    key: str = "federation.server_lr"
    column: str = "rate"
    at: dict[str, Label] = field(default_factory=dict)
    set: dict[str, Any] = field(default_factory=dict)

    def following(self, tried: Mapping[float, float]) -> float | None:
        """Return the next rate to try, given the figures by rate so far; None once the search is
        over.
        """
        for rate in self.grid:
            if rate not in tried:
                return rate
        best = self._best(tried)
        if best == max(tried) and 2 * best <= self.most:
            return 2 * best
        return best / 2 if best == min(tried) and best / 2 >= self.least else None

    def chosen(self, tried: Mapping[float, float]) -> float | None:
        """Return the best rate, given the figures by rate; None until the search is over."""
        return self._best(tried) if tried and self.following(tried) is None else None

    def _best(self, tried: Mapping[float, float]) -> float:
        return max(sorted(tried), key=lambda rate: self.better * tried[rate])


@dataclass(frozen=True)
class Cell:
    """The runs of one cell: the runs of its search, and runs with other seeds at the rate that the
    search chose.

    Attributes:
        store: the stored runs.
        name: the columns that identify its rows, without rate and seed.
        recipe: recipe of its runs.
        changes: changes of the recipe.
        seeds: seeds of its runs, in their order.
        search: search for its rate; None if nothing is searched.
        run: see `cells`.
    """

    store: Kept
    name: dict[str, Label]
    recipe: str
    changes: dict[str, Any]
    seeds: Sequence[int]
    search: Search | None = None
    run: Run | None = None

    def tried(self) -> dict[float, float]:
        """Return the mean figures of the search so far, by rate."""
        if self.search is None:
            return {}
        rows = self.store.find(**{**self.name, **self.search.at})
        runs = [row for row in rows if row["seed"] in self.search.seeds]
        by_rate = pd.DataFrame(runs, columns=[self.search.column, "final"]).groupby(
            self.search.column
        )["final"]
        return by_rate.mean()[by_rate.size() == len(self.search.seeds)].to_dict()

    def rate(self) -> float | None:
        """Return the rate that the search chose; None until the search is over, or without a
        search.
        """
        return None if self.search is None else self.search.chosen(self.tried())

    def figures(self, figure: str = "final") -> pd.Series:
        """Return the figures at the chosen rate by seed, without the figures of the search."""
        rate = {} if self.search is None else {self.search.column: self.rate()}
        by_seed = {row["seed"]: row[figure] for row in self.store.find(**self.name, **rate)}
        return pd.Series(
            {seed: value for seed, value in by_seed.items() if seed in self.seeds}, dtype=float
        )

    def measure(self, seed: int) -> None:
        """Make a run at the chosen rate if it is missing."""
        self._measure(self.name, self.changes, self.rate(), seed)

    def finish_search(self) -> None:
        """Make the missing runs of the search."""
        while self.search and (rate := self.search.following(self.tried())) is not None:
            for seed in self.search.seeds:
                name, changes = self.name | self.search.at, self.changes | self.search.set
                self._measure(name, changes, rate, seed)

    def _measure(
        self, name: dict[str, Label], changes: dict[str, Any], rate: float | None, seed: int
    ) -> None:
        if self.search is not None:
            assert rate is not None
            name, changes = name | {self.search.column: rate}, changes | {self.search.key: rate}
        run = partial(self.run or figures, self.recipe, changes, seed)
        self.store.keep({**name, "seed": seed}, run)


def measure_cells(cells: Sequence[Cell]) -> None:
    """Make the missing runs: first those of all searches, then those of all cells, seed by seed."""
    for cell in cells:
        cell.finish_search()
    for seed in dict.fromkeys(seed for cell in cells for seed in cell.seeds):
        for cell in cells:
            if seed in cell.seeds:
                cell.measure(seed)


def _value(key: str, value: Any) -> Any:
    """Convert a value of a TOML file, which has no None, to a recipe's value: a text such as "none"
    that removes the key becomes None.
    """
    section, _, name = key.partition(".")
    return None if isinstance(value, str) and removes(section, name, value) else value


def search_table(cells: Sequence[Cell], columns: Mapping[str, str], digits: int) -> str:
    """Make the table of the searches' figures so far, with a row for each cell and a column for
    each rate; empty if there are no figures.

    Args:
        cells: the cells.
        columns: keys of the cells' names that are shown, with the titles of their columns.
        digits: decimal places.
    """
    tried = {tuple(cell.name[name] for name in columns): cell.tried() for cell in cells}
    rates = sorted(set(itertools.chain.from_iterable(tried.values())))
    rows = [
        [*label, *(f"{by_rate[rate]:.{digits}f}" if rate in by_rate else "" for rate in rates)]
        for label, by_rate in tried.items()
        if by_rate
    ]
    return table([*columns.values(), *(f"lr {rate:g}" for rate in rates)], rows) if rows else ""


@cache
def settings(maker: str) -> dict[str, Any]:
    """Read a maker's file of settings."""
    file = Path(__file__).with_name(f"{maker}.toml")
    return tomllib.loads(file.read_text(encoding="utf-8"))


def labels(maker: str, axis: str) -> list[Label]:
    """List the labels of an axis, in order."""
    return [label for label, _ in _chosen(maker, axis, "all")]


def cells(store: Kept, maker: str, run: Run | None = None, **name: Label) -> list[Cell]:
    """List the cells whose rows have these values, in the order of the file.

    Args:
        store: the stored runs.
        maker: name of the maker.
        run: function (recipe, changes, seed) that returns the figures of a run; default: `figures`
            of the module `store`.
        **name: values of columns that the rows must have.
    """
    content = settings(maker)
    listed = []
    for group in content["groups"]:
        search = Search(**group["search"]) if "search" in group else None
        choices = [
            [(axis, label, changes) for label, changes in _chosen(maker, axis, wanted)]
            for axis, wanted in group["axes"].items()
        ]
        for point in itertools.product(*choices):
            columns, changes = dict(group.get("name", {})), dict(group.get("set", {}))
            for axis, label, further in point:
                columns[axis] = label
                changes |= further
            changes = {key: _value(key, value) for key, value in changes.items()}
            if all(columns.get(key) == value for key, value in name.items()):
                listed.append(
                    Cell(
                        store,
                        columns,
                        group.get("recipe", ""),
                        changes,
                        group["seeds"],
                        search,
                        run,
                    )
                )
    return listed


def _chosen(maker: str, axis: str, wanted: Any) -> Iterator[tuple[Label, dict[str, Any]]]:
    """Yield the chosen labels of an axis, each with the changes that it makes to the recipe.

    Args:
        maker: name of the maker.
        axis: name of the axis.
        wanted: "all" for all labels, a list of labels, or an axis that a group defines itself.
    """
    values = wanted if isinstance(wanted, dict) else settings(maker)["axes"][axis]
    if isinstance(values, str):
        yield from _chosen(values, axis, wanted)
        return
    for key, value in values.items():
        pairs = (
            [(each, {key: each}) for each in value] if isinstance(value, list) else [(key, value)]
        )
        for label, changes in pairs:
            if not isinstance(wanted, list) or label in wanted:
                yield label, changes
