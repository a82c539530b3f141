"""A finished set of runs side by side, by method, budget and partition, as `fedlgm compare` prints it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np

from fedlgm.errors import RunError
from simulations.reports.headline import headline
from simulations.runs import strict_json
from simulations.runs.folder import RunFolder
from simulations.studies.jobs import Job
from simulations.studies.joint import together
from simulations.studies.noise import model_noise
from simulations.studies.rows import (
    ComparedCell,
    ComparedDifference,
    ComparedFigures,
    ComparedRun,
    Comparison,
    FailedRun,
    by_cell,
    score,
)
from simulations.studies.statistics import difference

LAST = 5  # evaluated rounds that a run's figures are averaged over, as in the LaDP-FL paper


def summarise(todo: Sequence[Job], out: Path, failed: Mapping[str, str] | None = None) -> Comparison:
    """Figures of a finished set: every run, every cell (method, budget, partition) and tests against the first method.

    A run's accuracy (or its task's headline, under that name) is the mean over its last five evaluated rounds, or over
    all if there are fewer; its noise scale is the sum over the rounds of the l2 norm of the noise in the round's mean;
    its model noise that of the noise in all means together. A cell has mean and standard deviation over its
    repetitions. It is compared with the first method's cell of the same budget and partition by
    `simulations.difference`: repetitions with the same number share their start, so they are paired, if there are at
    least two.

    `together` is the cost of publishing all runs side by side, since they use the same clients' data. It includes the
    releases of failed runs, which have no other figures.

    Args:
        todo: the set.
        out: folder of the run folders.
        failed: the result of `simulations.studies.running.run`.

    Raises:
        RunError: every run has failed.
    """
    failed = failed or {}
    done = [job for job in todo if job.folder not in failed]
    if not done:
        name, why = next(iter(failed.items()))
        raise RunError(f"no run of the comparison is finished; {name}: {why}")
    runs = [_run_figures(job, out / job.folder) for job in done]
    cells = [_cell(own) for own in by_cell(runs)]
    for cell in cells:
        reference = _reference(todo[0].method, cells, cell)
        cell["differences"] = {
            name: None if reference is None else _difference(reference["last"][name], values)
            for name, values in cell["last"].items()
        }
    for record in (*runs, *cells):
        del record["last"]
    summary: Comparison = {
        "methods": list(dict.fromkeys(job.method for job in todo)),
        "out": str(out),
        "runs": runs,
        "cells": cells,
        "failed": [_failed_run(job, out, failed[job.folder]) for job in todo if job.folder in failed],
        "together": together(todo, out),
        "caveats": [*_failures(todo, failed), *_caveats(cells)],
    }
    # Wall times show how many clients took part: who runs the comparison sees them, its file does not keep them.
    kept = summary | {"runs": [_without_times(row) for row in runs], "cells": [_without_times(row) for row in cells]}
    (out / "compare.json").write_text(strict_json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return summary


def _cell(runs: list[ComparedRun]) -> ComparedCell:
    """Mean and standard deviation over a cell's repetitions, with their largest epsilons."""
    first = runs[0]
    cell: ComparedCell = {
        "method": first["method"],
        "epsilon_budget": first["epsilon_budget"],
        "partition": first["partition"],
        "seeds": len(runs),
        "averaged_rounds": min(run["averaged_rounds"] for run in runs),
        "headline": first["headline"],
        "better": first["better"],
    }
    spreads: dict[str, float] = {}
    for name, values in (
        (first["headline"], [score(run) for run in runs]),
        ("noise_scale", [run["noise_scale"] for run in runs]),
        ("model_noise", [run["model_noise"] for run in runs]),
        ("seconds", [run["seconds"] for run in runs]),
    ):
        deviation = float(np.std(values, ddof=1)) if len(runs) > 1 else 0.0
        spreads |= {name: float(np.mean(values)), f"{name}_std": deviation}
    cell.update(cast(ComparedCell, spreads))
    cell.update(
        {
            "epsilon": max(run["epsilon"] for run in runs),
            "claimed_epsilon": max(run["claimed_epsilon"] for run in runs),
            "delta": first["delta"],
            "guarantee": first["guarantee"],
            "guarantee_status": first["guarantee_status"],
            "noise_reproducible": first["noise_reproducible"],
            "last": {
                name: {number: mean for run in runs for number, mean in run["last"][name].items()}
                for name in first["last"]
            },
        }
    )
    return cell


