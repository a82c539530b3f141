"""Stores figures in JSON files, so that interrupted measurements can be continued."""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd

import simulations
from fedlgm.errors import ConfigError, DivergedError
from fedlgm_lab.studies.statistics import Difference, difference
from simulations.config import recipe as recipes
from simulations.config.overrides import Overrides, settings

Row = dict[str, Any]
LEAST_SEEDS = 3
"""Number of seeds below which the pages of results state no p-value."""


class OutOfTimeError(Exception):
    """The time that `--set minutes` allows is over. The figures that were measured are on disk."""


class _Store:
    """A JSON file of figures, which is created when the first figure is written.

    Args:
        path: the file.
        settings: "minutes", the processor time after which nothing more is measured, and other
            inputs of the figures.

    Raises:
        ConfigError: the minutes are not a number.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any] | None = None) -> None:
        self.path, self.folder, self.settings = path, path.parent, dict(settings or {})
        self._minutes = self.settings.get("minutes", math.inf)
        if not isinstance(self._minutes, (int, float)):
            raise ConfigError(f"--set minutes takes a number, got {self._minutes!r}")

    def check_time(self) -> None:
        """Raise an error if the time is over.

        Raises:
            OutOfTimeError: the time is over.
        """
        if time.process_time() >= 60 * self._minutes:
            raise OutOfTimeError

    def input(self, name: str, what: str) -> Any:
        """Return a setting that the figures need.

        Raises:
            ConfigError: the setting is missing.
            OutOfTimeError: the time is over.
        """
        self.check_time()
        if name not in self.settings:
            raise ConfigError(f"{self.path.stem} needs --set {name}=...: {what}")
        return self.settings[name]

    def _read(self, empty: Any) -> Any:
        return json.loads(self.path.read_text(encoding="utf-8")) if self.path.is_file() else empty

    def _write(self, text: str) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(text, encoding="utf-8")
        part.replace(self.path)


class Kept(_Store):
    """The figures of finished runs, as a list of rows in a JSON file with one run per line. The
    keys of a row that name the run are chosen by the caller. The file is written after every run.
    """

    def __init__(self, path: Path, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(path, settings)
        self.rows: list[Row] = self._read([])

    def find(self, **name: Any) -> list[Row]:
        """List the rows that have these values."""
        return [
            row for row in self.rows if all(row.get(key) == value for key, value in name.items())
        ]

    def measure(self, name: Mapping[str, Any], recipe: str, overrides: Overrides) -> Row:
        """Return the row with a name; if there is no such row, make the run.

        Raises:
            OutOfTimeError: there is no such row, and the minutes are over.
        """
        return self.keep(name, lambda: figures(recipe, overrides, int(name["seed"])))

    def keep(self, name: Mapping[str, Any], make: Callable[[], Row]) -> Row:
        """Return the row with a name; if there is no such row, compute its figures with `make`.

        Raises:
            OutOfTimeError: there is no such row, and the minutes are over.
        """
        rows = self.find(**name)
        if rows:
            return rows[0]
        self.check_time()
        row = {**name, **make()}
        self.rows.append(row)
        text = ",\n".join(json.dumps(row) for row in self.rows)
        self._write(f"[\n{text}\n]\n")
        shown = {key: value for key, value in row.items() if key != "curve"}
        print(json.dumps(shown), file=sys.stderr, flush=True)
        return row


class Values(_Store):
    """Figures by name in a JSON file; each figure is measured once."""

    def __init__(self, path: Path, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(path, settings)
        self.values: dict[str, Any] = self._read({})

    def get(self, name: str, measure: Callable[[], Any]) -> Any:
        """Return the figure `name`; if it is missing, measure it.

        Raises:
            OutOfTimeError: the figure is missing, and the time is over.
        """
        if name not in self.values:
            self.check_time()
            started = time.process_time()
            self.values[name] = measure()
            self._write(json.dumps(self.values, indent=1) + "\n")
            seconds = time.process_time() - started
            print(f"{name}: {seconds:.0f} s of processor time", file=sys.stderr, flush=True)
        return self.values[name]


@contextmanager
def simulated(recipe: str | None = None, **given: Any) -> Iterator[simulations.RunResult]:
    """Yield the result of a run in this process (see `simulations.simulate`), and remove the run's
    folder afterwards.
    """
    with tempfile.TemporaryDirectory() as folder:
        yield simulations.simulate(recipe, run_dir=Path(folder) / "run", **given)


def figures(recipe: str, overrides: Overrides, seed: int, **parts: Any) -> Row:
    """Make one run in this process, and return its headline metric (accuracy in per cent) at the
    end, at its best and over the rounds.

    The seed determines the initial model, the division of the data, the cohorts and the noise.
    `parts` are further arguments of `simulations.simulate`.

    Returns:
        "final", "highest" and "late" (mean over the last five evaluated rounds), the "curve" of
        evaluated rounds, the proven "epsilon", and processor "seconds". A run that diverged has the
        worst possible figures, an empty curve and no epsilon.
    """
    changes = {
        **dict(settings(overrides)),
        "run.seed": seed,
        "data.partition_seed": seed,
        "run.checkpoint_every": 1000000,
        "run.trackers": [],
    }
    started = time.process_time()
    row: Row = {}
    try:
        with simulated(recipe, overrides=changes, **parts) as result:
            name = str(result["headline"])
            scale = 100.0 if name == "accuracy" else 1.0
            rows = [row for row in result.history[1:] if "metrics" in row]
            curve = [round(scale * row["metrics"][name], 3) for row in rows]
        row = {
            "final": curve[-1],
            "highest": max(curve) if name == "accuracy" else min(curve),
            "late": round(statistics.fmean(curve[-5:]), 3),
            "epsilon": round(result.epsilon, 6),
            "guarantee": result["guarantee_status"],
        }
    except DivergedError:
        better = recipes.load(recipe, changes).task.build().better
        worst, curve = 0.0 if better == "higher" else math.inf, []
        row = {**dict.fromkeys(("final", "highest", "late"), worst), "diverged": True}
    return row | {"seconds": round(time.process_time() - started, 1), "curve": curve}


def against(values: pd.Series, reference: pd.Series) -> Difference:
    """Compute the mean change of figures from a reference, over the seeds that both have. With
    fewer than `LEAST_SEEDS` seeds, there is no interval and no p-value.
    """
    both = pd.concat([values, reference], axis=1, join="inner", keys=["a", "b"])
    if len(both) >= LEAST_SEEDS:
        return difference(both["a"], both["b"])
    mean = float((both["a"] - both["b"]).mean())
    return Difference(mean, math.nan, math.nan, math.nan, len(both))


CHANGE = ("change", "95 % interval", "p")
"""Column titles of the cells that `change` makes."""


def change(values: pd.Series, reference: pd.Series) -> list[str]:
    """Format the result of `against` as cells of a table; the cells are empty if no seed is in
    both.
    """
    tested = against(values, reference)
    if math.isnan(tested.p):
        return ["" if math.isnan(tested.mean) else f"{tested.mean:+.2f}", "", ""]
    return [f"{tested.mean:+.2f}", f"{tested.low:+.2f} to {tested.high:+.2f}", f"{tested.p:.2g}"]
