"""The SuperNode that asks more often: what it replaces, and how long it waits."""

from __future__ import annotations

import ast
import inspect
import logging
import os
import subprocess
import sys
from unittest import TestCase

import pytest

from clients import flower_private
from fedlgm_nodes.protocol.messages import pause_after
from fedlgm_nodes.service import supernode
from simulations.engines.flower_processes import free_ports


@pytest.mark.parametrize(
    ("silence", "pause"), [(0.0, 0.1), (1.0, 0.1), (5.0, 0.5), (30.0, 3.0), (1e6, 3.0)]
)
def test_the_pause_is_a_tenth_of_the_silence_within_limits(silence, pause):
    assert pause_after(silence, supernode.SOON_S, supernode.LONGEST_S) == pytest.approx(pause)


@pytest.fixture
def clock(monkeypatch):
    """Seconds of a clock that only sleeping moves, and the pauses so far."""
    now, waited = [0.0], []
    monkeypatch.setattr(supernode.time, "monotonic", lambda: now[0])

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(supernode.time, "sleep", sleep)
    return now, waited


def test_questions_follow_each_other_closely_after_a_message(clock):
    now, waited = clock
    pauses = supernode.Pauses()
    now[0] = 100.0
    pauses.sleep(3)
    pauses.sleep(0.5)  # a message is being worked on
    pauses.sleep(3)
    assert waited == [3.0, 0.05, 0.1]
    while now[0] < 150:
        pauses.sleep(3)
    assert waited[-1] == 3.0


def test_a_superlink_that_is_busy_is_asked_less_often(clock):
    now, waited = clock
    pauses = supernode.Pauses()
    pauses.sleep(0.5)
    for took in (0.2, 0.2, 0.001, 5.0):
        now[0] += took
        pauses.sleep(3)
    assert waited == pytest.approx([0.05, 0.1, 2.0, 0.2551, 3.0])


def test_flowers_loop_asks_time_for_these_two_pauses_and_nothing_else():
    """What is replaced is private to Flower: another version may use it otherwise."""
    from flwr.supernode import start_client_internal

    used = [
        node
        for node in ast.walk(ast.parse(inspect.getsource(start_client_internal)))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "time"
    ]
    assert {node.attr for node in used} == {"sleep"}
    loop = inspect.getsource(start_client_internal.start_client_internal)
    assert loop.count("time.sleep(3)") == 1
    assert loop.count("time.sleep(") == 1
    assert "time.sleep(0.5)" in inspect.getsource(start_client_internal._push_messages)


def test_heartbeats_come_twice_as_often_as_flowers(monkeypatch):
    """In both places: the period, and what the SuperLink hears of it."""
    from flwr.common import constant
    from flwr.supercore import heartbeat
    from flwr.supernode import cli, fleet_http_connection, start_client_internal

    for module in (heartbeat, fleet_http_connection):
        assert (
            vars(module)["HEARTBEAT_DEFAULT_INTERVAL"] == constant.HEARTBEAT_DEFAULT_INTERVAL == 30
        )
        monkeypatch.setattr(module, "HEARTBEAT_DEFAULT_INTERVAL", 30)
    monkeypatch.setattr(start_client_internal, "time", start_client_internal.time)
    monkeypatch.setattr(start_client_internal, "pull_objects", start_client_internal.pull_objects)
    monkeypatch.setattr(cli, "flower_supernode", lambda: None)
    flower_private.run_supernode(supernode.Pauses())
    assert constant.HEARTBEAT_MIN_INTERVAL <= flower_private.HEARTBEAT_S == 15
    for module in (heartbeat, fleet_http_connection):
        assert vars(module)["HEARTBEAT_DEFAULT_INTERVAL"] == flower_private.HEARTBEAT_S


def test_another_version_of_flower_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(flower_private, "version_of", lambda package: "1.44.0")
    assert supernode.main() == 2
    assert "flower-supernode" in capsys.readouterr().err


@pytest.mark.parametrize("code", [0, 1, None])
@pytest.mark.parametrize("polled", [False, True])
def test_a_supernode_that_a_superlink_refuses_says_why_and_fails(monkeypatch, capsys, polled, code):
    """With a clock that is wrong it said "SuperNode terminated gracefully", and its exit status was
    0.

    Without a code Flower's loop has ended by an error, which it logs only.
    """

    def ends(pauses: supernode.Pauses) -> None:
        if polled:
            pauses.sleep(0)
        if code is not None:
            raise SystemExit(code)

    monkeypatch.setattr(supernode, "run_supernode", ends)
    assert supernode.main() == (0 if polled and code == 0 else 1)
    said = capsys.readouterr().err
    assert ("a key that is not registered, and a machine whose clock" in said) is not polled


def test_a_superlink_that_cannot_be_reached_is_named():
    """Flower says only that a connection attempt failed."""
    logger = logging.getLogger("flwr")
    logger.addFilter(flower_private._says_what_failed)
    try:
        with TestCase().assertLogs(logger) as logged:
            logger.warning("Connection attempt failed, retrying in %.2f seconds", 1.5)
    finally:
        logger.removeFilter(flower_private._says_what_failed)
    assert (
        "retrying in 1.50 seconds. The SuperLink (--superlink) cannot be reached: its operator"
        in logged.output[0]
    )


def test_flower_still_says_that_a_connection_attempt_failed():
    """The beginning of its line is private to Flower."""
    from flwr.supercore.retry import http_retry

    assert '"Connection attempt failed, retrying in %.2f seconds"' in inspect.getsource(http_retry)


@pytest.mark.slow
def test_a_real_supernode_that_never_connects_names_the_superlink_and_fails(tmp_path):
    """It ended with exit status 0."""
    nowhere, runtime = free_ports(2)
    command = [
        sys.executable,
        "-m",
        "fedlgm_nodes.service.supernode",
        "--insecure",
        "--superlink",
        f"127.0.0.1:{nowhere}",
    ]
    command += ["--host", "127.0.0.1", "--port", str(runtime), "--isolation", "process"]
    environment = os.environ | {"FLWR_HOME": str(tmp_path), "FLWR_TELEMETRY_ENABLED": "0"}
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as node:
        assert node.stdout is not None
        for line in node.stdout:
            if "The SuperLink (--superlink) cannot be reached: its operator" in line:
                break
        else:
            pytest.fail("it has not named the SuperLink")
        node.terminate()
        said = node.stdout.read()
    assert node.returncode == 1
    assert "error: this SuperNode ended before it was connected" in said
