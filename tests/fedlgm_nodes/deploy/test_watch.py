"""Processes of a deployment that end or are stopped while a run goes on are named at once, with
what to do."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from patience import wait_until

from fedlgm_nodes.deploy import process_record, processes
from fedlgm_nodes.deploy import watch as watching
from fedlgm_nodes.deploy.deployment_folder import DeploymentFolder
from fedlgm_nodes.deploy.watch import KilledError, Watch
from simulations.config import recipe as recipes
from simulations.engines.flower_processes import end, with_children
from simulations.runs import new_folder


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DeploymentFolder]:
    """A deployment whose processes wait. Its SuperLink has a SuperExec, which starts a ServerApp
    once `begin` is written to; as with Flower's, neither has other processes."""
    monkeypatch.setattr(watching, "_LOOK_S", 0.2)
    os.mkfifo(tmp_path / "begin")
    os.mkfifo(tmp_path / "never")
    texts = {
        "flower-superlink": "flower-superexec & read line < never",
        "flower-superexec": "read line < begin; flwr-serverapp & read line < never",
        "flwr-serverapp": "read line < never",
        "sleeps": "read line < never",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\ncd {tmp_path}\nPATH={tmp_path}:$PATH\n{text}\n")
        (tmp_path / name).chmod(0o700)
    monkeypatch.setattr(
        processes,
        "_script",
        lambda _, role: tmp_path / ("flower-superlink" if role == "superlink" else "sleeps"),
    )
    made = DeploymentFolder(tmp_path)
    for role in ("superlink", "node1-service"):
        processes.start(made, role, {}, [])
    wait_until(lambda: _called(made, "flower-superexec"))
    yield made
    of_stubs = set()  # with those whose parents the test has killed
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(word.startswith(str(tmp_path)) for word in process.cmdline()):
                of_stubs.add(process)
    end(of_stubs)


def _called(folder: DeploymentFolder, command: str) -> list[psutil.Process]:
    link = watching.superlink_of(folder)
    family = [] if link is None else [link, *link.children(recursive=True)]
    return [one for one in family if watching.is_called(one, command)]


def _named(watch: Watch, condition: Callable[[], object]) -> None:
    """Look as a run does, until `condition` holds; that takes longer on a busy machine."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() - begun < 20
        watch.look()
        time.sleep(0.1)


def test_a_nodes_killed_process_is_named_once_and_again_if_its_successor_is_killed(
    folder: DeploymentFolder,
) -> None:
    lines: list[str] = []
    watch = Watch(folder, lines.append)
    assert lines == []
    for killed in (1, 2):
        pid = process_record.read(folder)["node1-service"][0]
        os.kill(pid, signal.SIGKILL)
        _named(watch, lambda killed=killed: len(lines) == killed)
        assert lines[-1] == (
            f"node1-service (process {pid}) has ended, for example because it was killed: `fedlgm "
            f"deploy up {folder.path}` starts it again"
        )
        for _ in range(3):
            watch._looked = 0.0
            watch.look()
        assert len(lines) == killed
        processes.start(folder, "node1-service", {}, [])


@pytest.mark.parametrize(
    "role", ["node1-service", "superlink", "flower-superexec", "flwr-serverapp"]
)
def test_a_stopped_process_is_named_before_the_first_round(
    folder: DeploymentFolder, role: str
) -> None:
    lines: list[str] = []
    watch = Watch(folder, lines.append)
    (folder.path / "begin").write_text("\n")
    wait_until(lambda: _called(folder, "flwr-serverapp"))
    known = process_record.read(folder)
    pid = known[role][0] if role in known else _called(folder, role)[0].pid
    os.kill(pid, signal.SIGSTOP)
    _named(watch, lambda: lines)
    assert lines == [
        f"{role} (process {pid}) is stopped by a signal: `kill -CONT {pid}` continues it"
    ]
    os.kill(pid, signal.SIGCONT)


@pytest.mark.parametrize("command", ["flower-superlink", "flower-superexec"])
def test_a_killed_process_of_the_server_ends_the_run(
    folder: DeploymentFolder, command: str
) -> None:
    (process,) = _called(folder, command)
    watch = Watch(folder, print)
    process.kill()
    role = command.replace("flower-superlink", "superlink")
    says = rf"^{role} \(process {process.pid}\).* has ended.*deploy up.*resumes the run$"
    with pytest.raises(KilledError, match=says):
        _named(watch, lambda: False)


def test_a_superlink_that_systemd_has_started_is_watched(folder: DeploymentFolder) -> None:
    """It has neither a record nor the variable of `up`."""
    end(with_children(process_record.running(folder)["superlink"]))
    environment = os.environ | {"FLWR_HOME": str(folder.flower_home)}
    with subprocess.Popen([folder.path / "flower-superlink"], env=environment) as started:
        wait_until(lambda: _called(folder, "flower-superexec"))
        family = with_children(psutil.Process(started.pid))
        folder.processes_file.unlink()
        watch = Watch(folder, print)
        try:
            started.kill()
            with pytest.raises(
                KilledError, match=rf"^superlink \(process {started.pid}\) has ended"
            ):
                _named(watch, lambda: False)
        finally:
            end(family)


def test_a_superlink_whose_superexec_is_gone_is_refused(folder: DeploymentFolder) -> None:
    """Its runs waited forever, and said nothing."""
    (process,) = _called(folder, "flower-superexec")
    process.kill()
    wait_until(lambda: not _called(folder, "flower-superexec"))
    with pytest.raises(
        KilledError, match=r"^flower-superexec of the SuperLink \(process \d+\).*deploy down"
    ):
        Watch(folder, print)


def test_a_server_process_that_is_killed_before_it_begins_is_missed(
    folder: DeploymentFolder,
) -> None:
    watch = Watch(folder, print)
    watch.target = new_folder.create(folder.path / "run", recipes.load("nodes"))
    (folder.path / "begin").write_text("\n")
    wait_until(lambda: _called(folder, "flwr-serverapp"))
    watch.require_app()
    (app,) = _called(folder, "flwr-serverapp")
    app.kill()
    _named(watch, lambda: watch.misses_app)
    with pytest.raises(
        KilledError, match=rf"server process \(process {app.pid}\) has ended without an error"
    ):
        watch.require_app()
    with watch.target.lock():
        watch.require_app()
