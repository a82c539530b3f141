"""Real SuperNodes that lie, come from another population, or vanish: one client each, on loopback,
unencrypted."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from patience import LIMIT_S, wait_until

from simulations.config import recipe as recipes
from simulations.engines.flower import APP, follow
from simulations.engines.flower_command import CONNECTION, FlwrCommand
from simulations.runs.folder import RunFolder
from simulations.summaries.ledgers import ledger_report

pytestmark = pytest.mark.slow
BIN = Path(sys.executable).parent
CLIENTS = 4

HOSTILE = '''
"""Each node attacks in its own way, if the run's config says so."""

import time

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from fedlgm import wire

app = ClientApp()


def changed(reply, values):
    content = RecordDict(dict(reply.content.items()))
    content[wire.ARRAYS] = ArrayRecord({wire.SUM: Array(values)})
    return content


@app.query()
def query(message, context):
    place = {"partition-id": int(context.node_config["partition-id"]), "num-partitions": 4}
    if context.run_config["attack"] == "same client" and place["partition-id"] == 2:
        place["partition-id"] = 1
    return Message(RecordDict({wire.CONFIG: ConfigRecord(place)}), reply_to=message)


@app.train()
def train(message, context):
    from simulations.engines.flower_entry import make_client_app  # queries are answered without torch

    reply = make_client_app()(message, context)
    me = int(context.node_config["partition-id"])
    first = "kept" not in context.state
    if me == 3 and not first:
        time.sleep(600)  # it is killed meanwhile
    if context.run_config["attack"] != "values" or me == 0:
        return reply
    if first:
        context.state["kept"] = ConfigRecord({"id": message.metadata.message_id})
    values = reply.content[wire.ARRAYS][wire.SUM].numpy()
    if me == 1:
        wrong = values * 1e6 if first else np.where(np.arange(len(values)) == 3, np.nan, values)
        return Message(changed(reply, wrong), reply_to=message)
    if first:
        return reply
    # Client 2: a reply to the first round's message, sent in the second.
    reply.metadata.__dict__["_reply_to_message_id"] = str(context.state["kept"]["id"])
    return reply
