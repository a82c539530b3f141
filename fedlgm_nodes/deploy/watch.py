"""Messages about processes of a deployment that end or are stopped during a run."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from fedlgm.errors import RunError
from fedlgm_nodes.deploy import process_record
from fedlgm_nodes.deploy.deployment_folder import DeploymentFolder
from fedlgm_nodes.deploy.listening import stopped_fault
from fedlgm_nodes.deploy.process_faults import Look, ended_fault
from simulations.engines.flower_processes import is_alive, started_under
from simulations.runs.folder import RunFolder

_LOOK_S = 1.0
RESUMES = "the same command, without --fresh, resumes the run"


class KilledError(RunError):
    """A process that every run needs has ended."""


class Watch:
    """Looks at the SuperLink and its processes, at the run's own process, and at the processes of
    nodes on this machine.

    Args:
        folder: the deployment's folder.
        say: called with a line for each process that has ended or is stopped.

    Raises:
        KilledError: as in `look`.
    """

    def __init__(self, folder: DeploymentFolder, say: Callable[[str], None]) -> None:
        self._folder, self._look = folder, Look(folder, say)
        self.target: RunFolder | None = None
        """The run's folder, once there is one."""
        self._say, self._told, self._looked = say, set[str](), 0.0
        self._superlink = superlink_of(folder)
        family = self._family()
        self._starters = [process for process in family if is_called(process, "flower-superexec")]
        link = self._superlink
        if link is not None and not self._starters and _starts_apps(link):
            raise KilledError(self._no_starter(f"of the SuperLink (process {link.pid})"))
        self._others = set(family)  # includes ServerApps of other runs
        self._app: psutil.Process | None = None
        self.misses_app = False
        """Whether the run has no process, because it has not started one yet, or because its
        process ended before it took the run's lock.
        """
        self.look()

    def look(self) -> None:
        """Name processes that have ended or are stopped, at most once a second.

        Raises:
            KilledError: the SuperLink, its SuperExec or the run's server process has ended.
        """
        if time.monotonic() - self._looked < _LOOK_S:
            return
        link = self._superlink
        if link is not None and not is_alive(link):
            raise KilledError(f"{ended_fault('superlink', link.pid, self._folder)}; then {RESUMES}")
        if "superlink" not in self._look() and link is not None:
            self._tell(stopped_fault("superlink", link))
        for starter in self._starters:
            if not is_alive(starter):
                raise KilledError(self._no_starter(f"(process {starter.pid})"))
            self._tell(stopped_fault("flower-superexec", starter))
        worker = self.target.worker() if self.target is not None else None
        if worker is not None and not worker.runs:
            raise KilledError(killed_message(worker.pid))
        if worker is not None:
            with suppress(psutil.NoSuchProcess):  # the process may end at this moment
                process = psutil.Process(worker.pid)
                self._tell(stopped_fault("the run's server process", process))
        self.misses_app = worker is None and link is not None and not self._has_app()
        self._looked = time.monotonic()

    def require_app(self) -> None:
        """Raise KilledError if the run, which is under way, has no process."""
        self._looked = 0.0
        self.look()
        if self.misses_app:
            raise KilledError(killed_message(None if self._app is None else self._app.pid))

    def _has_app(self) -> bool:
        """Whether there is a ServerApp that was started after this object was made. Such a
        ServerApp will take the run's lock.

        The SuperLink starts no other process in the meantime. A site's own wrapper may start the
        ServerApp under any name.
        """
        apps = [
            process
            for process in self._family()
            if process not in self._others and is_alive(process)
        ]
        for self._app in apps:
            self._tell(stopped_fault("flwr-serverapp", self._app))
        return bool(apps)

    def _family(self) -> list[psutil.Process]:
        try:
            return [] if self._superlink is None else self._superlink.children(recursive=True)
        except psutil.Error:
            return []

    def _no_starter(self, which: str) -> str:
        folder = self._folder.path
        return (
            f"flower-superexec {which}, which starts the server processes of runs, has ended, for "
            f"example because it was killed: `fedlgm deploy down {folder}` and `fedlgm deploy up "
            f"{folder}` start it again; then {RESUMES}"
        )

    def _tell(self, fault: str) -> None:
        if fault and fault not in self._told:
            self._told.add(fault)
            self._say(fault)


def killed_message(pid: int | None) -> str:
    """A sentence that says what became of a run's server process that ended without an error, and
    what to do.
    """
    number = "" if pid is None else f" (process {pid})"
    return f"the run's server process{number} has ended without an error, for example because it was killed; {RESUMES}"


def superlink_of(folder: DeploymentFolder) -> psutil.Process | None:
    """The SuperLink on this machine, whoever started it; None if this user can see no SuperLink."""
    readable = os.access(folder.processes_file, os.R_OK)
    if (
        process := process_record.alive(
            process_record.known(folder) if readable else process_record.find_marked(folder)
        ).get("superlink")
    ) is not None:
        return process
    return next(
        (
            candidate
            for candidate in started_under(folder.flower_home)
            if is_called(candidate, "flower-superlink")
        ),
        None,
    )


def is_called(process: psutil.Process, command: str) -> bool:
    """Whether a process is running and was started under the name of this Flower command."""
    with suppress(psutil.Error):
        return is_alive(process) and any(
            Path(word).name == command for word in process.cmdline()[:2]
        )
    return False


def _starts_apps(link: psutil.Process) -> bool:
    """Whether a SuperLink starts its own SuperExec, as its start script requests."""
    with suppress(psutil.Error):
        return is_called(link, "flower-superlink") and "--isolation" not in link.cmdline()
    return False
