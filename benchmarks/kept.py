"""Figures kept in a JSON file, so that a benchmark can be continued."""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import simulations
from fedlgm.errors import DivergedError
from fedlgm_lab.studies.statistics import Difference, difference
from simulations.config import recipe as recipes

Row = dict[str, Any]
LEAST_SEEDS = 3
"""Seeds below which results pages give no p-value."""


class Kept:
    """Figures of finished runs under the keys that name the run, written after every run.

    Args:
        path: JSON file, created when first needed: a list of rows, one run per line.
        minutes: processor time of this process after which no run is started.
    """

    def __init__(self, path: Path, minutes: float = float("inf")) -> None:
        self._path, self._minutes = path, minutes
        self.rows: list[Row] = (
            json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
        )

    def find(self, **name: Any) -> list[Row]:
        """The rows that have these values."""
        return [
            row for row in self.rows if all(row.get(key) == value for key, value in name.items())
        ]

    def measure(self, name: Mapping[str, Any], recipe: str, overrides: Iterable[str]) -> Row | None:
        """The row with that name; a run is made if there is none, or None if the time is spent."""
        return self.keep(name, lambda: figures(recipe, overrides, int(name["seed"])))

    def keep(self, name: Mapping[str, Any], make: Callable[[], Row]) -> Row | None:
        """The row with that name; its figures are computed if there is none, or None if the time is
        spent.
        """
        found = self.find(**name)
        if found:
            return found[0]
        if time.process_time() > 60 * self._minutes:
            return None
        row = {**name, **make()}
        self.rows.append(row)
        text = ",\n".join(json.dumps(own) for own in self.rows)
        _write(self._path, f"[\n{text}\n]\n")
        print(json.dumps({key: value for key, value in row.items() if key != "curve"}), flush=True)
        return row


def command_line(
    description: str | None, path: Path, minutes: float = 60.0
) -> argparse.ArgumentParser:
    """The arguments of a benchmark's command: its kept figures, the time for further runs, and
    whether to write the tables.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kept", type=Path, default=path, help="finished runs")
    parser.add_argument(
        "--minutes",
        type=float,
        default=minutes,
        help="processor time after which no run is started",
    )
    parser.add_argument(
        "--write", action="store_true", help="write the tables of docs/results, run nothing"
    )
    return parser


def opened(description: str, path: Path) -> tuple[Kept, bool]:
    """Kept figures, and whether they go on their page, by the arguments of a benchmark's command;
    on one thread.
    """
    options = command_line(description, path, float("inf")).parse_args()
    torch.set_num_threads(1)
    return Kept(options.kept, options.minutes), bool(options.write)


class OutOfTimeError(Exception):
    """The minutes are over; measured figures are kept."""


class Values:
    """Figures by name; each is measured once.

    Args:
        path: JSON file, created when first needed.
        minutes: time after which nothing more is measured.
    """

    def __init__(self, path: Path, minutes: float = float("inf")) -> None:
        self._path, self._deadline = path, time.monotonic() + 60 * minutes
        self.values: dict[str, Any] = (
            json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        )

    def get(self, name: str, measure: Callable[[], Any]) -> Any:
        """The figure `name`, measured now if missing.

        Raises:
            OutOfTimeError: the figure is missing, and the minutes are over.
        """
        if name not in self.values:
            if time.monotonic() > self._deadline:
                raise OutOfTimeError
            started = time.process_time()
            self.values[name] = measure()
            _write(self._path, json.dumps(self.values, indent=1) + "\n")
            print(f"{name}: {time.process_time() - started:.0f} s of processor time", flush=True)
        return self.values[name]


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)


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

    def following(self, found: Mapping[float, float]) -> float | None:
        """The next rate to try after these figures by rate; None once the search is over."""
        for rate in self.grid:
            if rate not in found:
                return rate
        best = self._best(found)
        if best == max(found) and 2 * best <= self.most:
            return 2 * best
        return best / 2 if best == min(found) and best / 2 >= self.least else None

    def chosen(self, found: Mapping[float, float]) -> float | None:
        """The best rate, once the search is over."""
        return self._best(found) if self.following(found) is None else None

    def _best(self, found: Mapping[float, float]) -> float:
        return max(sorted(found), key=lambda rate: self.better * found[rate])


def figures(recipe: str, overrides: Iterable[str], seed: int) -> Row:
    """One run in this process: its headline (shares in per cent) at the end, at its best and over
    the rounds.

    The seed is that of the initial model, the division of the data, the cohorts and the noise.

    Returns:
        "final", "highest" and "late" (mean over the last five evaluated rounds), the "curve" of
        evaluated rounds, the proven "epsilon", and processor "seconds". A run that diverged has the
        worst possible figure and no epsilon.
    """
    own = [
        f"run.seed={seed}",
        f"data.partition_seed={seed}",
        "run.checkpoint_every=1000000",
        "run.trackers=[]",
    ]
    started = time.process_time()
    overrides = [*overrides, *own]
    with tempfile.TemporaryDirectory() as folder:
        try:
            result = simulations.simulate(recipe, overrides=overrides, run_dir=Path(folder) / "run")
        except DivergedError:
            worst = (
                0.0 if recipes.load(recipe, overrides).task.build().better == "higher" else math.inf
            )
            seconds = round(time.process_time() - started, 1)
            return {
                "final": worst,
                "highest": worst,
                "late": worst,
                "diverged": True,
                "seconds": seconds,
                "curve": [],
            }
        name = str(result["headline"])
        scale = 100.0 if name == "accuracy" else 1.0
        curve = [
            round(scale * row["metrics"][name], 3) for row in result.history[1:] if "metrics" in row
        ]
    return {
        "final": curve[-1],
        "highest": max(curve) if name == "accuracy" else min(curve),
        "late": round(statistics.fmean(curve[-5:]), 3),
        "epsilon": round(result.epsilon, 6),
        "guarantee": result["guarantee_status"],
        "seconds": round(time.process_time() - started, 1),
        "curve": curve,
    }


def against(
    values: Mapping[int, float], reference: Mapping[int, float]
) -> Difference | float | None:
    """Change over the seeds in both: `simulations.difference`; only its mean for few seeds, None
    without any.
    """
    seeds = sorted(values.keys() & reference.keys())
    if not seeds:
        return None
    own, other = [values[seed] for seed in seeds], [reference[seed] for seed in seeds]
    return (
        difference(own, other)
        if len(seeds) >= LEAST_SEEDS
        else statistics.fmean(own) - statistics.fmean(other)
    )


CHANGE = ("change", "95 % interval", "p")
"""Header of the cells of `change`."""


def change(values: Mapping[int, float], reference: Mapping[int, float]) -> list[str]:
    """`against` as cells of a table."""
    found = against(values, reference)
    if found is None:
        return ["", "", ""]
    if isinstance(found, float):
        return [f"{found:+.2f}", "", ""]
    return [f"{found.mean:+.2f}", f"{found.low:+.2f} to {found.high:+.2f}", f"{found.p:.2g}"]
