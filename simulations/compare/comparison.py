"""A set of runs that differ in mechanism, budget, partition and seed (`jobs`), and what it shows side by side.

Every run is a folder of its own. The set is started again with the same command: finished runs are read, an interrupted
one is continued, the rest is run.

No two runs share their noise: from two models that were released with the same noise at different scales it could be
taken off. Without a seed every run has keys from the operating system, with one its keys are derived from the seed and
everything that the run does.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from fedlgm.errors import ConfigError, FedlgmError, LedgerError, RunError
from fedlgm.privacy import accounting
from fedlgm.privacy.events import is_private
from fedlgm.privacy.ledger import Ledger
from simulations import launch
from simulations.compare.jobs import Job
from simulations.compare.noise import model_noise
from simulations.compare.rows import (
    ComparedCell,
    ComparedDifference,
    ComparedFigures,
    ComparedRun,
    Comparison,
    FailedRun,
    JointCost,
    by_cell,
    score,
)
from simulations.config.recipe import Recipe
from simulations.reports.headline import headline
from simulations.runs import strict_json
from simulations.runs.folder import RunFolder
from simulations.runs.rows import FullRow
from simulations.studies.statistics import difference

LAST = 5  # evaluated rounds that a run's figures are averaged over, as in the LaDP-FL paper
OnRow = Callable[[Job, FullRow], None]


def run(todo: Sequence[Job], out: Path, engine: launch.Engine = "local", on_row: OnRow | None = None) -> dict[str, str]:
    """Bring every run of a set to its end; one that fails after it has begun does not keep the others from theirs.

    A run that diverged is not tried again; one that failed otherwise is, when the set is started again.

    Args:
        todo: the set.
        out: folder of the run folders.
        engine: what trains.
        on_row: called with each round's metrics row; finished runs report their rows too.

    Returns:
        Why runs failed, by name of their folder.

    Raises:
        ConfigError: `out` holds a run of the same name that does something else.
        FedlgmError: what keeps a run from being begun: a mistake in what was asked for.
        LedgerError: what a run has spent is not known.
        RunError: something that is not a run has the name of one; a run that lost its recipe, for example, whose
            ledger must not be lost, too.
    """
    out.mkdir(parents=True, exist_ok=True)
    failed: dict[str, str] = {}
    for job in todo:
        path = out / job.folder
        if path.is_dir() and all(inner.is_dir() and not inner.is_symlink() for inner in path.rglob("*")):
            shutil.rmtree(path)  # empty folders alone; whatever holds a file may be a run's, which has spent something

        def report(row: FullRow, job: Job = job) -> None:
            if on_row is not None:
                on_row(job, row)

        if not path.exists():
            try:
                launch.simulate(job.recipe, engine=engine, run_dir=path, progress=report)
            except FedlgmError as error:
                if not path.exists() or isinstance(error, LedgerError):
                    raise
                failed[job.folder] = str(error)
            continue
        folder = RunFolder.open(path)
        if not _same(folder.recipe(), job.recipe):
            raise ConfigError(f"{path} holds another run than the one asked for: choose another --out")
        for row in folder.rows():
            report(row)
        diverged = folder.diverged.read()
        if diverged is not None:
            folder.verify()
            failed[job.folder] = str(diverged)
            continue
        try:
            launch.resume(path, engine=engine, progress=report)
        except LedgerError:
            raise
        except FedlgmError as error:
            failed[job.folder] = str(error)
    return failed


def summarise(todo: Sequence[Job], out: Path, failed: Mapping[str, str] | None = None) -> Comparison:
    """Figures of a finished set: every run, every cell (method, budget, partition) and tests against the first method.

    A run's accuracy (or what else is its task's headline, under that name) is the mean over its last five evaluated
    rounds, or over as many as there are; its noise scale is the sum over the rounds of the l2 norm of the noise in the
    round's mean; its model noise that of the noise in all means together. A cell has mean and standard deviation over
    its repetitions. It is compared with the first method's cell of the same budget and partition by
    `simulations.difference`: repetitions of one number share their start, so they are paired, from two on.

    `together` says what all runs cost whoever publishes them side by side: they use the same clients' data. What failed
    runs have released counts there; they have no other figures.

    Args:
        todo: the set.
        out: folder of the run folders.
        failed: what `run` has returned.

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
    """Mean and standard deviation over a cell's repetitions, the privacy of the worst of them."""
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


