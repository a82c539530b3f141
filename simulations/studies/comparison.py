"""A finished set of runs side by side, by method, budget and partition, as `fedlgm compare` prints it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np

from fedlgm.errors import RunError
from simulations.reports.headline import headline
from simulations.runs import strict_json
from simulations.runs.folder import RunFolder
from simulations.studies.jobs import Job
from simulations.studies.joint import together
from simulations.studies.noise import model_noise
from simulations.studies.rows import Row, cells_of, keys_of
from simulations.studies.statistics import difference

LAST = 5  # evaluated rounds that a run's figures are averaged over, as in the LaDP-FL paper
_NOISES = ("noise_scale", "model_noise", "seconds")


def summarise(todo: Sequence[Job], out: Path, failed: Mapping[str, str] | None = None) -> Row:
    """Figures of a finished set: every run, every cell (method, budget, partition) and tests against the first method.

    A run's accuracy (or its task's headline, under that name) is the mean over its last five evaluated rounds, or over
    all if there are fewer; its noise scale is the sum over the rounds of the l2 norm of the noise in the round's mean;
    its model noise that of the noise in all means together; its seconds are the median of a round. A cell has mean and
    standard deviation (NAME_std) over its repetitions and the largest of their epsilons. It is compared with the first
    method's cell of the same budget and partition by `simulations.difference`: repetitions with the same number share
    their start, so they are paired, if there are at least two.

    `together` is the cost of publishing all runs side by side, since they use the same clients' data. It includes the
    releases of failed runs, which have no other figures.

    Args:
        todo: the set.
        out: folder of the run folders; `compare.json` is written there.
        failed: the result of `simulations.studies.running.run`.

    Returns:
        `methods` in the requested order, `out`, `runs`, `cells`, `failed`, `together` (a `JointCost`) and `caveats`.

    Raises:
        RunError: every run has failed.
    """
    failed = failed or {}
    done = [job for job in todo if job.folder not in failed]
    if not done:
        name, why = next(iter(failed.items()))
        raise RunError(f"no run of the comparison is finished; {name}: {why}")
    runs = [_run_figures(job, out / job.folder) for job in done]
    found = cells_of(runs, (runs[0]["headline"], *_NOISES))
    reference = {
        (cell["epsilon_budget"], cell["partition"]): own for cell, own in found if cell["method"] == todo[0].method
    }
    cells = []
    for cell, own in found:
        first = reference.get((cell["epsilon_budget"], cell["partition"]))
        cell |= {key: own[0][key] for key in ("headline", "better", "noise_reproducible")}
        cell["averaged_rounds"] = min(run["averaged_rounds"] for run in own)
        cell["differences"] = {
            name: None if first is None or first is own else _difference(first, own, name) for name in own[0]["last"]
        }
        cells.append(cell)
    for run in runs:
        del run["last"]
    summary = {
        "methods": list(dict.fromkeys(job.method for job in todo)),
        "out": str(out),
        "runs": runs,
        "cells": cells,
        "failed": [
            keys_of(job) | {"message": failed[job.folder], "run": str(out / job.folder)}
            for job in todo
            if job.folder in failed
        ],
        "together": together(todo, out),
        "caveats": [*_failures(todo, failed), *_caveats(cells)],
    }
    # Wall times show how many clients took part: who runs the comparison sees them, its file does not keep them.
    kept = summary | {"runs": [_without_times(row) for row in runs], "cells": [_without_times(row) for row in cells]}
    strict_json.write(out / "compare.json", kept, indent=1)
    return summary


def _without_times(row: Row) -> Row:
    return {name: value for name, value in row.items() if not name.startswith("seconds")}


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


def _caveats(cells: list[Row]) -> list[str]:
    """Caveats of the figures: too few evaluated rounds or repetitions."""
    told = []
    least = min(cell["averaged_rounds"] for cell in cells)
    if least < LAST:
        rounds = "one evaluated round" if least == 1 else f"{least} evaluated rounds"
        told.append(f"{cells[0]['headline']} is averaged over {rounds}: there are not {LAST}")
    if min(cell["seeds"] for cell in cells) < 2:
        told.append("no differences between methods: they need at least two repetitions of both (--seeds)")
    return told


def _run_figures(job: Job, path: Path) -> Row:
    folder = RunFolder.open(path)
    rows, result = folder.rows(private=True), folder.finished()
    noise = np.cumsum([row["noise_scale"] for row in rows])
    seen = [(row, float(total)) for row, total in zip(rows, noise, strict=True) if "loss" in row][-LAST:]
    name, final = headline(result)
    last = {
        name: float(np.mean([headline(row)[1] for row, _ in seen])),
        "noise_scale": float(np.mean([total for _, total in seen])),
        "claimed_epsilon": float(np.mean([row["claimed_epsilon"] for row, _ in seen])),
    }
    spent = ("epsilon", "claimed_epsilon", "delta", "guarantee", "guarantee_status", "noise_reproducible")
    return {
        **keys_of(job),
        "averaged_rounds": len(seen),
        "headline": name,
        "better": job.recipe.task.build().better,
        name: last[name],
        f"final_{name}": final,
        "noise_scale": float(noise[-1]),
        "model_noise": float(model_noise(folder, rows)[-1]),
        "seconds": float(statistics.median([row["seconds"] for row in rows if "seconds" in row] or [0.0])),
        "skipped_rounds": sum(bool(row.get("skipped")) for row in rows),
        **{key: result[key] for key in spent},  # type: ignore[literal-required]
        "run": str(path),
        "last": last,
    }


def _difference(first: Sequence[Row], own: Sequence[Row], name: str) -> dict[str, float] | None:
    """The first method's figures less another's, over the repetitions for which both have figures."""
    ours, theirs = ({run["repetition"]: run["last"][name] for run in runs} for runs in (first, own))
    both = [number for number in theirs if np.isfinite([ours.get(number, np.nan), theirs[number]]).all()]
    if len(both) < 2:
        return None
    return asdict(difference([ours[number] for number in both], [theirs[number] for number in both]))
