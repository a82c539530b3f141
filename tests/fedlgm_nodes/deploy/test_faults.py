"""Processes of a real deployment that are killed or stopped while `fedlgm deploy run` follows its
run."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
from patience import LIMIT_S, wait_until

from fedlgm_nodes.deploy import processes
from fedlgm_nodes.deploy.create import create
from fedlgm_nodes.deploy.deployment_folder import DeploymentFolder
from simulations.config import recipe as recipes
from simulations.engines.flower_processes import started_under

pytestmark = pytest.mark.slow
SETTINGS = (
    "model.hidden=[8]", "training.epochs=1", "privacy.epsilon=1.0", "federation.rounds=6",
    "privacy.max_participations=6", "deployment.offline_seconds=2",
)  # fmt: skip
NAMED_S = 10.0  # half of it unless the machine is busy; Flower takes 14 or more to notice the first


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentFolder]:
    example = recipes.load("nodes", SETTINGS)
    folder = create(
        tmp_path_factory.mktemp("f") / "lab", 3, example=example, policy={"epsilon": 500.0}
    )
    try:
        yield folder
    finally:
        processes.down(folder)


@pytest.fixture(scope="module")
def seeds() -> Iterator[int]:
    return itertools.count(1)


def _pid(folder: DeploymentFolder, role: str) -> int:
    """The process of a role, or of a command of Flower's that the SuperLink starts."""
    if role in (known := processes._read_record(folder)):
        return known[role][0]
    found: list[psutil.Process] = []

    def started() -> bool:
        found[:] = [
            one for one in started_under(folder.flower_home) if processes.is_called(one, role)
        ]
        return bool(found)

    wait_until(started, every=0.2)
    return found[0].pid


@pytest.mark.parametrize(
    ("role", "order", "after", "says", "status"),
    [
        ("superlink", signal.SIGKILL, "round 1", r"has ended.*deploy up.*resumes the run", 2),
        ("flwr-serverapp", signal.SIGKILL, "round 1", r"has ended.*resumes the run", 2),
        ("node2-service", signal.SIGKILL, "round 1", r"has ended.*deploy up", 1),
        ("node1-supernode", signal.SIGKILL, "round 1", r"has ended.*deploy up", 1),
        (
            "flwr-serverapp",
            signal.SIGSTOP,
            "",
            r"is stopped by a signal: `kill -CONT \d+` continues it",
            0,
        ),
        (
            "node0-service",
            signal.SIGSTOP,
            "round 1",
            r"is stopped by a signal: `kill -CONT \d+` continues it",
            0,
        ),
    ],
    ids=lambda value: (
        str(value) if isinstance(value, str) and value[:3] in ("sup", "flw", "nod") else ""
    ),
)
def test_it_is_named_within_seconds(
    lab: DeploymentFolder,
    role: str,
    order: signal.Signals,
    after: str,
    says: str,
    status: int,
    seeds: Iterator[int],
) -> None:
    processes.up(lab)
    # Another model for each: nodes do not keep all answers that they gave to an earlier run.
    settings = (*SETTINGS, f"model.seed={next(seeds)}")
    sets = [part for one in settings for part in ("--set", one)]
    command = [
        sys.executable,
        "-m",
        "simulations.cli",
        "deploy",
        "run",
        "nodes",
        str(lab.path),
        "--fresh",
        *sets,
    ]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stderr is not None
        named: list[float] = []
        lines: list[str] = []

        def read() -> None:
            for line in run.stderr or ():
                lines.append(line)
                if struck and re.search(rf"\(process {struck[0][0]}\) {says}", line):
                    named.append(time.monotonic())

        struck: list[tuple[int, float]] = []
        reader = threading.Thread(target=read)
        reader.start()
        try:
            if after:
                wait_until(
                    lambda: any(line.startswith(after) for line in lines) or run.poll() is not None
                )
                assert run.poll() is None, lines
            pid = _pid(lab, role)
            struck.append((pid, time.monotonic()))
            os.kill(pid, order)
            wait_until(lambda: named or run.poll() is not None)
            if order == signal.SIGSTOP:
                os.kill(pid, signal.SIGCONT)
            assert run.wait(LIMIT_S) == status, lines
        finally:
            run.kill()
            reader.join()
        assert named, lines
        assert named[0] - struck[0][1] < NAMED_S
