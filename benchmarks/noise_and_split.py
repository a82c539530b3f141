"""Noise over the rounds times its split over the layers: accuracy at one proven epsilon.

    python -m benchmarks.noise_and_split --kept FILE [--task NAME ...] [--minutes M]   # go on with the runs
    python -m benchmarks.noise_and_split --kept FILE --write                           # tables of docs/results/...

Noise: independent with secret Poisson sampling; independent, banded or blt where ten groups take turns in public.
Split: flat, uniform, SNR-consistent, adaptive. Every cell gets the same search (server learning rate, on a seed of its
own) and is then run on other seeds. Finished runs are kept in FILE: a second call goes on where the first one stopped.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from dataclasses import dataclass
from pathlib import Path

from benchmarks.kept import Kept, Row, change
from benchmarks.pages import put, spread, table

PAGE = Path(__file__).parents[1] / "docs" / "results" / "correlated.md"
KEPT = PAGE.with_name("noise-and-split.json")
SEARCH_SEED = 100
CYCLE = "federation.sampling=cyclic"
NOISES = {
    "independent, secret Poisson sampling": ("federation.sampling=poisson", "privacy.noise=independent"),
    "independent, public cycle": (CYCLE, "privacy.noise=independent"),
    "banded, public cycle": (CYCLE, "privacy.noise=banded"),
    "blt, public cycle": (CYCLE, "privacy.noise=blt"),
}
SPLITS = {"flat": "gaussian", "uniform": "uniform", "SNR-consistent": "snr-consistent", "adaptive": "adaptive"}
Cell = tuple[str, str]
CELLS: tuple[Cell, ...] = tuple(itertools.product(NOISES, SPLITS))


@dataclass(frozen=True)
class Task:
    """A recipe, what is changed in it for all cells, and what is searched.

    Attributes:
        recipe: bundled recipe.
        overrides: for all cells.
        rates: server learning rates of the search.
        better: 1 if a higher figure is better, -1 if a lower one is.
        seeds: seeds of every cell, in this order.
    """

    recipe: str
    overrides: tuple[str, ...]
    rates: tuple[float, ...]
    better: int = 1
    seeds: tuple[int, ...] = (1, 2, 3, 4, 5)


_IMAGES = ("data.pixels=[0, 1]", "run.evaluate_every=1000")  # the last round is always evaluated
_MLP = ("model.name=mlp", "model.hidden=[32, 32]", "model.activation=tanh", "training.epochs=1")
TASKS = {
    "FashionMNIST, MLP": Task("fashion-mnist", (*_IMAGES, *_MLP, "federation.rounds=60"), (0.25, 0.5, 1.0, 2.0)),
    "FashionMNIST, CNN": Task("fashion-mnist", (*_IMAGES, "federation.rounds=100"), (0.5, 1.0)),
    "text, GRU": Task("text-gru", ("run.evaluate_every=1000",), (0.25, 0.5), better=-1),
}


def measure(kept: Kept, name: str, cell: Cell, rate: float, seed: int) -> Row | None:
    """One run of a cell."""
    task, (noise, split) = TASKS[name], cell
    label = {"task": name, "noise": noise, "split": split, "rate": rate, "seed": seed}
    overrides = [*task.overrides, *NOISES[noise], f"mechanism.name={SPLITS[split]}", f"federation.server_lr={rate}"]
    return kept.measure(label, task.recipe, overrides)


def best_rate(kept: Kept, name: str, cell: Cell) -> float | None:
    """The rate that the search chose, once all of its runs are there; the only one where there is no choice."""
    task = TASKS[name]
    if len(task.rates) == 1:
        return task.rates[0]
    found = {row["rate"]: row["final"] for row in kept.find(task=name, noise=cell[0], split=cell[1], seed=SEARCH_SEED)}
    if not set(task.rates) <= set(found):
        return None
    return max(task.rates, key=lambda rate: task.better * found[rate])


def go_on(kept: Kept, names: list[str]) -> None:
    """Run what is missing: a task's search, then all cells seed by seed."""
    for name in names:
        task = TASKS[name]
        if len(task.rates) > 1:
            for rate, cell in itertools.product(task.rates, CELLS):
                if measure(kept, name, cell, rate, SEARCH_SEED) is None:
                    return
        for seed, cell in itertools.product(task.seeds, CELLS):
            rate = best_rate(kept, name, cell)
            assert rate is not None
            if measure(kept, name, cell, rate, seed) is None:
                return


def found(kept: Kept, name: str) -> dict[Cell, dict[int, float]]:
    """Figures of every cell at the rate that its search chose, by seed."""
    return {
        cell: {
            row["seed"]: row["final"]
            for row in kept.find(task=name, noise=cell[0], split=cell[1], rate=best_rate(kept, name, cell))
            if row["seed"] != SEARCH_SEED
        }
        for cell in CELLS
    }


def _means(cells: dict[Cell, dict[int, float]], at: int, value: str) -> dict[int, float]:
    """For every seed that all cells with this noise (at = 0) or split (at = 1) have: the mean over them."""
    own = [figures for cell, figures in cells.items() if cell[at] == value]
    return {seed: statistics.fmean(figures[seed] for figures in own) for seed in set.intersection(*map(set, own))}


def tables(kept: Kept, name: str) -> str:
    """The cells, and what noise and split change on average over the other one."""
    cells = found(kept, name)
    if not any(cells.values()):
        return ""
    seeds = {len(figures) for figures in cells.values()}
    rows = []
    for noise in NOISES:
        row = [noise]
        for split in SPLITS:
            rate = best_rate(kept, name, (noise, split))
            row.append(f"{spread(list(cells[noise, split].values()))} (lr {rate:g})" if rate is not None else "")
        rows.append(row)
    count = f"{min(seeds)}" if len(seeds) == 1 else f"{min(seeds)} to {max(seeds)}"
    text = [f"Seeds a cell: {count}.", "", table(["noise", *SPLITS], rows), ""]
    for at, values in enumerate((NOISES, SPLITS)):
        reference, *others = values
        base = _means(cells, at, reference)
        lines = [[other, *change(_means(cells, at, other), base)] for other in others]
        text += [table([f"against {reference}", "change", "p"], lines), ""]
    return "\n".join(text).rstrip()


def search(kept: Kept, name: str) -> str:
    """What the search found so far, on its own seed: a row for each cell, a column for each rate."""
    task = TASKS[name]
    rows = []
    for noise, split in CELLS:
        own = {row["rate"]: row["final"] for row in kept.find(task=name, noise=noise, split=split, seed=SEARCH_SEED)}
        if own:
            rows.append([noise, split, *(f"{own[rate]:.1f}" if rate in own else "" for rate in task.rates)])
    return table(["noise", "split", *(f"lr {rate:g}" for rate in task.rates)], rows) if rows else ""


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description="Noise over the rounds times its split over the layers.")
    parser.add_argument("--kept", type=Path, default=KEPT, help="finished runs")
    parser.add_argument("--task", nargs="*", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--minutes", type=float, default=60.0, help="processor time after which no run is started")
    parser.add_argument("--write", action="store_true", help="write docs/results/correlated.md, run nothing")
    options = parser.parse_args()
    kept = Kept(options.kept, options.minutes)
    if not options.write:
        go_on(kept, options.task)
    for name in options.task:
        for what, text in {
            f"noise and split: {name}": tables(kept, name),
            f"search: {name}": search(kept, name),
        }.items():
            if text:
                print(f"\n{what}\n\n{text}")
                if options.write:
                    put(PAGE, what, text)


if __name__ == "__main__":
    main()
