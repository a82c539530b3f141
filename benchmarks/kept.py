"""Runs of recipes whose figures are kept in a JSON file, so that a benchmark goes on where it was stopped."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

import simulations

Row = dict[str, Any]
LEAST_SEEDS = 3
"""Seeds below which no p-value is given."""


class Kept:
    """Figures of finished runs, each under what names the run; written as soon as there is a new one.

    Args:
        path: JSON file, made when it is first needed: a list of rows, one run a line.
        minutes: processor time of this process after which no run is started.
    """

    def __init__(self, path: Path, minutes: float = float("inf")) -> None:
        self._path, self._minutes = path, minutes
        self.rows: list[Row] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []

    def find(self, **name: Any) -> list[Row]:
        """The rows that have these values."""
        return [row for row in self.rows if all(row.get(key) == value for key, value in name.items())]

    def measure(self, name: Mapping[str, Any], recipe: str, overrides: Iterable[str]) -> Row | None:
        """The row of that name; a run is made if there is none, unless the time is spent: then None."""
        found = self.find(**name)
        if found:
            return found[0]
        if time.process_time() > 60 * self._minutes:
            return None
        row = {**name, **figures(recipe, overrides, int(name["seed"]))}
        self.rows.append(row)
        text = ",\n".join(json.dumps(own) for own in self.rows)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        part = self._path.with_suffix(".part")
        part.write_text(f"[\n{text}\n]\n", encoding="utf-8")
        part.replace(self._path)
        print(json.dumps({key: value for key, value in row.items() if key != "curve"}), flush=True)
        return row


def figures(recipe: str, overrides: Iterable[str], seed: int) -> Row:
    """One run in this process: its headline in per cent (or as it is) at the end, at its best and on the way.

    The seed is that of the initial model, the division of the data, the cohorts and the noise.

    Returns:
        "final", "highest" and "late" (mean over the last five evaluated rounds), the "curve" of evaluated rounds, the
        proven "epsilon", and processor "seconds".
    """
    own = [f"run.seed={seed}", f"data.partition_seed={seed}", "run.checkpoint_every=1000000", "run.trackers=[]"]
    started = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        result = simulations.simulate(recipe, overrides=[*overrides, *own], run_dir=Path(folder) / "run")
        name = str(result["headline"])
        scale = 100.0 if name == "accuracy" else 1.0
        curve = [round(scale * row["metrics"][name], 3) for row in result.history if "metrics" in row]
    return {
        "final": curve[-1],
        "highest": max(curve) if name == "accuracy" else min(curve),
        "late": round(statistics.fmean(curve[-5:]), 3),
        "epsilon": round(result.epsilon, 6),
        "guarantee": result["guarantee_status"],
        "seconds": round(time.process_time() - started, 1),
        "curve": curve,
    }


def against(values: Mapping[int, float], reference: Mapping[int, float]) -> tuple[float, float | None] | None:
    """Mean change over the seeds in both, and the p-value of a two-sided paired t test from three seeds on."""
    change = np.array([values[seed] - reference[seed] for seed in sorted(values.keys() & reference.keys())])
    if not len(change):
        return None
    tested = len(change) >= LEAST_SEEDS and change.std() > 0
    return float(change.mean()), float(stats.ttest_1samp(change, 0.0).pvalue) if tested else None


def change(values: Mapping[int, float], reference: Mapping[int, float]) -> list[str]:
    """`against` as two cells of a table."""
    found = against(values, reference)
    if found is None:
        return ["", ""]
    return [f"{found[0]:+.2f}", "" if found[1] is None else f"{found[1]:.2g}"]
