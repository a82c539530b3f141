"""Starts, continues or reads one run of a study, in a folder by which later calls recognise the
run.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from fedlgm.errors import ConfigError, DiskError, FedlgmError, LedgerError, OtherObjectsError
from fedlgm_lab.studies.jobs import Job
from simulations import launch
from simulations.config.recipe import Recipe
from simulations.runs.folder import RunFolder
from simulations.runs.rows import FullRow

OnRow = Callable[[Job, FullRow], None]


@dataclass(frozen=True)
class Ended:
    """Outcome of a run.

    Attributes:
        why: reason why the run has no figures; None if it is finished.
        refused: error because of which the run could not be started; None if it was started.
    """

    why: str | None = None
    refused: FedlgmError | None = None


def bring(job: Job, out: Path, engine: str = "local", on_row: OnRow | None = None) -> Ended:
    """Complete one run; `running.run` explains the arguments and the further errors.

    Raises:
        ConfigError: the folder holds a run with other settings or objects.
    """
    if job.refused:
        return Ended(job.refused, ConfigError(job.refused))
    path = out / job.folder
    if path.is_dir() and all(
        inner.is_dir() and not inner.is_symlink() for inner in path.rglob("*")
    ):
        # remove the folder only if it holds no file, because a file may show that budget was spent
        shutil.rmtree(path)

    def report(row: FullRow) -> None:
        if on_row is not None:
            on_row(job, row)

    started = path.exists()
    if started:
        folder = RunFolder.open(path)
        if not _same(folder.recipe(), job.recipe):
            raise ConfigError(
                f"{path} holds a different run from the requested one: choose another --out (in "
                "Python: folder)"
            )
        for row in folder.rows():
            report(row)
        diverged = folder.diverged.read()
        if diverged is not None:
            folder.verify()
            return Ended(str(diverged))
    try:
        if started:
            launch.resume(folder, engine=engine, progress=report, own=job.own)
        else:
            launch.simulate(job.recipe, engine=engine, run_dir=path, progress=report, own=job.own)
    except OtherObjectsError as error:
        raise ConfigError(
            f"{error}; choose another folder for this study, or read the finished runs with "
            f"Study.read({str(out)!r})"
        ) from error
    # the study ends, because the run's spending is unknown or because files cannot be written
    except (LedgerError, DiskError):
        raise
    except FedlgmError as error:
        return Ended(str(error), None if path.exists() else error)
    return Ended()


def _same(stored: Recipe, wanted: Recipe) -> bool:
    """Tell whether a stored recipe is the requested recipe; if the request has "auto", the stored
    value may be the value that was chosen when the run started.
    """
    settled_at_start = (
        ("training", "vectorize"),
        ("training", "compile"),
        ("training", "kernel"),
        ("training", "device"),
        ("privacy", "noise_backend"),
    )
    values, asked = stored.model_dump(), wanted.model_dump()
    asked["title"] = values["title"]  # the title has no effect on the run
    for section, key in settled_at_start:
        if asked[section][key] == "auto":
            asked[section][key] = values[section][key]
    return values == asked
