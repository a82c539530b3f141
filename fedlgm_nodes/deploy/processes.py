"""Starting and stopping a deployment's processes on this machine."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import psutil
from pydantic import Field

from fedlgm.errors import RunError
from fedlgm.files import explain_failure, write_durably
from fedlgm_nodes.deploy.deployment_folder import DeploymentFolder, Settings
from fedlgm_nodes.deploy.flower_cli import Flower, is_online
from fedlgm_nodes.deploy.listening import stopped_fault
from fedlgm_nodes.protocol import frames
from fedlgm_nodes.protocol import messages as protocol
from simulations.engines.flower_command import environment, tail
from simulations.engines.flower_processes import (
    end,
    is_alive,
    is_port_taken,
    started_under,
    with_children,
)
from simulations.runs.shapes import read_json

_STARTUP_S = 300.0  # a limit for slow machines: a process that ends is noticed at once
_MARK = "FEDLGM_DEPLOYED"
"""Variable in the environment of every process that `up` starts: its id, its log's length before,
role and folder.

It finds processes that the record does not name. Their children inherit it, but have other ids.
"""
_STILL_CONNECTED = "[code: 2004]"
"""Line for a SuperNode that the SuperLink considers connected, as it does for half a minute after a
kill."""
_AGAIN_S = 2.0
_SUPERVISE_S = 5.0
_LARGEST_LOG = 10 << 20  # bytes; the log before it may have as many
_OF_SERVICE = ("epsilon_spent", "epsilon", "delta", "releases_left", "test")
_Known = tuple[int, float, int]
"""Process, seconds from the start of the machine to its own, and length of its log at that time."""
_ID = "SuperNode ID:"
_HEAD = 1 << 20
"""Bytes of a SuperNode's log, from its last start on, among which it states its id."""


class Look:
    """Names processes that `up` started on this machine and that have ended or are stopped.

    Args:
        folder: the deployment's folder.
        say: called with a line for each of them.
    """

    def __init__(self, folder: DeploymentFolder, say: Callable[[str], None]) -> None:
        self._folder, self._say, self._told = folder, say, set[str]()

    def __call__(self) -> dict[str, str]:
        """Role -> fault and remedy; each is reported once."""
        found = faults(self._folder)
        for fault in found.values():
            if fault not in self._told:
                self._say(fault)
        self._told |= set(found.values())
        return found


def faults(folder: DeploymentFolder) -> dict[str, str]:
    """Role -> fault of its process and its remedy, for the processes that `up` started on this
    machine.
    """
    if not os.access(folder.processes_file, os.R_OK):  # of another user, or there is none
        return {}
    record, problems = _read_record(folder), {}
    running = _alive(record)
    for role, (pid, _, since) in record.items():
        if role not in running:
            problems[role] = _refusal(folder, role, since) or ended_fault(role, pid, folder)
        elif fault := stopped_fault(role, running[role]):
            problems[role] = fault
    return problems


def ended_fault(role: str, pid: int, folder: DeploymentFolder) -> str:
    """What to do about a process that has ended."""
    return (
        f"{role} (process {pid}) has ended, for example because it was killed: `fedlgm deploy up "
        f"{folder.path}` starts it again"
    )


def _refusal(folder: DeploymentFolder, role: str, since: int) -> str:
    """A sentence about a SuperNode that the SuperLink refuses; empty if it is not refused.

    Args:
        folder: the deployment's folder.
        role: the process.
        since: length of its log when it was started.
    """
    if not role.endswith("-supernode") or _STILL_CONNECTED not in _output(folder, role, since):
        return ""
    return (
        f"{role}: the SuperLink refuses it for half a minute, as long as it counts the one that was "
        f"killed as connected; `fedlgm deploy up {folder.path}` starts it again"
    )


