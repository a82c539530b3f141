"""Completes the runs of a study in this process or in worker processes. Finished runs are not
repeated.

Every run has a separate folder. If a set of runs is started again with the same arguments, finished
runs are read, interrupted runs are continued, and the remaining runs are started.

No two runs share noise, because someone who holds two models with the same noise at different
scales could remove the noise by subtraction. Without a seed, a run's noise keys come from the
operating system; with a seed, they are derived from the seed and all settings of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from fedlgm.errors import ConfigError, RunError
from fedlgm.files import explain_failure
from fedlgm_lab.studies import run_processes as processes
from fedlgm_lab.studies.jobs import Job
from fedlgm_lab.studies.one_run import Ended, OnRow, bring

OnEnd = Callable[[Job], None]


def run(
    todo: Sequence[Job],
    out: Path,
    engine: str = "local",
    on_row: OnRow | None = None,
    workers: int | str = 1,
    on_end: OnEnd | None = None,
) -> dict[str, str]:
    """Complete every run of a set.

    A failed run does not stop the other runs, unless the run's spending is unknown or files cannot
    be written.

    If the set is started again, a diverged run is not repeated. A run that failed in another way,
    or that was refused, is repeated.

    Args:
        todo: the runs of the set.
        out: folder of the run folders.
        engine: engine that trains the models if the runs are completed one after another in this
            process.
        on_row: called with each round's metrics row. This includes the rows of finished runs, but
            not those of runs in other processes.
        workers: number of processes that take one run each; or the address of a Ray cluster, on
            which each CPU takes one run. The machines of the cluster must share the storage of
            `out`.
        on_end: called with each run when it has ended.

    Returns:
        The reason why a run has no figures, by name of the run's folder; runs with figures are not
        listed.

    Raises:
        ConfigError: `out` holds a run of the same name with other settings or objects.
        FedlgmError: a mistake in the arguments prevents every run.
        LedgerError: a run's spending is unknown.
        DiskError: a run's files cannot be written.
        RunError: the folder cannot be made, or something that is not a run has the name of a run,
            for example a run that lost its recipe but still holds its ledger.
    """
    there = out.exists()
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(explain_failure(f"cannot make the folder {out}", error)) from error
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


def _is_unfinished(job: Job, out: Path) -> bool:
    path = out / job.folder
    return not ((path / "result.json").is_file() or (path / "diverged.json").is_file())


def _outcomes(
    todo: Sequence[Job], out: Path, engine: str, on_row: OnRow | None, workers: int | str
) -> Iterator[tuple[Job, Ended]]:
    """Yield runs with their outcomes: first the runs that need no other process, then the remaining
    runs as they end.

    Finished runs come first, then interrupted runs. A folder that holds a run with other settings
    or objects ends the set, and such a folder should be found before a new run spends budget.
    """
    todo = sorted(todo, key=lambda job: (_is_unfinished(job, out), not (out / job.folder).exists()))
    away = (
        {}
        if workers == 1
        else {job.folder: job for job in todo if not job.refused and _is_unfinished(job, out)}
    )
    if away and engine != "local":
        raise ConfigError(
            f"engine {engine!r} spreads each run over the machine: omit workers or the engine"
        )
    for job in todo:
        if job.folder not in away:
            yield job, bring(job, out, engine, on_row)
    if away and isinstance(workers, str):
        yield from processes.on_cluster(list(away.values()), out.resolve(), workers)
    elif away and not isinstance(workers, str):
        yield from processes.on_this_machine(
            list(away.values()), out.resolve(), min(workers, len(away))
        )
