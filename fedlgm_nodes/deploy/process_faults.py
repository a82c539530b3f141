"""Faults of a deployment's processes on this machine: processes that have ended, are stopped, or
are refused by the SuperLink.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from fedlgm_nodes.deploy import process_record
from fedlgm_nodes.deploy.deployment_folder import DeploymentFolder
from fedlgm_nodes.deploy.listening import stopped_fault

_STILL_CONNECTED = "[code: 2004]"
"""Part of a line in the log of a SuperNode that was restarted too soon: for half a minute after a
kill, the SuperLink still considers it connected.
"""


class Look:
    """Names processes that `up` started on this machine and that have ended or are stopped.

    Args:
        folder: the deployment's folder.
        say: called with a line for each of these processes.
    """

    def __init__(self, folder: DeploymentFolder, say: Callable[[str], None]) -> None:
        self._folder, self._say, self._told = folder, say, set[str]()

    def __call__(self) -> dict[str, str]:
        """Return role -> fault and remedy, and report each fault that no earlier call has
        reported.
        """
        found = faults(self._folder)
        for fault in found.values():
            if fault not in self._told:
                self._say(fault)
        self._told |= set(found.values())
        return found


def faults(folder: DeploymentFolder) -> dict[str, str]:
    """Role -> sentence that names the fault of the role's process and the remedy, for the processes
    that `up` started on this machine.
    """
    # the record belongs to another user, or there is none
    if not os.access(folder.processes_file, os.R_OK):
        return {}
    record, problems = process_record.read(folder), {}
    running = process_record.alive(record)
    for role, (pid, _, since) in record.items():
        if role not in running:
            problems[role] = refusal(folder, role, since) or ended_fault(role, pid, folder)
        elif fault := stopped_fault(role, running[role]):
            problems[role] = fault
    return problems


def ended_fault(role: str, pid: int, folder: DeploymentFolder) -> str:
    """A sentence that says that a process has ended, and what to do."""
    return (
        f"{role} (process {pid}) has ended, for example because it was killed: `fedlgm deploy up "
        f"{folder.path}` starts it again"
    )


def refusal(folder: DeploymentFolder, role: str, since: int) -> str:
    """A sentence that says that the SuperLink refuses a SuperNode, and what to do; empty if the
    SuperNode is not refused.

    Args:
        folder: the deployment's folder.
        role: role of the SuperNode's process.
        since: length in bytes of the process's log when the process was started.
    """
    if not role.endswith("-supernode") or _STILL_CONNECTED not in process_record.output_of(
        folder, role, since
    ):
        return ""
    return (
        f"{role}: the SuperLink refuses it for half a minute, while it still counts the killed "
        f"SuperNode as connected; `fedlgm deploy up {folder.path}` starts it again"
    )
