"""Processes of a deployment that end while others are started."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import typer
from flwr.supercore.error import ApiErrorCode

from fedlgm.errors import RunError
from fedlgm_nodes.deploy import deployment_commands as commands
from fedlgm_nodes.deploy import (
    deployment_status,
    process_faults,
    process_record,
    processes,
    restarts,
)
from fedlgm_nodes.deploy.deployment_folder import DeployedNode, DeploymentFolder, Settings
from fedlgm_nodes.deploy.flower_cli import Flower
from simulations.engines import flower_command
from simulations.engines.flower_processes import free_ports


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DeploymentFolder:
    """A deployment whose scripts sleep."""
    script = tmp_path / "sleep.sh"
    script.write_text("#!/bin/sh\nexec sleep 60\n")
    script.chmod(0o700)
    monkeypatch.setattr(processes, "_script", lambda folder, role: script)
    return DeploymentFolder(tmp_path)


def test_what_was_about_to_end_when_it_was_found_running_is_started(
    folder: DeploymentFolder,
) -> None:
    """A service that was killed a moment before `up` looked; `up` waited five minutes for it."""
    started: list[str] = []
    processes.start(folder, "node0-service", {}, [])
    found = process_record.running(folder)
    first = found["node0-service"]
    first.kill()
    psutil.wait_procs([first], timeout=10)
    try:
        processes._wait(
            folder,
            found,
            started,
            "the service",
            lambda: "node0-service" in process_record.running(folder),
        )
        assert started == ["node0-service"]
        assert process_record.running(folder)["node0-service"].pid != first.pid
    finally:
        processes._stop(folder, ["node0-service"])
    assert json.loads(folder.processes_file.read_text()) == {}


@pytest.mark.parametrize("jump", [3600.0, -3600.0, 3e7])
def test_a_clock_that_is_set_changes_no_process(
    folder: DeploymentFolder, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    """The time of day at which the machine started follows its clock, and with it that of every
    process."""
    processes.start(folder, "node0-service", {}, [])
    (running,) = process_record.running(folder).values()
    real = psutil._psplatform.boot_time
    try:
        monkeypatch.setattr(psutil._psplatform, "boot_time", lambda: real() + jump)
        assert [one.pid for one in process_record.running(folder).values()] == [running.pid]
        assert [pid for pid, *_ in process_record.find_marked(folder).values()] == [running.pid]
        assert psutil.Process(running.pid).create_time() == pytest.approx(
            running.create_time() + jump, abs=1
        )
    finally:
        processes._stop(folder, ["node0-service"])


def test_what_was_started_here_and_ended_is_an_error(folder: DeploymentFolder) -> None:
    started: list[str] = []
    processes.start(folder, "node0-service", {}, started)
    process_record.running(folder)["node0-service"].kill()
    (folder.logs / "node0-service.log").write_text("started\nerror: there is no data\n")
    with pytest.raises(RunError, match=r"^node0-service ended: there is no data$"):
        processes._wait(folder, {}, started, "the service", lambda: False)


@pytest.mark.parametrize("role", ["superlink", "node1-supernode"])
def test_a_port_that_another_program_has_is_named_before_anything_starts(
    folder: DeploymentFolder, role: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SuperLink's log was printed, fourteen lines of it."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken, free = other.getsockname()[1], free_ports(3)
        nodes = [DeployedNode(name=f"node{i}", port=free[i]) for i in range(2)]
        settings = Settings(host="127.0.0.1", port=free[2], nodes=nodes)
        if role == "superlink":
            settings = settings.model_copy(update={"port": taken})
        else:
            settings = settings.model_copy(
                update={"nodes": [nodes[0], DeployedNode(name="node1", port=taken)]}
            )
        monkeypatch.setattr(DeploymentFolder, "settings", lambda folder: settings)
        with pytest.raises(
            RunError,
            match=rf"^port {taken} of 127\.0\.0\.1, which {role} needs, is in use by another",
        ):
            processes.up(folder)
    assert not folder.processes_file.exists() or json.loads(folder.processes_file.read_text()) == {}


def test_a_supernode_states_its_id_at_the_head_of_its_log(folder: DeploymentFolder) -> None:
    """`status` read logs of hundreds of megabytes, and believed what a round wrote into them."""
    log, role = folder.logs / "node0-supernode.log", "node0-supernode"
    folder.logs.mkdir()
    log.write_text("INFO : SuperNode ID: 6\n")
    processes.start(folder, role, {}, [])
    try:
        with log.open("a") as end:
            end.write(
                "INFO : SuperNode ID: 7\n"
                + "INFO : a round\n" * 100_000
                + "INFO : SuperNode ID: 666\n"
            )
        assert process_record.node_id(folder, role) == "7"
    finally:
        processes._stop(folder, [role])


@pytest.mark.parametrize(
    "text",
    ["", "3", "null", '{"a": 1}', '{"a": [1, 2]}', '{"a": [null, null, 0]}', '{"a": ["1", 2, 0]}'],
)
def test_a_damaged_record_of_processes_is_named(folder: DeploymentFolder, text: str) -> None:
    folder.processes_file.write_text(text)
    with pytest.raises(
        RunError, match=r"processes\.json is damaged .*: delete it: the processes that `up` started"
    ):
        processes.down(folder)
    assert folder.processes_file.read_text() == text


@pytest.mark.parametrize("lost", [True, False])
def test_processes_are_found_without_their_record(folder: DeploymentFolder, lost: bool) -> None:
    """`down` left all of them running and said that nothing was; `up` ended the SuperLink and
    refused its nodes' ports.

    Where the machine's clock is set, the times in the record are those of no process.
    """

    def lose() -> None:
        if lost:
            folder.processes_file.unlink()
        else:
            known = process_record.read(folder)
            process_record.write(
                folder,
                {role: (pid, born - 3600, since) for role, (pid, born, since) in known.items()},
            )

    roles = ["signer", "node0-service"]
    for role in roles:
        processes.start(folder, role, {}, [])
    running = process_record.running(folder)
    kept = process_record.read(folder)
    lose()
    try:
        assert process_record.running(folder) == {}
        assert process_record.all_running(folder) == running
        process_record.write(folder, process_record.find_marked(folder))
        assert process_record.read(folder) == kept
        lose()
        assert process_record.find_marked(DeploymentFolder(folder.path / "another")) == {}
        assert processes.down(folder) == 2
        assert not any(
            process.is_running() and process.status() != "zombie" for process in running.values()
        )
    finally:
        for process in running.values():
            with contextlib.suppress(psutil.Error):
                process.kill()


def test_a_child_is_not_taken_for_its_parent(
    folder: DeploymentFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A ServerApp outlives a SuperLink that was killed."""
    script = folder.path / "parent.sh"
    script.write_text("#!/bin/sh\nsleep 60 &\nwait\n")
    script.chmod(0o700)
    monkeypatch.setattr(processes, "_script", lambda folder, role: script)
    processes.start(folder, "superlink", {}, [])
    parent = process_record.running(folder)["superlink"]
    while not (children := parent.children()):
        time.sleep(0.01)
    try:
        assert process_record.find_marked(folder)["superlink"][0] == parent.pid
        parent.kill()
        psutil.wait_procs([parent], timeout=10)
        assert process_record.all_running(folder) == {}
    finally:
        for child in children:
            child.kill()


