"""A watching process beside a real service: pages, alerts and their command."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from patience import wait_until

from fedlgm.errors import ConfigError
from fedlgm_nodes.deploy import certificates, health
from fedlgm_nodes.deploy.health import Alerts, Health, NodeLook
from simulations.engines.flower_processes import free_ports
from tests.support.nodes import NodeProcess, ask, edit, make_node

ROOT = Path(__file__).parents[3]


class _Local(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.connect(str(self._path))


def page(connection: http.client.HTTPConnection, path: str) -> tuple[int, str]:
    connection.request("GET", path)
    answer = connection.getresponse()
    status, text = answer.status, answer.read().decode()
    connection.close()
    return status, text


@contextmanager
def watching(folder: Any, log: Path, *options: Any) -> Iterator[subprocess.Popen[bytes]]:
    words = ["-m", "simulations.cli", "node", "status", folder.path, "--watch", "--every", 0.2]
    with log.open("wb") as file, log.with_suffix(".err").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, *map(str, [*words, *options])],
            stdout=file,
            stderr=errors,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)


def alerts(log: Path) -> list[tuple[str, str]]:
    lines = log.with_suffix(".err").read_text().splitlines()
    return [(line["alert"], line["state"]) for line in map(json.loads, lines)]


def test_the_death_of_a_service_is_told_to_a_monitor_and_to_a_command(tmp_path):
    folder = make_node(tmp_path / "node")
    edit(folder, 'approval = "policy"', 'approval = "operator"')
    log, place, told = tmp_path / "log", tmp_path / "m.sock", tmp_path / "told"
    options = ("--metrics", place, "--alert-command", f"tee -a {told}")
    with NodeProcess(folder) as service, watching(folder, log, *options) as process:
        wait_until(place.exists)
        wait_until(lambda: page(_Local(place), "/ready")[0] == 200)
        assert ask(folder)[0]["code"] == "approval"
        wait_until(lambda: "fedlgm_requests_waiting 1" in page(_Local(place), "/metrics")[1])
        _, text = page(_Local(place), "/metrics")
        assert '# TYPE fedlgm_budget_spent_share gauge\nfedlgm_budget_spent_share{node="' in text
        for name in ("fedlgm_refusals 1", "fedlgm_disk_free_bytes ", "fedlgm_clock_jump_seconds "):
            assert name in text
        assert page(_Local(place), "/")[0] == page(_Local(place), "/../state")[0] == 404
        assert psutil.Process(process.pid).memory_info().rss < 100 << 20
        service.kill()
        wait_until(lambda: page(_Local(place), "/ready")[0] == 503)
        wait_until(lambda: ("service", "raised") in alerts(log))
        wait_until(lambda: '"service"' in told.read_text())
    with NodeProcess(folder), watching(folder, log, *options):  # the socket of the last one is gone
        wait_until(lambda: place.exists() and page(_Local(place), "/ready")[0] == 200)
    assert {json.loads(line)["alert"] for line in told.read_text().splitlines()} == {
        "service", "requests",
    }  # fmt: skip


def test_a_service_that_is_stopped_or_back_again(tmp_path):
    folder, log = make_node(tmp_path / "node"), tmp_path / "log"
    (port,) = free_ports(1)
    with NodeProcess(folder) as service, watching(folder, log, "--metrics", port):
        wait_until(lambda: "answers, epsilon 0 of 8 spent" in log.read_text())
        assert page(http.client.HTTPConnection("127.0.0.1", port), "/ready")[0] == 200
        os.kill(service.pid, signal.SIGSTOP)
        wait_until(lambda: ("service", "raised") in alerts(log))
        os.kill(service.pid, signal.SIGCONT)
        wait_until(lambda: ("service", "cleared") in alerts(log))
        assert "DOES NOT ANSWER" in log.read_text()


@pytest.mark.parametrize(
    ("days", "passed"), [(100, []), (60, [60]), (10, [60, 14]), (0, [60, 14, 1])]
)
def test_the_end_of_certificates_is_told_at_60_14_and_1_days(tmp_path, monkeypatch, days, passed):
    folder = make_node(tmp_path / "node")
    monkeypatch.setattr(certificates, "_AUTHORITY_DAYS", days + 0.5)
    certificates.make_authority(tmp_path)
    found = NodeLook(folder)()
    assert found.figures['certificate_days{file="ca.crt"}'] == days
    told = [name for name in found.faults if name.startswith("ca.crt")]
    assert told == [f"ca.crt {limit} days" for limit in passed]
    assert all("fedlgm deploy renew" in found.faults[name] for name in told)


def test_a_full_disk_a_moved_clock_and_a_spent_budget(tmp_path, monkeypatch):
    folder = make_node(tmp_path / "node")
    look = NodeLook(folder)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=5 << 20))
    now = health.time.time()
    monkeypatch.setattr(health.time, "time", lambda: now + 3600)
    found = look()
    assert found.faults["disk"].startswith("5 MiB are free")
    assert "the clock has moved by 3600 s" in found.faults["clock"]
    assert not found.ready
    answer = {"epsilon_spent": 7.9, "epsilon": 8.0, "releases_left": 3}
    found.add_budget(answer, "north")
    assert "north has spent 99% of its epsilon of 8, and 3 releases" in found.faults["north budget"]


def test_an_alert_is_told_once_and_a_command_that_fails_is_told(tmp_path):
    lines: list[str] = []
    told = Alerts(lines.append, "false")
    for _ in range(2):
        told({"disk": "full"})
    told({})
    names = [(json.loads(line)["alert"], json.loads(line)["state"]) for line in lines]
    assert names == [
        ("disk", "raised"), ("alert-command", "raised"),
        ("disk", "cleared"), ("alert-command", "cleared"),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="there is no command 'nothere'"):
        Alerts(lines.append, "nothere --now")
    for address in ("nothing", "0", "70000"):
        with pytest.raises(ConfigError, match="--metrics takes a port"):
            health.watch(Health, every=1, address=address, command="")
