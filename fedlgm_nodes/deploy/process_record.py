"""The record of a deployment's processes on this machine, and functions that find the processes
that are running.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from typing import Annotated, NamedTuple

import psutil
from pydantic import Field

from fedlgm.errors import RunError
from fedlgm.files import explain_failure, write_durably
from fedlgm_nodes.deploy.deployment_folder import DeploymentFolder
from simulations.engines.flower_processes import is_alive
from simulations.runs.shapes import read_json

MARK = "FEDLGM_DEPLOYED"
"""Environment variable of every process that `up` starts. It holds the process's id, the length of
its log before the start, its role and its folder.

With this variable, processes are found that the record does not name. Children of a process inherit
the variable, but have other ids.
"""
NODE_ID = "SuperNode ID:"
_HEAD = 1 << 20
"""Number of bytes in a SuperNode's log, counted from its last start, within which it states its id.
"""


class Started(NamedTuple):
    """A process that `up` started.

    Attributes:
        pid: number of the process.
        born: time at which the process started, in seconds since the machine started.
        since: length in bytes of the process's log when the process was started.
    """

    pid: int
    born: float
    since: int


def read(folder: DeploymentFolder) -> dict[str, Started]:
    """The record: role -> process.

    Raises:
        RunError: the file is damaged.
    """
    if not folder.processes_file.is_file():
        return {}
    kind = dict[str, Annotated[list[float], Field(min_length=3, max_length=3)]]
    record = read_json(
        folder.processes_file,
        kind,
        "delete it: the processes that `up` started are found without it",
    )
    return {
        role: Started(int(pid), born, int(since)) for role, (pid, born, since) in record.items()
    }


def write(folder: DeploymentFolder, processes: Mapping[str, Started]) -> None:
    """Replace the record.

    Raises:
        RunError: the file cannot be written.
    """
    try:
        write_durably(folder.processes_file, json.dumps(processes).encode())
    except OSError as error:
        what = f"the record of processes {folder.processes_file} cannot be written"
        raise RunError(explain_failure(what, error)) from error


def known(folder: DeploymentFolder) -> dict[str, Started]:
    """Processes in the record, and processes that `up` started but the record does not name."""
    record, marked = read(folder), find_marked(folder)
    for role, process in marked.items():
        if role in record and record[role].pid == process.pid:
            # the log may have been rotated
            marked[role] = process._replace(since=record[role].since)
    return record | marked


def find_marked(folder: DeploymentFolder) -> dict[str, Started]:
    """Find the running processes that `up` started by the environment variable that it sets. They
    are found even if the record was lost, or if `up` was killed before it wrote the record.

    Processes of other users do not count, since any user can set this variable.
    """
    processes = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError, ValueError):
            pid, since, role, path = process.environ().get(MARK, "0 0 - -").split(" ", 3)
            ours = (int(pid), path) == (process.pid, str(folder.path))
            if ours and process.uids().real == os.getuid():
                processes[role] = Started(process.pid, start_time(process), int(since))
    return processes


def running(folder: DeploymentFolder) -> dict[str, psutil.Process]:
    """The processes in the record that are running."""
    return alive(read(folder))


def all_running(folder: DeploymentFolder) -> dict[str, psutil.Process]:
    """The processes that `up` started and that are running, whether or not they are in the record.
    To find them, the function looks at every process of the machine.
    """
    return alive(known(folder))


def start_time(process: psutil.Process) -> float:
    """When a process started, in seconds since the machine started. A start time that is given as a
    time of day would change whenever the machine's clock is set.
    """
    return process.create_time() - psutil.boot_time()


def alive(processes: Mapping[str, Started]) -> dict[str, psutil.Process]:
    """The given processes that are running."""
    found = {}
    for role, (pid, born, _) in processes.items():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if abs(start_time(process) - born) < 0.01 and is_alive(process):
                found[role] = process
    return found


def node_id(folder: DeploymentFolder, role: str) -> str:
    """Flower's id of a node, as the node's SuperNode on this machine has logged it; empty if the
    SuperNode has not logged it.
    """
    process = read(folder).get(role)
    since = 0 if process is None else process.since
    ids = (
        re.findall(rf"{NODE_ID} (\d+)", output_of(folder, role, since, _HEAD))
        if (folder.logs / f"{role}.log").is_file()
        else []
    )
    return str(ids[-1]) if ids else ""


def output_of(folder: DeploymentFolder, role: str, since: int, most: int = -1) -> str:
    """What a process has written to its log since the log was `since` bytes long: the first `most`
    bytes, or everything if `most` is -1.
    """
    with (folder.logs / f"{role}.log").open("rb") as log:
        log.seek(since if since <= os.fstat(log.fileno()).st_size else 0)  # 0: the log was rotated
        return log.read(most).decode("utf-8", errors="replace")
