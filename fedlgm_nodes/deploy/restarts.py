"""A supervisor that restarts a deployment's processes when they have ended, and rotates their
logs.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable

from fedlgm_nodes.deploy import process_record
from fedlgm_nodes.deploy.deployment_folder import DeploymentFolder
from fedlgm_nodes.deploy.process_faults import refusal
from fedlgm_nodes.deploy.processes import start
from simulations.engines.flower_processes import end, started_under

_SUPERVISE_S = 5.0
_LARGEST_LOG = 10 << 20  # bytes; a larger log is moved to the file of the previous log


class Supervisor:
    """Restarts the processes that `up` started if they have ended, and rotates the logs of all
    processes that `up` started.

    Args:
        folder: the deployment's folder.
        say: called with a line for each process that has ended. The line is repeated only if the
            process was found running in the meantime. A SuperNode that the SuperLink refuses is
            restarted without a line.
    """

    def __init__(self, folder: DeploymentFolder, say: Callable[[str], None]) -> None:
        self._folder, self._say, self._ended = folder, say, set[str]()

    def run(self) -> None:
        """Check the processes every few seconds, until this process is stopped."""
        while True:
            self()
            time.sleep(_SUPERVISE_S)

    def __call__(self) -> None:
        """Restart the processes that have ended, and rotate large logs, once."""
        folder, record = self._folder, process_record.read(self._folder)
        running = process_record.alive(record)
        ended = record.keys() - running.keys()
        for role in sorted(ended - self._ended):
            if not refusal(folder, role, record[role].since):
                self._say(f"{role} (process {record[role].pid}) has ended and is started again")
        self._ended = ended
        if "superlink" in ended:
            end(started_under(folder.flower_home))
        for role in record:
            _rotate(folder, role)
            start(folder, role, running, [])


def _rotate(folder: DeploymentFolder, role: str) -> None:
    """Move the lines of a large log into a second file, where they replace the earlier lines."""
    log = folder.logs / f"{role}.log"
    if not log.is_file() or log.stat().st_size <= _LARGEST_LOG:
        return
    known = process_record.node_id(folder, role)
    shutil.copyfile(log, f"{log}.1")
    # a process appends to its log, and so continues at the end of the shortened file
    os.truncate(log, 0)
    if known:
        with log.open("a", encoding="utf-8") as output:
            output.write(f"{process_record.NODE_ID} {known}\n")
    record = process_record.read(folder)
    process_record.write(folder, record | {role: record[role]._replace(since=0)})
