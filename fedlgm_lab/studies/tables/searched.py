"""Cells of a table whose rate is searched before they are run on several seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from fedlgm_lab.studies.tables.store import Kept, Row


@dataclass(frozen=True)
class Search:
    """A search of one rate by factors of two: first those of a grid, then beyond it while the best
    lies at an edge.

    Attributes:
        grid: rates that are always tried, each twice the previous one.
        least: smallest rate to try.
        most: largest rate to try.
        better: 1 if a higher figure is better, -1 if a lower one is.
        seed: seed of the search's runs, not used for anything else.
    """

    grid: tuple[float, ...]
    least: float
    most: float
    better: int = 1
    seed: int = 100

    def following(self, tried: Mapping[float, float]) -> float | None:
        """The next rate to try after these figures by rate; None once the search is over."""
        for rate in self.grid:
            if rate not in tried:
                return rate
        best = self._best(tried)
        if best == max(tried) and 2 * best <= self.most:
            return 2 * best
        return best / 2 if best == min(tried) and best / 2 >= self.least else None

    def chosen(self, tried: Mapping[float, float]) -> float | None:
        """The best rate, once the search is over."""
        return self._best(tried) if self.following(tried) is None else None

    def _best(self, tried: Mapping[float, float]) -> float:
        return max(sorted(tried), key=lambda rate: self.better * tried[rate])


@dataclass(frozen=True)
class Cell:
    """Runs of one cell: those of its search, and those of other seeds at the rate that it chose.

    Attributes:
        store: the kept runs.
        name: keys of its rows, without rate and seed.
        search: search of its rate.
        run: makes a run, given a rate and a seed.
        rate: key of the rate.
        figure: key of the figure.
    """

    store: Kept
    name: Mapping[str, Any]
    search: Search
    run: Callable[[float, int], Row]
    rate: str = "rate"
    figure: str = "final"

    def figures_by_rate(self) -> dict[float, float]:
        """Figures of the search so far, by rate."""
        rows = self.store.find(**self.name, seed=self.search.seed)
        return {row[self.rate]: row[self.figure] for row in rows}

    def best(self) -> float | None:
        """The rate that the search chose, once it is over."""
        tried = self.figures_by_rate()
        return self.search.chosen(tried) if tried else None

    def figures(self) -> dict[int, float]:
        """Figures at the best rate by seed, without the search's."""
        rows = self.store.find(**self.name, **{self.rate: self.best()})
        return {row["seed"]: row[self.figure] for row in rows if row["seed"] != self.search.seed}

    def measure(self, rate: float | None, seed: int) -> None:
        """Make a run if it is missing."""
        assert rate is not None
        label = {**self.name, self.rate: rate, "seed": seed}
        self.store.keep(label, partial(self.run, rate, seed))

    def finish_search(self) -> None:
        """Make the missing runs of the search."""
        while (rate := self.search.following(self.figures_by_rate())) is not None:
            self.measure(rate, self.search.seed)


def measure_cells(cells: Sequence[Cell], seeds: Iterable[int]) -> None:
    """Make missing runs: all searches, then all cells seed by seed."""
    for cell in cells:
        cell.finish_search()
    for seed in seeds:
        for cell in cells:
            cell.measure(cell.best(), seed)
