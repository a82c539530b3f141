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
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from patience import LIMIT_S

from fedlgm.errors import RunError
from fedlgm_nodes.deploy import process_record, processes, submit
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
        killed_processes_cost_nobody_a_second_charge(DeploymentFolder.open(lab), environment)
    finally:
        if lab.exists():
            processes.down(DeploymentFolder.open(lab))


def killed_processes_cost_nobody_a_second_charge(
    folder: DeploymentFolder, environment: dict[str, str]
) -> None:
    """`kill -9` of a service in round 1, which is started again, and of the ServerApp in round 2,
    each once a node has made its vector, which leaves half a second later."""
    rounds = 3
    changed = [*CHANGED[:3], f"federation.rounds={rounds}", f"privacy.max_participations={rounds}",
               "privacy.epsilon=0.5", f"deployment.offline_seconds={LIMIT_S}"]  # fmt: skip
    service = process_record.read(folder)["node1-service"][0]
    killed = list[int]()

    def kill_service() -> None:
        os.kill(service, signal.SIGKILL)
        killed.append(service)
        processes.up(folder)

    def kill_server() -> None:
        for one in started_under(folder.flower_home):
            with suppress(psutil.NoSuchProcess):
                if "flwr-serverapp" in " ".join(one.cmdline()):
                    one.kill()
                    killed.append(one.pid)

    strikes = [("node1", b"new release", kill_service), ("node2", b"round 2 of run", kill_server)]
    stop, killers = threading.Event(), list[threading.Thread]()
    for name, words, strike in strikes:
        log = folder.logs / f"{name}-service.log"
        given = (stop, log, log.stat().st_size, words, strike)
        killers.append(threading.Thread(target=strike_after, args=given))
        killers[-1].start()
    try:
        with pytest.raises(
            RunError, match=r"server process \(process \d+\) has ended without an error"
        ):
            submit.run(folder, recipes.load("distributed-digits", changed))
    finally:
        stop.set()
        for killer in killers:
            killer.join()
    assert len(killed) == 2
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
    for line in (run / "private" / REPORT).read_text().splitlines():
        assert json.loads(line)["answered"] == [f"node{i}" for i in range(4)]
    for i in range(4):
        with folder.node(f"node{i}").service.ledger(readonly=True) as ledger:
            assert [row.round for row in ledger.rows() if row.run == run.name] == list(
                range(1, rounds + 1)
            )
    assert not (run / "private" / ATTEMPT).exists()


def strike_after(
    stop: threading.Event, log: Path, before: int, words: bytes, strike: Callable[[], None]
) -> None:
    """Strike once a log says these words, after its first bytes."""
    while words not in log.read_bytes()[before:]:
        if stop.wait(0.01):
            return
    strike()
