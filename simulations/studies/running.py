"""Completes the runs of a study, in this process or in worker processes, without repeating finished ones.

Every run has a separate folder. If a set is started again with the same arguments, finished runs are read, an
interrupted one is continued, and the others are run.

No two runs share noise, because a reader of two models with the same noise at different scales could subtract it.
Without a seed every run has keys from the operating system; with a seed its keys are derived from the seed and all
settings of the run.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedlgm.errors import ConfigError, DiskError, FedlgmError, LedgerError, RunError
from simulations import launch
from simulations.config.recipe import Recipe
from simulations.runs.folder import RunFolder
from simulations.runs.rows import FullRow
from simulations.studies.jobs import Job

OnRow = Callable[[Job, FullRow], None]
OnEnd = Callable[[Job], None]


@dataclass(frozen=True)
class Ended:
    """Outcome of a run.

    Attributes:
        why: reason why it has no figures; None if it is finished.
        refused: reason why it could not be started.
    """

    why: str | None = None
    refused: FedlgmError | None = None


def run(
    todo: Sequence[Job],
    out: Path,
    engine: str = "local",
    on_row: OnRow | None = None,
    workers: int | str = 1,
    on_end: OnEnd | None = None,
) -> dict[str, str]:
    """Complete every run of a set. A failed run does not stop the others, except where files cannot be written.

    If the set is started again, a diverged run is not repeated, but a run that failed otherwise, or was refused, is.

    Args:
        todo: the set.
        out: folder of the run folders.
        engine: engine that trains, if the runs follow each other in this process.
        on_row: called with each round's metrics row, also of finished runs, but not for runs in other processes.
        workers: processes that take one run each, or the address of a Ray cluster, whose CPUs take one each; its
            machines must then share the storage of `out`.
        on_end: called with each run that has ended.

    Returns: The reasons why runs have no figures, by name of their folder.

    Raises:
        ConfigError: `out` holds a run of the same name with other settings.
        FedlgmError: a mistake in the arguments prevents every run.
        LedgerError: a run's spending is unknown.
        DiskError: a run's files cannot be written.
        RunError: the folder cannot be made, or something that is not a run has the name of a run, for example a run
            that lost its recipe but still holds its ledger.
    """
    there = out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"cannot make the folder {out}: {error.strerror}") from error
    ended = {}
    for job, how in _outcomes(todo, out, engine, on_row, workers):
        ended[job.folder] = how
        if on_end is not None:
            on_end(job)
    refusals = [how.refused for how in ended.values() if how.refused is not None]
    if len(refusals) == len(todo):
        if not there:
            with suppress(OSError):
                out.rmdir()
        raise refusals[0]
    return {job.folder: why for job in todo if (why := ended[job.folder].why) is not None}


def bring(job: Job, out: Path, engine: str = "local", on_row: OnRow | None = None) -> Ended:
    """Complete one run; the arguments and errors are those of `run`."""
    if job.refused:
        return Ended(job.refused, ConfigError(job.refused))
    path = out / job.folder
    if path.is_dir() and all(inner.is_dir() and not inner.is_symlink() for inner in path.rglob("*")):
        shutil.rmtree(path)  # only empty folders; one with a file may be a run's, which has spent something

    def report(row: FullRow) -> None:
        if on_row is not None:
            on_row(job, row)

    started = path.exists()
    if started:
        folder = RunFolder.open(path)
        if not _same(folder.recipe(), job.recipe):
            raise ConfigError(
                f"{path} holds a different run from the requested one: choose another --out (in Python: folder)"
            )
        for row in folder.rows():
            report(row)
        diverged = folder.diverged.read()
        if diverged is not None:
            folder.verify()
            return Ended(str(diverged))
    try:
        if started:
            launch.resume(path, engine=engine, progress=report, own=job.own)
        else:
            launch.simulate(job.recipe, engine=engine, run_dir=path, progress=report, own=job.own)
    except (LedgerError, DiskError):  # a set is not complete without them, or no further run can be
        raise
    except FedlgmError as error:
        return Ended(str(error), None if path.exists() else error)
    return Ended()


def _unfinished(job: Job, out: Path) -> bool:
    path = out / job.folder
    return not ((path / "result.json").is_file() or (path / "diverged.json").is_file())


def _outcomes(
    todo: Sequence[Job], out: Path, engine: str, on_row: OnRow | None, workers: int | str
) -> Iterator[tuple[Job, Ended]]:
    """Yield the runs with their outcomes: those that need no other process, then the others, as they end."""
    from simulations.studies import processes

    away = {} if workers == 1 else {job.folder: job for job in todo if not job.refused and _unfinished(job, out)}
    if away and engine != "local":
        raise ConfigError(f"engine {engine!r} spreads each run over the machine: leave out workers, or the engine")
    for job in todo:
        if job.folder not in away:
            yield job, bring(job, out, engine, on_row)
    if away and isinstance(workers, str):
        yield from processes.on_cluster(list(away.values()), out.resolve(), workers)
    elif away and not isinstance(workers, str):
        yield from processes.on_this_machine(list(away.values()), out.resolve(), min(workers, len(away)))


def _same(stored: Recipe, wanted: Recipe) -> bool:
    """Whether a stored run is the requested one; an "auto" may have been resolved when it started."""
    settled_at_start = (
        ("training", "vectorize"),
        ("training", "compile"),
        ("training", "kernel"),
        ("training", "device"),
        ("privacy", "noise_backend"),
    )
    found, asked = stored.model_dump(), wanted.model_dump()
    asked["title"] = found["title"]  # words
    for section, key in settled_at_start:
        if asked[section][key] == "auto":
            asked[section][key] = found[section][key]
    return found == asked