def superlink(folder: DeploymentFolder) -> psutil.Process | None:
    """The SuperLink on this machine, whoever started it; None if there is none that this user can
    see.
    """
    readable = os.access(folder.processes_file, os.R_OK)
    if (
        process := _alive(_known(folder) if readable else _find_marked(folder)).get("superlink")
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
    """Whether a process was started by the name of this command of Flower's and has not ended."""
    with contextlib.suppress(psutil.Error):
        return is_alive(process) and any(
            Path(word).name == command for word in process.cmdline()[:2]
        )
    return False


def starts_apps(link: psutil.Process) -> bool:
    """Whether a SuperLink runs whose start script leaves it to start its own SuperExec."""
    with contextlib.suppress(psutil.Error):
        return is_called(link, "flower-superlink") and "--isolation" not in link.cmdline()
    return False


def up(folder: DeploymentFolder, say: Callable[[str], None] = print) -> None:
    """Start the SuperLink and every node, and wait until all nodes are connected; running processes
    are kept.

    Raises:
        RunError: a process ended, or not all nodes connected; all processes that the call started
            are then stopped.
    """
    settings, flower = folder.settings(), Flower(folder)
    running = _all_running(folder)
    started: list[str] = []
    told = set[str]()

    def look() -> None:
        """Name processes that a signal has stopped, without which this call would wait in
        silence.
        """
        for fault in (
            {stopped_fault(role, process) for role, process in _running(folder).items()}
            - told
            - {""}
        ):
            told.add(fault)
            say(fault)

    def meanwhile() -> None:
        look()
        if "superlink" not in _running(folder):
            raise RunError(ended_fault("superlink", _read_record(folder)["superlink"][0], folder))

    flower.meanwhile, wait = meanwhile, partial(_wait, folder, running, started, look=look)
    try:
        _record(folder, _known(folder))
        if "superlink" not in running:
            # ServerApps of a SuperLink that died: they still hold their runs
            end(started_under(folder.flower_home))
        _check_ports(settings, running)
        _start(folder, "superlink", running, started)
        _start(folder, "signer", running, started)
        if settings.superlink is not None:
            _start(folder, "proxy", running, started)
        for node in settings.nodes:
            _start(folder, f"{node.name}-service", running, started)
        wait("the SuperLink", flower.healthy)
        wait("the signer", folder.signer.socket.exists)
        names = (
            set(folder.registered_file.read_text().split())
            if folder.registered_file.is_file()
            else set()
        )
        if new := {node.name for node in settings.nodes} - names:
            flower.register(*sorted(new))
            folder.registered_file.write_text("\n".join(sorted(names | new)))
        for node in settings.nodes:
            _start(folder, f"{node.name}-supernode", running, started)
            _start(folder, f"{node.name}-executor", running, started)
        for node in settings.nodes:
            wait(f"the service of {node.name}", partial(_answers, folder, node.name))
        # Its own word: the SuperLink takes nodes that were killed for connected, for half a minute.
        wait("every node", partial(_all_know_their_id, folder, started), every=0.25)
        if any(f"{node.name}-supernode" in running for node in settings.nodes):
            wait("every node", lambda: flower.online() >= len(settings.nodes), every=1.0)
    except BaseException:
        _stop(folder, list(started))
        raise
    say(f"{len(settings.nodes)} nodes are connected to https://{settings.host}:{settings.port}")
    say(
        "anyone who can open a connection to the SuperLink's control port on this machine can run "
        "code as this user"
    )


def _check_ports(settings: Settings, running: Iterable[str]) -> None:
    """Refuse to start processes whose ports another program has.

    Raises:
        RunError: one is taken.
    """
    ports = {"superlink": settings.local_port}
    ports |= {f"{node.name}-supernode": node.port for node in settings.nodes}
    for role, port in ports.items():
        if role not in running and is_port_taken(port):
            raise RunError(
                f"port {port} of 127.0.0.1, which {role} needs, is in use by another program: stop "
                "that program, or create the deployment again in another folder, with other ports"
            )


def down(folder: DeploymentFolder) -> int:
    """Stop all processes that `up` has started on this machine, with their children, and return
    their number.
    """
    return _stop(folder, ["superlink", *_read_record(folder), *_find_marked(folder)])


class Supervisor:
    """Starts again what has ended of the processes that `up` started, and rotates their logs.

    Args:
        folder: the deployment's folder.
        say: called with a line for each process that has ended, once until it is found running. A
            SuperNode that the SuperLink refuses is tried again without a line.
    """

    def __init__(self, folder: DeploymentFolder, say: Callable[[str], None]) -> None:
        self._folder, self._say, self._ended = folder, say, set[str]()

    def run(self) -> None:
        """Look every few seconds, until this process is stopped."""
        while True:
            self()
            time.sleep(_SUPERVISE_S)

    def __call__(self) -> None:
        """Look once."""
        folder, record = self._folder, _read_record(self._folder)
        running = _alive(record)
        ended = record.keys() - running.keys()
        for role in sorted(ended - self._ended):
            if not _refusal(folder, role, record[role][2]):
                self._say(f"{role} (process {record[role][0]}) has ended and is started again")
        self._ended = ended
        if "superlink" in ended:
            end(started_under(folder.flower_home))
        for role in record:
            _rotate(folder, role)
            _start(folder, role, running, [])


def _rotate(folder: DeploymentFolder, role: str) -> None:
    """Move the lines of a large log into a second file, in place of the lines before them."""
    log = folder.logs / f"{role}.log"
    if not log.is_file() or log.stat().st_size <= _LARGEST_LOG:
        return
    known = _node_id(folder, role)
    shutil.copyfile(log, f"{log}.1")
    os.truncate(log, 0)  # the process goes on at the end of the file
    if known:
        with log.open("a", encoding="utf-8") as output:
            output.write(f"{_ID} {known}\n")
    record = _read_record(folder)
    pid, born, _ = record[role]
    _record(folder, record | {role: (pid, born, 0)})


def stop_node(folder: DeploymentFolder, name: str) -> int:
    """Stop the processes of one node on this machine, and return their number."""
    return _stop(folder, [f"{name}-{role}" for role in ("service", "supernode", "executor")])


def status(folder: DeploymentFolder) -> dict[str, Any]:
    """Running processes, connected nodes, each node's remaining budget, and the runs.

    For each node in `nodes`, `service`, `supernode` and `executor` say whether these processes run
    on this machine; `online` whether the SuperLink counts the node as connected (None if its
    SuperNode has no id so far), and `since` the UTC time since which this has been so (None if it
    has never been connected). The service's own figures cover the data set's whole life, and are
    None if the service does not answer; `problem` then says why.
    """
    settings, running, flower = folder.settings(), _all_running(folder), Flower(folder)
    wrong = faults(folder)
    try:
        healthy, problem = flower.healthy(), "does not answer"
    except RunError as error:
        healthy, problem = False, str(error)
    listed = flower.nodes() if healthy else {}
    nodes = []
    for node in settings.nodes:
        fault = wrong.get(f"{node.name}-service")  # one that is stopped would be waited for
        answer = hello(folder, node.name) if fault is None else {"why": fault}
        entry = listed.get(_node_id(folder, f"{node.name}-supernode"), {})
        online = is_online(entry) if entry else None
        since = entry.get("online-at" if online else "offline-at")
        nodes.append(
            {
                "name": node.name,
                **{
                    role: f"{node.name}-{role}" in running
                    for role in ("service", "supernode", "executor")
                },
                "online": online,
                "since": since if since != "N/A" else None,
                **{figure: answer.get(figure) for figure in _OF_SERVICE},
                "problem": None if answer.get("ok") else str(answer.get("why")),
            }
        )
    return {
        "address": f"{settings.host}:{settings.port}",
        "superlink": healthy,
        "problem": None if healthy else problem,
        "connected": sum(map(is_online, listed.values())),
        "nodes": nodes,
        "faults": list(wrong.values()),
        "runs": [_run(path.parent) for path in sorted(folder.runs.glob("*/recipe.toml"))],
    }


def hello(folder: DeploymentFolder, name: str) -> dict[str, Any]:
    """The budget of a node on this machine, as its service states it. Without one `ok` is False,
    `why` says why.
    """
    try:
        header, _ = frames.exchange(
            str(folder.node(name).service.socket), protocol.HELLO, b"", timeout=60
        )
    except RunError as error:
        return {"ok": False, "why": str(error)}
    return header


def _answers(folder: DeploymentFolder, name: str) -> bool:
    return hello(folder, name).get("ok") is True


def _run(path: Path) -> dict[str, Any]:
    from simulations.runs.folder import RunFolder

    run = RunFolder(path)
    result = run.result()
    return {"run": path.name, "rounds": len(run.rows()), "finished": result is not None}


def _start(
    folder: DeploymentFolder, role: str, running: dict[str, psutil.Process], started: list[str]
) -> None:
    if role in running:
        return
    folder.logs.mkdir(exist_ok=True)
    with (folder.logs / f"{role}.log").open("ab") as log:
        started.append(role)
        since = log.tell()
        process = subprocess.Popen(
            [
                "/bin/sh",
                "-c",
                f'export {_MARK}="$$ $1"; exec "$0"',
                _script(folder, role),
                f"{since} {role} {folder.path}",
            ],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=environment(None),
        )
    child = psutil.Process(process.pid)
    try:
        _record(folder, _read_record(folder) | {role: (process.pid, _start_time(child), since)})
    except BaseException:
        end({child})
        raise


def _record(folder: DeploymentFolder, processes: dict[str, _Known]) -> None:
    try:
        write_durably(folder.processes_file, json.dumps(processes).encode())
    except OSError as error:
        what = f"the record of processes {folder.processes_file} cannot be written"
        raise RunError(explain_failure(what, error)) from error


def _script(folder: DeploymentFolder, role: str) -> Path:
    """The script that starts a role: "superlink", "signer", "proxy", or a node's, such as
    "node0-service".
    """
    servers = {
        "superlink": folder.server / "start-superlink.sh",
        "signer": folder.signer.script,
        "proxy": folder.proxy / "start-proxy.sh",
    }
    name, _, kind = role.rpartition("-")
    return servers[role] if role in servers else folder.node(name).script(kind)


def _wait(
    folder: DeploymentFolder,
    roles: Iterable[str],
    started: list[str],
    what: str,
    ready: Callable[[], bool],
    every: float = 0.1,
    look: Callable[[], None] = lambda: None,
) -> None:
    """Wait until `ready`; restart processes that have ended since they were found running, and
    refused SuperNodes.

    `look` is called before every look at what is waited for.
    """
    deadline = time.monotonic() + _STARTUP_S
    while True:
        look()
        if ready():
            return
        running = _running(folder)
        for role in [name for name in dict.fromkeys((*roles, *started)) if name not in running]:
            if role in started:  # another role was found running, but was about to end
                pid, _, since = _read_record(folder)[role]
                if not _refusal(folder, role, since):
                    said = tail(_output(folder, role, since))
                    last = said.rpartition("\n")[2]  # of fedlgm's own processes
                    if last.startswith("error: "):
                        raise RunError(f"{role} ended: {last[7:]}")
                    raise RunError(f"{ended_fault(role, pid, folder)}. End of its log:\n{said}")
                time.sleep(_AGAIN_S)
            _start(folder, role, running, started)
        if time.monotonic() > deadline:
            raise RunError(f"{what} did not start within {_STARTUP_S:g} s; see {folder.logs}")
        time.sleep(every)


def _read_record(folder: DeploymentFolder) -> dict[str, _Known]:
    if not folder.processes_file.is_file():
        return {}
    kind = dict[str, Annotated[list[float], Field(min_length=3, max_length=3)]]
    record = read_json(
        folder.processes_file,
        kind,
        "delete it: the processes that `up` started are found without it",
    )
    return {role: (int(pid), born, int(since)) for role, (pid, born, since) in record.items()}


def _known(folder: DeploymentFolder) -> dict[str, _Known]:
    """Processes in the record, and those that `up` started and that are not in it."""
    record, known = _read_record(folder), _find_marked(folder)
    for role, (pid, born, _) in known.items():
        if role in record and record[role][0] == pid:
            known[role] = pid, born, record[role][2]  # the log may have been rotated
    return record | known


def _find_marked(folder: DeploymentFolder) -> dict[str, _Known]:
    """Running processes that `up` started, also if the record was lost or `up` was killed before it
    wrote it.

    Processes of other users do not count, since anyone can set the variable.
    """
    processes = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError, ValueError):
            pid, since, role, path = process.environ().get(_MARK, "0 0 - -").split(" ", 3)
            if (int(pid), path) == (
                process.pid,
                str(folder.path),
            ) and process.uids().real == os.getuid():
                processes[role] = (process.pid, _start_time(process), int(since))
    return processes