def _without_times(row: ComparedFigures) -> dict[str, object]:
    return {name: value for name, value in row.items() if not name.startswith("seconds")}


def _failed_run(job: Job, out: Path, message: str) -> FailedRun:
    return {
        "method": job.method,
        "epsilon_budget": job.epsilon,
        "partition": job.partition,
        "repetition": job.repetition,
        "message": message,
        "run": str(out / job.folder),
    }


def _failures(todo: Sequence[Job], failed: Mapping[str, str]) -> list[str]:
    """One line per cell with failed runs."""
    told = []
    for method, epsilon, partition in dict.fromkeys((job.method, job.epsilon, job.partition) for job in todo):
        own = [job.folder for job in todo if (job.method, job.epsilon, job.partition) == (method, epsilon, partition)]
        why = [failed[name] for name in own if name in failed]
        if why:
            cell = f"{method} ({partition}{'' if epsilon is None else f', epsilon {epsilon:g}'})"
            told.append(f"{cell}: {len(why)} of {len(own)} runs failed and are left out: {why[0]}")
    return told


def _caveats(cells: list[ComparedCell]) -> list[str]:
    """Caveats of the figures: too few evaluated rounds or repetitions."""
    told = []
    least = min(cell["averaged_rounds"] for cell in cells)
    if least < LAST:
        rounds = "one evaluated round" if least == 1 else f"{least} evaluated rounds"
        told.append(f"{cells[0]['headline']} is averaged over {rounds}: there are not {LAST}")
    if min(cell["seeds"] for cell in cells) < 2:
        told.append("no differences between methods: they need at least two repetitions of both (--seeds)")
    return told


def _run_figures(job: Job, path: Path) -> ComparedRun:
    folder = RunFolder.open(path)
    rows, result = folder.rows(private=True), folder.finished()
    noise = np.cumsum([row["noise_scale"] for row in rows])
    seen = [(row, float(total)) for row, total in zip(rows, noise, strict=True) if "loss" in row][-LAST:]
    name, final = headline(result)
    figures = [headline(row)[1] for row, _ in seen]
    made: ComparedRun = {
        "method": job.method,
        "epsilon_budget": job.epsilon,
        "partition": job.partition,
        "repetition": job.repetition,
        "averaged_rounds": len(seen),
        "headline": name,
        "better": job.recipe.task.build().better,
    }
    made.update(cast(ComparedRun, {name: float(np.mean(figures)), f"final_{name}": final}))
    made.update(
        {
            "noise_scale": float(noise[-1]),
            "model_noise": float(model_noise(folder, rows)[-1]),
            "seconds": float(statistics.median([row["seconds"] for row in rows if "seconds" in row] or [0.0])),
            "skipped_rounds": sum(bool(row.get("skipped")) for row in rows),
            "epsilon": result["epsilon"],
            "claimed_epsilon": result["claimed_epsilon"],
            "delta": result["delta"],
            "guarantee": result["guarantee"],
            "guarantee_status": result["guarantee_status"],
            "noise_reproducible": result["noise_reproducible"],
            "run": str(path),
            "last": {
                name: {job.repetition: float(np.mean(figures))},
                "noise_scale": {job.repetition: float(np.mean([total for _, total in seen]))},
                "claimed_epsilon": {job.repetition: float(np.mean([row["claimed_epsilon"] for row, _ in seen]))},
            },
        }
    )
    return made


def _reference(first: str, cells: list[ComparedCell], cell: ComparedCell) -> ComparedCell | None:
    """The first method's cell of the same budget and partition; None for that cell itself, or if there is none."""
    for other in cells:
        same = other["partition"] == cell["partition"] and other["epsilon_budget"] == cell["epsilon_budget"]
        if other["method"] == first and same:
            return None if other is cell else other
    return None


def _difference(reference: Mapping[int, float], values: Mapping[int, float]) -> ComparedDifference | None:
    """The first method's figures less another's, over the repetitions for which both have figures."""
    both = [number for number in values if number in reference]
    both = [number for number in both if np.isfinite([reference[number], values[number]]).all()]
    if len(both) < 2:
        return None
    found = difference([reference[number] for number in both], [values[number] for number in both])
    return {"mean": found.mean, "low": found.low, "high": found.high, "p": found.p, "seeds": found.seeds}