@pytest.mark.parametrize(
    ("value", "user"),
    [("nonsense", None), ("$$ 0 superlink {path}", 65_534)],
    ids=["another meaning", "another user"],
)
def test_the_variable_of_a_stranger_is_ignored(
    folder: DeploymentFolder, value: str, user: int | None
) -> None:
    if user is not None and os.getuid() != 0:
        pytest.skip("only root starts processes of other users")
    text = f'export {process_record.MARK}="{value.format(path=folder.path)}"; exec sleep 60'
    with subprocess.Popen(["/bin/sh", "-c", text], user=user, cwd="/") as stranger:
        try:
            while psutil.Process(stranger.pid).name() != "sleep":
                time.sleep(0.01)
            assert process_record.find_marked(folder) == {}
        finally:
            stranger.kill()


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()]
)
def test_a_process_that_cannot_be_recorded_is_ended(
    folder: DeploymentFolder, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    def fails(*args: object) -> None:
        raise error

    monkeypatch.setattr(process_record, "write_durably", fails)
    kind, says = (
        RunError,
        r"^the record of processes .*processes\.json cannot be written: the disk is full; free some space$",
    )
    if isinstance(error, KeyboardInterrupt):
        kind, says = KeyboardInterrupt, "^$"
    with pytest.raises(kind, match=says):
        processes.start(folder, "node0-service", {}, [])
    assert process_record.find_marked(folder) == {}


def test_a_killed_supernode_is_told_from_a_connected_one(
    folder: DeploymentFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For half a minute after a kill the SuperLink counts the node as connected, and `status` said
    no more."""

    class Listing:
        def __init__(self, folder: DeploymentFolder) -> None: ...

        def healthy(self) -> bool:
            return True

        def nodes(self) -> dict[str, dict[str, str]]:
            said = {"online-at": "2026-11-26 13:37:57Z", "offline-at": "N/A", "status": "online"}
            return {
                "7": said,
                "8": said,
                "9": said | {"status": "offline", "offline-at": "2026-11-26 13:39:37Z"},
            }

    nodes = [DeployedNode(name=f"node{i}", port=1000 + i) for i in range(4)]
    settings = Settings(host="127.0.0.1", port=1004, nodes=nodes)
    monkeypatch.setattr(DeploymentFolder, "settings", lambda folder: settings)
    monkeypatch.setattr(DeploymentFolder, "open", lambda path: folder)
    monkeypatch.setattr(deployment_status, "Flower", Listing)
    monkeypatch.setattr(
        deployment_status,
        "hello",
        lambda folder, name: {"ok": False, "why": "its ledger was rolled back"},
    )
    folder.logs.mkdir()
    for name, node in (
        ("node0", 6),
        ("node0", 7),
        ("node1", 8),
        ("node2", 9),
    ):  # node0 had another id before
        with (folder.logs / f"{name}-supernode.log").open("a") as log:
            log.write(f"INFO : SuperNode ID: {node}\n")
    running = dict.fromkeys(
        ("node0-supernode", "node1-supernode", "node1-service"), psutil.Process()
    )
    monkeypatch.setattr(process_record, "all_running", lambda folder: running)
    found = [(node["online"], node["since"]) for node in deployment_status.status(folder)["nodes"]]
    assert found == [(True, "2026-11-26 13:37:57Z")] * 2 + [
        (False, "2026-11-26 13:39:37Z"),
        (None, None),
    ]
    del running["node1-supernode"]
    commands.status(folder.path)
    said = capsys.readouterr().out
    assert "answers and counts 2 nodes as connected" in said
    assert (
        "node1: none of the SuperNodes that `up` started runs here; the SuperLink counts a killed "
        "SuperNode" in said
    )
    assert "node1: its service answers no questions: its ledger was rolled back" in said
    assert "node0:" not in said


def test_nodes_are_registered_once_by_flowers_code_of_the_error(
    folder: DeploymentFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record of registered nodes may be lost; other refusals are shown."""
    registered, invalid = (
        f'{{"success": false, "error-message": "[code: {int(code)}] Public key refused."}}\n'
        for code in (ApiErrorCode.PUBLIC_KEY_ALREADY_IN_USE, ApiErrorCode.PUBLIC_KEY_NOT_VALID)
    )
    said = iter([registered + '{"success": true}\n', '{"success": true}' + invalid, registered])
    monkeypatch.setattr(Flower, "_output", lambda *arguments: next(said))
    flower = Flower(folder)
    flower.register("node0", "node1")
    with pytest.raises(RunError, match=r"node1: \[code: 22\]"):
        flower.register("node0", "node1")
    with pytest.raises(RunError, match="supernode register` failed"):  # it said nothing of node1
        flower.register("node0", "node1")


@pytest.mark.slow
def test_several_commands_of_flower_are_run_by_one_process(folder: DeploymentFolder) -> None:
    calls = [("supernode", "list", "nowhere")] * 2
    answers = Flower(folder).json_of_each(calls)
    assert len(answers) == 2
    assert all(
        "SuperLink connection 'nowhere' not found" in one["error-message"] for one in answers
    )


@pytest.fixture
def nodeless(
    folder: DeploymentFolder, monkeypatch: pytest.MonkeyPatch
) -> Iterator[DeploymentFolder]:
    """The deployment without nodes, where `flwr` never ends."""
    settings = Settings(host="127.0.0.1", port=free_ports(1)[0], nodes=[])
    monkeypatch.setattr(DeploymentFolder, "settings", lambda folder: settings)
    monkeypatch.setattr(flower_command, "executable", lambda name: str(folder.path / "sleep.sh"))
    folder.signer.socket.parent.mkdir(parents=True)
    folder.signer.socket.touch()
    yield folder
    processes.down(folder)


def test_up_names_a_superlink_that_is_killed_while_flower_is_asked(
    nodeless: DeploymentFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a quarter of a minute Flower said that one should check the network connection.

    It is asked for a SuperNode that was there before."""
    killed: list[psutil.Process] = []
    nodes = [DeployedNode(name="node0", port=free_ports(1)[0])]
    settings = Settings(host="127.0.0.1", port=free_ports(1)[0], nodes=nodes)
    monkeypatch.setattr(DeploymentFolder, "settings", lambda folder: settings)
    monkeypatch.setattr(processes, "_answers", lambda *_: True)
    nodeless.registered_file.parent.mkdir(exist_ok=True)
    nodeless.registered_file.write_text("node0")
    processes.start(nodeless, "node0-supernode", {}, [])

    def kill() -> None:
        killed.append(process_record.running(nodeless)["superlink"])
        killed[0].kill()

    monkeypatch.setattr(Flower, "healthy", lambda flower: True)
    threading.Timer(1.0, kill).start()
    before = psutil.Process().children()
    begun = time.monotonic()
    with pytest.raises(
        RunError,
        match=r"^superlink \(process \d+\) has ended.*: `fedlgm deploy up .*` starts it again$",
    ):
        processes.up(nodeless)
    assert time.monotonic() - begun < 20
    left = [
        one
        for one in psutil.Process().children()
        if one not in before and one.status() != psutil.STATUS_ZOMBIE
    ]
    assert left == []  # `flwr` has ended, too


def test_up_names_a_process_that_is_stopped(
    nodeless: DeploymentFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited for five minutes in silence."""
    processes.start(nodeless, "superlink", {}, [])
    link = process_record.running(nodeless)["superlink"]
    link.suspend()
    monkeypatch.setattr(Flower, "healthy", lambda flower: link.status() != psutil.STATUS_STOPPED)
    monkeypatch.setattr(Flower, "online", lambda flower: 0)
    lines: list[str] = []

    def resume(line: str) -> None:
        lines.append(line)
        link.resume()

    processes.up(nodeless, resume)
    assert (
        lines[0]
        == f"superlink (process {link.pid}) is stopped by a signal: `kill -CONT {link.pid}` "
        "continues it"
    )


def test_status_lists_what_has_ended_or_is_stopped(
    nodeless: DeploymentFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(DeploymentFolder, "open", lambda path: nodeless)
    monkeypatch.setattr(Flower, "healthy", lambda flower: True)
    monkeypatch.setattr(Flower, "nodes", lambda flower: {})
    for role in ("superlink", "signer", "node0-service"):
        processes.start(nodeless, role, {}, [])
    commands.status(nodeless.path)
    running = process_record.running(nodeless)
    running["node0-service"].suspend()
    running["signer"].kill()
    psutil.wait_procs([running["signer"]], timeout=10)
    capsys.readouterr()
    with pytest.raises(typer.Exit) as ended:
        commands.status(nodeless.path)
    assert ended.value.exit_code == 1
    said = capsys.readouterr().out
    assert (
        f"signer (process {running['signer'].pid}) has ended, for example because it was killed: "
        "`fedlgm" in said
    )
    assert (
        f"node0-service (process {running['node0-service'].pid}) is stopped by a signal: `kill "
        "-CONT" in said
    )
    running["node0-service"].resume()


def test_a_supernode_that_is_refused_for_half_a_minute_is_one_sentence(
    folder: DeploymentFolder,
) -> None:
    """`deploy run` said "has ended" again for each process that `up` had started meanwhile."""
    role, said, started = "node0-supernode", list[str](), list[str]()
    look = process_faults.Look(folder, said.append)
    for attempt in range(3):
        processes.start(folder, role, {}, started)
        process = process_record.running(folder)[role]
        look()
        if attempt:
            with (folder.logs / f"{role}.log").open("a") as log:
                log.write(f"Error {process_faults._STILL_CONNECTED}\n")
        process.kill()
        psutil.wait_procs([process], timeout=10)
        look()
    assert len(said) == 2
    assert "has ended" in said[0]
    assert "half a minute" in said[1]


def test_a_supervisor_starts_again_what_ends(
    folder: DeploymentFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And says it once; what `down` has stopped stays so."""
    role, said = "node0-service", list[str]()
    processes.start(folder, role, {}, [])
    supervisor = restarts.Supervisor(folder, said.append)
    pids = set()
    for _ in range(3):
        process = process_record.running(folder)[role]
        pids.add(process.pid)
        process.kill()
        psutil.wait_procs([process], timeout=10)
        supervisor()
    assert len(pids) == 3
    assert len(said) == 1
    assert "is started again" in said[0]
    supervisor()  # it runs
    process = process_record.running(folder)[role]
    process.kill()
    psutil.wait_procs([process], timeout=10)
    supervisor()
    assert len(said) == 2
    processes.down(folder)
    supervisor()
    assert process_record.running(folder) == {}


def test_a_log_is_rotated_while_its_process_writes(
    folder: DeploymentFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The SuperNode's id, at the head of its log, is kept, and so are the last lines."""
    monkeypatch.setattr(restarts, "_LARGEST_LOG", 1000)
    role, log = "node0-supernode", folder.logs / "node0-supernode.log"
    folder.logs.mkdir()
    log.write_text("an earlier start\n")
    processes.start(folder, role, {}, [])
    supervisor = restarts.Supervisor(folder, print)
    try:
        with log.open("a", buffering=1) as output:
            output.write("INFO : SuperNode ID: 7\n")
            for number in range(3):
                supervisor()
                assert process_record.node_id(folder, role) == "7"
                output.write(f"round {number}\n" + "x" * 1000 + "\n")
            supervisor()
            output.write("the last line\n")
        assert log.stat().st_size < 1000
        assert log.read_text().endswith("the last line\n")
        assert "round 2" in log.with_name("node0-supernode.log.1").read_text()
        process_record.write(folder, process_record.known(folder))
        assert process_record.node_id(folder, role) == "7"
    finally:
        processes._stop(folder, [role])