'''

SUPERNODE = """
import flwr.common.constant
flwr.common.constant.HEARTBEAT_DEFAULT_INTERVAL = 10  # the least that a SuperLink takes
from flwr.supernode.cli import flower_supernode
flower_supernode()
"""
"""Flower's SuperNode, which is missed after 20 s without a heartbeat instead of 60."""


class Lab:
    """A SuperLink and one SuperNode per client."""

    def __init__(self, home: Path) -> None:
        self.home, self.port = home, _free_port()
        self.environment = os.environ | {
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "NO_PROXY": "127.0.0.1",
            "no_proxy": "127.0.0.1",
            "OMP_NUM_THREADS": "1",
            "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",
            "PYTHONPATH": str(Path(__file__).parents[3]),
        }
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
            f'address = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )
        self.flwr = FlwrCommand(self.environment)
        self.app = home / "app"
        shutil.copytree(APP, self.app)
        (self.app / "client_app.py").write_text(HOSTILE)
        project = self.app / "pyproject.toml"
        project.write_text(project.read_text() + 'attack = ""\n')
        link = (
            str(BIN / "flower-superlink"),
            "--insecure",
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
        )
        self.link = self._start(self.log, *link)
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def log(self) -> Path:
        """The SuperLink's."""
        return self.home / "superlink.log"

    def _start(self, log: Path, *command: str) -> subprocess.Popen[bytes]:
        with log.open("wb") as file:
            return subprocess.Popen(
                command, env=self.environment, stdout=file, stderr=file, start_new_session=True
            )

    def up(self) -> None:
        direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        for _ in range(3000):
            try:
                direct.open(f"http://127.0.0.1:{self.port}/health", timeout=1).close()
                break
            except OSError:
                time.sleep(0.2)
        for client in range(CLIENTS):
            config = f"partition-id={client} num-partitions={CLIENTS}"
            options = ("--node-config", config, "--port", str(_free_port()), "--insecure")
            self.nodes[client] = self._start(
                self.home / f"node-{client}.log",
                *(
                    sys.executable,
                    "-c",
                    SUPERNODE,
                    "--superlink",
                    f"127.0.0.1:{self.port}",
                    *options,
                ),
            )

    def submit(self, recipe: Path, run: Path, attack: str) -> str:
        config = f'recipe="{recipe}" run-dir="{run}" nodes="clients" attack="{attack}"'
        return str(
            self.flwr.json("run", str(self.app), CONNECTION, "--run-config", config)["run-id"]
        )

    def wait(self, run_id: str, run: Path) -> str:
        """Status and log of a run that has ended."""
        deadline = time.monotonic() + LIMIT_S

        def in_time() -> bool:
            assert time.monotonic() < deadline, f"run {run_id} did not end within {LIMIT_S} s"
            return False  # the next run begins when Flower has ended this one

        status = follow(self.flwr, run_id, self.log, in_time)
        return f"{status}\n{self.flwr.log(run_id)}"

    def down(self) -> None:
        for process in [*self.nodes.values(), self.link]:
            for number in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(process.pid, number)
                    process.wait(10)
                except (ProcessLookupError, subprocess.TimeoutExpired):
                    continue
        _end_children(self.home)


def _end_children(home: Path) -> None:
    """Whatever still runs with this home: executors are in sessions of their own."""
    import psutil

    for process in psutil.process_iter():
        try:
            if process.environ().get("FLWR_HOME") == str(home):
                process.kill()
        except (psutil.Error, OSError):
            continue


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def lab(tmp_path_factory) -> Iterator[Lab]:
    made = Lab(tmp_path_factory.mktemp("lab"))
    try:
        made.up()
        yield made
    finally:
        made.down()


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    """Four clients who all take part in each of two rounds; no seed."""
    from federations import tiny_values

    raw = tiny_values()
    raw["federation"] = {
        "clients": CLIENTS,
        "rounds": 2,
        "rate": 1.0,
        "round_timeout": 75.0,  # all of it passes in the second round: client 2 answers another one
        "wait_for_nodes": 300.0,
    }
    raw["data"]["partition"] = "iid"
    raw["data"].pop("alpha")
    raw["run"] = {"block_size": 10}
    path = tmp_path_factory.mktemp("recipe") / "nodes.toml"
    path.write_text(
        tomli_w.dumps(recipes.Recipe.model_validate(raw).model_dump(exclude_none=True)),
        encoding="utf-8",
    )
    return path


@pytest.fixture(scope="module")
def attacked(lab, recipe, tmp_path_factory) -> Path:
    """A run in which clients 1 and 2 lie and node 3 is killed in the second round."""
    run = tmp_path_factory.mktemp("attacked") / "run"
    run_id = lab.submit(recipe, run, "values")
    wait_until(
        lambda: RunFolder(run).metrics.path.is_file() and RunFolder(run).rows(),
        "the first round",
        every=0.2,
    )
    os.killpg(lab.nodes[3].pid, signal.SIGKILL)
    told = lab.wait(run_id, run)
    assert told.startswith("finished:completed"), told
    return run


def failures(run: Path) -> list[dict[int, Any]]:
    """By round, the failure of every client that had one."""
    rows = RunFolder(run).rows(private=True)
    return [{failure["client"]: failure for failure in row["failures"]} for row in rows]


def test_two_nodes_that_say_they_are_one_client_end_the_start(lab, recipe, tmp_path):
    run = tmp_path / "run"
    told = lab.wait(lab.submit(recipe, run, "same client"), run)
    assert told.startswith("finished:failed"), told
    assert "both say that they are client 1" in told
    assert not run.exists()  # nothing was charged


def test_nodes_that_lie_count_as_zero_and_are_named(attacked):
    """One multiplies by a million and sends NaN in the next round, one answers the first round
    again; the honest one is enough."""
    first, second = failures(attacked)
    assert set(first) == {1}
    assert set(second) == {1, 2, 3}
    assert first[1]["kind"] == second[1]["kind"] == "rejected"
    assert "has norm" in first[1]["reason"]
    assert "the plan allows" in first[1]["reason"]
    assert "NaN" in second[1]["reason"]
    result = RunFolder(attacked).result()
    assert result["loss"] < 100  # 22,842 when contributions were taken as they came
    assert result["noise_reproducible"] is False
    assert result["epsilon"] == pytest.approx(8.0, rel=0.01)
    ledger_report(attacked)


def test_a_node_that_vanishes_counts_as_zero(attacked):
    """It ended the run after 47 s, with a traceback and exit status 0."""
    _, second = failures(attacked)
    assert second[3]["kind"] == "error"  # the SuperLink says that its heartbeat stopped
    public = (attacked / "result.json").read_text() + (attacked / "metrics.jsonl").read_text()
    assert "failures" not in public
