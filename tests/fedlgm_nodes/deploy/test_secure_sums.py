"""Real nodes under distributed trust: the page's commands, the simulation's model, a service and a
server killed."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from patience import LIMIT_S

from fedlgm.errors import RunError
from fedlgm_nodes.deploy import processes, submit
from fedlgm_nodes.deploy.deployment_folder import DeploymentFolder
from fedlgm_nodes.deploy.server_entry import ATTEMPT, REPORT
from simulations import launch
from simulations.config import recipe as recipes
from simulations.engines.flower_processes import started_under

pytestmark = pytest.mark.slow
PAGE = Path(__file__).parents[3] / "docs/how-to/distributed-trust.md"
FEWER = {
    "--nodes 10": "--nodes 4 --test-seed 7",
    "clients=10": "clients=4",
    "threshold=7": "threshold=3",
}
CHANGED = (
    "federation.clients=4",
    "distributed.threshold=3",
    "distributed.colluders=1",
    "federation.rounds=2",
    "privacy.max_participations=2",
)


def test_the_pages_commands_give_the_simulations_model_and_a_killed_node_goes_on(tmp_path):
    """As written, but for four nodes with known noise instead of ten with their own."""
    blocks = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (block,) = (block for block in blocks if "deploy init" in block)
    for written, here in FEWER.items():
        assert written in block
        block = block.replace(written, here)
    *lines, down = block.strip().splitlines()
    assert [line.split()[2] for line in (*lines, down)] == ["init", "up", "run", "down"]
    lines[2] += " --json"
    # for the runs that follow the page's
    lines.insert(1, "sed -i 's/epsilon = 8.0/epsilon = 9.0/' lab/nodes/*/service/policy.toml")
    run = f'set -e\nfedlgm() {{ "{sys.executable}" -m simulations.cli "$@"; }}\n' + "\n".join(lines)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(PAGE.parents[2]), os.environ.get("PYTHONPATH", "")])
    }
    lab = tmp_path / "lab"
    try:
        done = subprocess.run(
            ["bash", "-c", run],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=2 * LIMIT_S,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        result = json.loads(done.stdout[done.stdout.index('{"') :])
        asked = recipes.load("distributed-digits", CHANGED)
        simulated = launch.simulate(asked, engine="local", run_dir=tmp_path / "simulated")
        for figure in (
            "model_sha256",
            "accuracy",
            "epsilon",
            "readers_epsilon",
            "rounds",
            "guarantee",
        ):
            assert result[figure] == simulated[figure]
        a_killed_service_comes_back(DeploymentFolder.open(lab))
        a_killed_server_costs_nobody_a_second_charge(DeploymentFolder.open(lab), environment)
    finally:
        if lab.exists():
            processes.down(DeploymentFolder.open(lab))


def a_killed_service_comes_back(folder: DeploymentFolder) -> None:
    """`kill -9` in the middle of a round: the service is started again, and is in the sum or
    counted as lost."""
    asked = recipes.load(
        "distributed-digits",
        [*CHANGED, "privacy.epsilon=0.5", f"deployment.offline_seconds={LIMIT_S}"],
    )
    pid, log = processes._read_record(folder)["node1-service"][0], folder.logs / "node1-service.log"
    before = log.stat().st_size

    def kill() -> None:
        """Once the node has sent its vector of the first round."""
        while b"new release" not in log.read_bytes()[before:]:
            stop.wait(0.02)
            if stop.is_set():
                return
        os.kill(pid, signal.SIGKILL)
        processes.up(folder)

    stop, killer = threading.Event(), threading.Thread(target=kill)
    killer.start()
    try:
        result = submit.run(folder, asked)
    finally:
        stop.set()
        killer.join()
    assert result["rounds"] == 2
    for line in (Path(result["run"]) / "private" / REPORT).read_text().splitlines():
        assert json.loads(line)["answered"] == [f"node{i}" for i in range(4)]
    for i in range(4):
        with folder.node(f"node{i}").service.ledger(readonly=True) as ledger:
            assert [row.round for row in ledger.rows()] == [1, 2, 1, 2]


def a_killed_server_costs_nobody_a_second_charge(
    folder: DeploymentFolder, environment: dict[str, str]
) -> None:
    """`kill -9` of the ServerApp in round 2 of 4, once a node has made its vector, which leaves
    half a second later."""
    rounds = 4
    changed = [*CHANGED[:3], f"federation.rounds={rounds}", f"privacy.max_participations={rounds}",
               "privacy.epsilon=0.5"]  # fmt: skip
    log = folder.logs / "node1-service.log"
    before, killed = log.stat().st_size, list[str]()

    def kill() -> None:
        while b"round 2 of run" not in log.read_bytes()[before:]:
            if stop.wait(0.01):
                return
        for one in started_under(folder.flower_home):
            with suppress(psutil.NoSuchProcess):
                if "flwr-serverapp" in " ".join(one.cmdline()):
                    one.kill()
                    killed.append(str(one.pid))

    stop, killer = threading.Event(), threading.Thread(target=kill)
    killer.start()
    try:
        with pytest.raises(
            RunError, match=r"server process \(process \d+\) has ended without an error"
        ):
            submit.run(folder, recipes.load("distributed-digits", changed))
    finally:
        stop.set()
        killer.join()
    assert killed
    settings = [part for one in changed for part in ("--set", one)]
    command = [
        sys.executable,
        "-m",
        "simulations.cli",
        "deploy",
        "run",
        "distributed-digits",
        str(folder.path),
    ]
    done = subprocess.run(
        [*command, *settings, "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stderr.splitlines()
    assert "round 2 continues where it was interrupted: no node is charged twice" in lines
    assert f"{rounds} of {rounds} rounds are done" in lines
    run = Path(json.loads(done.stdout)["run"])
    for i in range(4):
        with folder.node(f"node{i}").service.ledger(readonly=True) as ledger:
            assert [row.round for row in ledger.rows() if row.run == run.name] == list(
                range(1, rounds + 1)
            )
    assert not (run / "private" / ATTEMPT).exists()