def together(done: Sequence[Job], out: Path) -> JointCost:
    """What all runs of a set cost together, by composition over everything that was released from the data.

    A run's worst-off participant stands for all of its participants; the events of all runs are composed. Releases that
    protect different things have no joint figure: other units, other relations, or clients that hold other data.
    """
    events: list[tuple[Any, int]] = []
    protected_runs = 0
    protections = set()
    for job in done:
        protections.add(f"{job.recipe.unit}, {job.recipe.relation}")
        with Ledger(out / job.folder / "ledger.sqlite") as ledger:
            own = ledger.worst_profile()
        if all(is_private(event) for event, _ in own):
            protected_runs += 1
            events += own
    delta = max(job.recipe.privacy.delta for job in done)
    why = None
    if len(protections) > 1:
        why = f"the runs protect different things ({'; '.join(sorted(protections))}), whose epsilons do not add up"
    elif len({(job.partition, job.recipe.federation.clients) for job in done}) > 1 and any(
        job.recipe.unit == "client" for job in done
    ):
        why = "a client holds other data in each partition, so there is no client whose epsilons add up"
    protected = None if why else accounting.composed_epsilon(events, delta) if events else 0.0
    return {
        "epsilon": protected if protected_runs == len(done) else float("inf"),
        "epsilon_protected": protected,
        "why": why,
        "runs": len(done),
        "runs_protected": protected_runs,
        "delta": delta,
    }


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
    """One line per cell of which runs have failed."""
    told = []
    for method, epsilon, partition in dict.fromkeys((job.method, job.epsilon, job.partition) for job in todo):
        own = [job.folder for job in todo if (job.method, job.epsilon, job.partition) == (method, epsilon, partition)]
        why = [failed[name] for name in own if name in failed]
        if why:
            cell = f"{method} ({partition}{'' if epsilon is None else f', epsilon {epsilon:g}'})"
            told.append(f"{cell}: {len(why)} of {len(own)} runs failed and are left out: {why[0]}")
    return told


def _caveats(cells: list[ComparedCell]) -> list[str]:
    """What the figures do not have: enough evaluated rounds, enough repetitions."""
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
    rows, result = folder.rows(private=True), folder.result() or {}
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
    """The first method's cell of the same budget and partition; None for that cell itself, or where there is none."""
    for other in cells:
        same = other["partition"] == cell["partition"] and other["epsilon_budget"] == cell["epsilon_budget"]
        if other["method"] == first and same:
            return None if other is cell else other
    return None


def _difference(reference: Mapping[int, float], values: Mapping[int, float]) -> ComparedDifference | None:
    """The first method's figures less another's, over the repetitions that both have figures of."""
    both = [number for number in values if number in reference]
    both = [number for number in both if np.isfinite([reference[number], values[number]]).all()]
    if len(both) < 2:
        return None
    found = difference([reference[number] for number in both], [values[number] for number in both])
    return {"mean": found.mean, "low": found.low, "high": found.high, "p": found.p, "seeds": found.seeds}


def _same(stored: Recipe, wanted: Recipe) -> bool:
    """Whether a stored run is the one asked for; what was "auto" may have been settled when it started."""
    wanted = wanted.model_copy(update={"title": stored.title})  # words
    settled_at_start = (
        ("training", "vectorize"),
        ("training", "compile"),
        ("training", "device"),
        ("privacy", "noise_backend"),
    )
    for section, key in settled_at_start:
        own = getattr(wanted, section)
        if getattr(own, key) == "auto":
            settled = own.model_copy(update={key: getattr(getattr(stored, section), key)})
            wanted = wanted.model_copy(update={section: settled})
    return stored == wanted
