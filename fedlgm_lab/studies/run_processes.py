"""Runs of a study in other processes, on this machine (with joblib's loky) or on a Ray cluster."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from fedlgm.errors import RunError
from fedlgm_lab.studies.jobs import Job
from fedlgm_lab.studies.one_run import Ended, bring
from simulations.runs.folder import RunFolder

_LOOK_S = 0.5
_PATIENCE_S = 10.0  # longest wait for the worker of a killed study to end
_watching = threading.Event()


def on_this_machine(todo: Sequence[Job], out: Path, workers: int) -> Iterator[tuple[Job, Ended]]:
    """Run every job in worker processes, and yield each job with its outcome when it ends.

    cloudpickle sends the objects, including classes that a notebook defines; the workers do not
    import the caller's main module.

    Args:
        todo: the runs.
        out: folder of the run folders.
        workers: number of processes, each of which trains on one thread.
    """
    from joblib import Parallel, delayed, parallel_config

    place = (str(Path.cwd()), list(sys.path))
    with parallel_config(backend="loky", inner_max_num_threads=1):
        pool = Parallel(
            n_jobs=workers, return_as="generator_unordered", max_nbytes=None, batch_size=1
        )
        for index, how in pool(
            delayed(work)(index, job, out, place) for index, job in enumerate(todo)
        ):
            yield todo[index], how


def on_cluster(todo: Sequence[Job], out: Path, address: str) -> Iterator[tuple[Job, Ended]]:
    """Run every job on a Ray cluster, with one job per CPU, and yield each job with its outcome
    when it ends.

    Args:
        todo: the runs.
        out: folder of the run folders, on storage that the cluster's machines share.
        address: "auto" for a cluster that runs on this machine, "host:port" for another cluster, or
            "local" to start a cluster on this machine.

    Raises:
        RunError: there is no such cluster.
    """
    import ray

    from simulations.engines import cluster

    cpus = min(len(todo), os.cpu_count() or 1) if address == "local" else 1
    place = (str(Path.cwd()), list(sys.path))
    with cluster.session(
        None if address == "local" else address, cpus, lambda: ray.remote(num_cpus=1)(work)
    ) as ready:
        remote: Any = ready()
        waiting = [remote.remote(index, job, out, place, False) for index, job in enumerate(todo)]
        while waiting:
            (done, *_), waiting = ray.wait(waiting)
            index, how = ray.get(done)
            yield todo[index], how


def work(
    index: int, job: Job, out: Path, place: tuple[str, list[str]], with_parent: bool = True
) -> tuple[int, Ended]:
    """Complete one run in this process.

    Args:
        index: number of the run, which is returned with the outcome.
        job: the run.
        out: folder of the run folders.
        place: the caller's working directory and Python path, in which a recipe's own names are
            found.
        with_parent: whether the run ends when the process that requested it ends.
    """
    import torch

    if with_parent and not _watching.is_set():
        _watching.set()
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    with suppress(OSError):
        os.chdir(place[0])
    sys.path.extend(path for path in place[1] if path not in sys.path)
    torch.set_num_threads(1)
    path, patience = out / job.folder, _PATIENCE_S
    while path.is_dir() and patience > 0 and _in_use(path):
        patience -= _LOOK_S
        time.sleep(_LOOK_S)
    return index, bring(job, out)


def _in_use(path: Path) -> bool:
    try:
        with RunFolder(path).lock():
            return False
    except RunError:
        return True


def _end_with(parent: int) -> None:
    """Wait until the parent process is gone, then end this process, whose results nobody would
    read.
    """
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    os._exit(1)
