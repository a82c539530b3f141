"""Functions that start and stop a deployment's processes on this machine."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from fedlgm.errors import RunError
from fedlgm_nodes.deploy import process_record
from fedlgm_nodes.deploy.deployment_folder import DeploymentFolder, Settings
from fedlgm_nodes.deploy.flower_cli import Flower
from fedlgm_nodes.deploy.listening import stopped_fault
from fedlgm_nodes.deploy.process_faults import ended_fault, refusal
from fedlgm_nodes.deploy.process_record import MARK, Started
from fedlgm_nodes.protocol import frames
from fedlgm_nodes.protocol import messages as protocol
from simulations.engines.flower_command import environment, tail
from simulations.engines.flower_processes import (
    end,
    is_port_taken,
    started_under,
    with_children,
)

# long enough for slow machines; `up` notices at once that a process has ended
_STARTUP_S = 300.0
_AGAIN_S = 2.0


def up(folder: DeploymentFolder, say: Callable[[str], None] = print) -> None:
    """Start the SuperLink and every node, and wait until all nodes are connected. Processes that
    are running already are not restarted.

    Raises:
        RunError: a process ended, or not all nodes connected; all processes that the call started
            are then stopped.
    """
    settings, flower = folder.settings(), Flower(folder)
    running = process_record.all_running(folder)
    started: list[str] = []
    told = set[str]()

    def look() -> None:
        """Name the processes that a signal has stopped, because `up` waits for them and would
        otherwise not say why.
        """
        for fault in (
            {
                stopped_fault(role, process)
                for role, process in process_record.running(folder).items()
            }
            - told
            - {""}
        ):
            told.add(fault)
            say(fault)

    def meanwhile() -> None:
        look()
        if "superlink" not in process_record.running(folder):
            raise RunError(
                ended_fault("superlink", process_record.read(folder)["superlink"].pid, folder)
            )

    flower.meanwhile, wait = meanwhile, partial(_wait, folder, running, started, look=look)
    try:
        process_record.write(folder, process_record.known(folder))
        if "superlink" not in running:
            # ServerApps of a SuperLink that died still hold their runs
            end(started_under(folder.flower_home))
        _check_ports(settings, running)
        start(folder, "superlink", running, started)
        start(folder, "signer", running, started)
        if settings.superlink is not None:
            start(folder, "proxy", running, started)
        for node in settings.nodes:
            start(folder, f"{node.name}-service", running, started)
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
            start(folder, f"{node.name}-supernode", running, started)
            start(folder, f"{node.name}-executor", running, started)
        for node in settings.nodes:
            wait(f"the service of {node.name}", partial(_answers, folder, node.name))
        # The SuperNode's own log is read, because for half a minute the SuperLink counts killed
        # nodes as connected.
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
    """Refuse to start processes if another program uses one of their ports.

    Raises:
        RunError: a port is in use.
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
    return _stop(
        folder, ["superlink", *process_record.read(folder), *process_record.find_marked(folder)]
    )


def stop_node(folder: DeploymentFolder, name: str) -> int:
    """Stop the processes of one node on this machine, and return their number."""
    return _stop(folder, [f"{name}-{role}" for role in ("service", "supernode", "executor")])


def hello(folder: DeploymentFolder, name: str) -> dict[str, Any]:
    """The budget of a node on this machine, as its service states it. If there is no answer, `ok`
    is False and `why` gives the reason.
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


def start(
    folder: DeploymentFolder, role: str, running: dict[str, psutil.Process], started: list[str]
) -> None:
    """Start the process of a role, record the process and add the role to `started`. If the role's
    process is running already, do nothing.

    Raises:
        RunError: the record cannot be written; the process is then ended.
    """
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
                f'export {MARK}="$$ $1"; exec "$0"',
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
        process_record.write(
            folder,
            process_record.read(folder)
            | {role: Started(process.pid, process_record.start_time(child), since)},
        )
    except BaseException:
        end({child})
        raise


def _script(folder: DeploymentFolder, role: str) -> Path:
    """The script that starts the process of a role: "superlink", "signer", "proxy", or a process of
    a node, such as "node0-service".
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
    """Wait until `ready` returns true. Meanwhile restart SuperNodes that the SuperLink refuses, and
    processes that were running when `up` was called but have ended since.

    `look` is called before each call of `ready`.
    """
    deadline = time.monotonic() + _STARTUP_S
    while True:
        look()
        if ready():
            return
        running = process_record.running(folder)
        for role in [name for name in dict.fromkeys((*roles, *started)) if name not in running]:
            # the other ended processes were about to end when they were found running
            if role in started:
                pid, _, since = process_record.read(folder)[role]
                if not refusal(folder, role, since):
                    said = tail(process_record.output_of(folder, role, since))
                    # fedlgm's own processes end with a line that begins with "error: "
                    last = said.rpartition("\n")[2]
                    if last.startswith("error: "):
                        raise RunError(f"{role} ended: {last[7:]}")
                    raise RunError(f"{ended_fault(role, pid, folder)}. End of its log:\n{said}")
                time.sleep(_AGAIN_S)
            start(folder, role, running, started)
        if time.monotonic() > deadline:
            raise RunError(f"{what} did not start within {_STARTUP_S:g} s; see {folder.logs}")
        time.sleep(every)


def _stop(folder: DeploymentFolder, roles: list[str]) -> int:
    running = process_record.all_running(folder)
    # SuperNodes end first, because they tell the SuperLink that they leave. Otherwise it would
    # refuse them for half a minute.
    supernodes = {
        running[role] for role in roles if role in running and role.endswith("-supernode")
    }
    family = {
        member for role in roles if role in running for member in with_children(running[role])
    }
    if "superlink" in roles:
        family |= started_under(folder.flower_home)
    record = {
        role: entry for role, entry in process_record.read(folder).items() if role not in roles
    }
    # The record is written first, because a supervisor restarts the processes in it. If the disk is
    # full, the record continues to list processes that have ended.
    with contextlib.suppress(RunError):
        process_record.write(folder, record)
    end(supernodes)
    end(family)
    return len(family)


def _all_know_their_id(folder: DeploymentFolder, started: list[str]) -> bool:
    return all(
        process_record.node_id(folder, role) for role in started if role.endswith("-supernode")
    )