def _running(folder: DeploymentFolder) -> dict[str, psutil.Process]:
    """Processes in the record that run."""
    return _alive(_read_record(folder))


def _all_running(folder: DeploymentFolder) -> dict[str, psutil.Process]:
    """Processes that run, in the record or not. This looks at every process of the machine."""
    return _alive(_known(folder))


def _start_time(process: psutil.Process) -> float:
    """When a process started, in seconds since the machine did: the time of day moves when the
    clock is set.
    """
    return process.create_time() - psutil.boot_time()


def _alive(processes: dict[str, _Known]) -> dict[str, psutil.Process]:
    running = {}
    for role, (pid, born, _) in processes.items():
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if abs(_start_time(process) - born) < 0.01 and is_alive(process):
                running[role] = process
    return running


def _stop(folder: DeploymentFolder, roles: list[str]) -> int:
    running = _all_running(folder)
    # SuperNodes first: they tell the SuperLink that they leave, which would refuse them for half a
    # minute otherwise.
    supernodes = {
        running[role] for role in roles if role in running and role.endswith("-supernode")
    }
    family = {
        member for role in roles if role in running for member in with_children(running[role])
    }
    if "superlink" in roles:
        family |= started_under(folder.flower_home)
    record = {role: entry for role, entry in _read_record(folder).items() if role not in roles}
    with contextlib.suppress(RunError):  # on a full disk the record keeps processes that have ended
        _record(folder, record)  # first: a supervisor starts again what is in it
    end(supernodes)
    end(family)
    return len(family)


def _all_know_their_id(folder: DeploymentFolder, started: list[str]) -> bool:
    return all(_node_id(folder, role) for role in started if role.endswith("-supernode"))


def _node_id(folder: DeploymentFolder, role: str) -> str:
    """Flower's id of a node, which its SuperNode on this machine has logged; empty if it has
    not.
    """
    since = _read_record(folder).get(role, (0, 0.0, 0))[2]
    ids = (
        re.findall(rf"{_ID} (\d+)", _output(folder, role, since, _HEAD))
        if (folder.logs / f"{role}.log").is_file()
        else []
    )
    return str(ids[-1]) if ids else ""


def _output(folder: DeploymentFolder, role: str, since: int, most: int = -1) -> str:
    """Output of a process since its start: the first `most` bytes, or all of it."""
    with (folder.logs / f"{role}.log").open("rb") as log:
        log.seek(since if since <= os.fstat(log.fileno()).st_size else 0)  # 0: it was rotated
        return log.read(most).decode("utf-8", errors="replace")
