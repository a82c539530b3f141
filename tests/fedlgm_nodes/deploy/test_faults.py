"""Processes of a real deployment that are killed or stopped while `fedlgm deploy run` follows its
run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import psutil
import pytest
from patience import LIMIT_S, wait_until

from fedlgm_nodes.deploy import deployment_status, process_record, processes, watch
from fedlgm_nodes.deploy.create import create
from fedlgm_nodes.deploy.deployment_folder import DeploymentFolder
from fedlgm_nodes.deploy.server_entry import REPORT, NodesRecord
from simulations.config import recipe as recipes
from simulations.engines.flower_processes import started_under
from simulations.runs.folder import RunFolder
from tests.support.interruption import take_ctrl_c

pytestmark = pytest.mark.slow
ROUNDS = 8  # lines come late on a busy machine: enough rounds are left after each stop
SETTINGS = (
    "model.hidden=[8]", "training.epochs=1", "privacy.epsilon=1.0", f"federation.rounds={ROUNDS}",
    f"privacy.max_participations={ROUNDS}", "deployment.offline_seconds=2", "federation.quorum=0.3",
)  # fmt: skip
NAMED_S = 10.0  # half of it unless the machine is busy; Flower takes 14 or more to notice the first


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeploymentFolder]:
    example = recipes.load("nodes", SETTINGS)
    folder = create(
        tmp_path_factory.mktemp("f") / "lab", 3, example=example, policy={"epsilon": 500.0}
    )
    try:
        processes.up(folder)
        yield folder
    finally:
        processes.down(folder)


def _pid(folder: DeploymentFolder, role: str) -> int:
    """The process of a role, or of a command of Flower's that the SuperLink starts."""
    if role in (known := process_record.read(folder)):
        return known[role][0]
    found: list[psutil.Process] = []

    def started() -> bool:
        found[:] = [one for one in started_under(folder.flower_home) if watch.is_called(one, role)]
        return bool(found)

    wait_until(started, every=0.2)
    return found[0].pid


class Strike(NamedTuple):
    """A signal for a process, once a line of progress begins with `after`; and what is said."""

    role: str
    order: signal.Signals
    after: str
    says: str


ENDED = r"has ended.*deploy up"
RESUMES = r"has ended.*resumes the run"
STOPPED = r"is stopped by a signal: `kill -CONT \d+` continues it"


def run_under(
    lab: DeploymentFolder, strikes: Iterable[Strike] = (), *, seed: int, interrupt: str = ""
) -> tuple[int, list[str]]:
    """`fedlgm deploy run` while these strikes happen, each named within seconds.

    Ctrl-C follows the line that begins with `interrupt`. Returns the exit status, and the lines."""
    # Another model for each run: nodes do not keep all answers that they gave to an earlier run.
    settings = (*SETTINGS, f"model.seed={seed}")
    sets = [part for one in settings for part in ("--set", one)]
    command = [sys.executable, "-m", "simulations.cli", "deploy", "run", "nodes", str(lab.path)]
    take_ctrl_c()
    with subprocess.Popen(
        [*command, *sets], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as run:
        lines: list[str] = []
        reader = threading.Thread(target=lambda: lines.extend(run.stderr or ()))
        reader.start()

        def wait_for(pattern: str) -> None:
            wait_until(lambda: any(re.search(pattern, line) for line in lines) or _ended(run))
            assert any(re.search(pattern, line) for line in lines), lines

        try:
            for role, order, after, says in strikes:
                wait_for(f"^{after}")
                pid = _pid(lab, role)
                os.kill(pid, order)
                struck = time.monotonic()
                wait_for(rf"\(process {pid}\) {says}")
                assert time.monotonic() - struck < NAMED_S
                if order == signal.SIGSTOP:
                    os.kill(pid, signal.SIGCONT)
            if interrupt:
                wait_for(f"^{interrupt}")
                run.send_signal(signal.SIGINT)
            return run.wait(LIMIT_S), lines
        finally:
            run.kill()
            reader.join()


def _ended(run: subprocess.Popen[str]) -> bool:
    """Whether the command has ended, a moment ago at least: its last lines have been read."""
    if run.poll() is None:
        return False
    time.sleep(1)
    return True


def _rows(lab: DeploymentFolder, name: str) -> list[Any]:
    with lab.node(name).service.ledger(readonly=True) as ledger:
        return ledger.rows()


def test_processes_that_are_stopped_or_killed_are_named_and_the_run_goes_on(
    lab: DeploymentFolder,
) -> None:
    """Nodes of killed processes count as zero."""
    strikes = [
        Strike("flwr-serverapp", signal.SIGSTOP, "", STOPPED),
        Strike("node0-service", signal.SIGSTOP, "round 1", STOPPED),
        Strike("node2-service", signal.SIGKILL, "round 2", ENDED),
        Strike("node1-supernode", signal.SIGKILL, "round 3", ENDED),
    ]
    status, lines = run_under(lab, strikes, seed=1)
    assert status == 1, lines
    run = max(lab.runs.glob("*/result.json"), key=lambda file: file.stat().st_mtime).parent
    rounds = [json.loads(line) for line in (run / "private" / REPORT).read_text().splitlines()]
    assert rounds[-1]["answered"] == ["node0"]
    assert "does not answer" in rounds[-1]["lost"]["node2"]
    assert "does not answer: the release service" in "\n".join(
        NodesRecord.of(RunFolder.open(run)).silent()
    )
    assert len(_rows(lab, "node0")) - len(_rows(lab, "node2")) >= 4


def test_after_a_power_cut_everything_comes_up(lab: DeploymentFolder) -> None:
    """Also the processes that were killed before it. A SuperLink refuses a SuperNode that went
    without a word for half a minute, as one that is connected twice."""
    ours = list(process_record.running(lab).values())
    for process in ours:
        process.kill()
    psutil.wait_procs(ours)
    said: list[str] = []
    processes.up(lab, said.append)
    assert all(
        node["service"] and node["online"] for node in deployment_status.status(lab)["nodes"]
    )
    assert "can run code as this user" in said[-1]


def test_a_run_that_is_stopped_in_every_way_goes_on_and_costs_the_nodes_nothing_twice(
    lab: DeploymentFolder,
) -> None:
    """By Ctrl-C, by the death of its server process, and by the death of the SuperLink."""
    before = [len(_rows(lab, f"node{i}")) for i in range(3)]
    status, lines = run_under(lab, seed=2, interrupt="round 1")
    assert status == 130, lines
    for role in ("flwr-serverapp", "superlink"):
        status, lines = run_under(lab, [Strike(role, signal.SIGKILL, "round", RESUMES)], seed=2)
        assert status == 2, lines
        assert any("continuing" in line for line in lines)
    assert "superlink" not in process_record.running(lab)
    processes.up(lab)
    status, lines = run_under(lab, seed=2)
    assert status == 0, lines
    after = [len(_rows(lab, f"node{i}")) for i in range(3)]
    assert [b - a for a, b in zip(before, after, strict=True)] == [ROUNDS] * 3
