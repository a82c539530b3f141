"""The SuperNode that asks more often: what it replaces, and how long it waits."""

from __future__ import annotations

import ast
import inspect

import pytest

from clients import flower_private
from fedlgm_nodes.protocol.messages import pause_after
from fedlgm_nodes.service import supernode


@pytest.mark.parametrize(("silence", "pause"), [(0.0, 0.1), (1.0, 0.1), (5.0, 0.5), (30.0, 3.0), (1e6, 3.0)])
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
        node for node in ast.walk(ast.parse(inspect.getsource(start_client_internal)))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "time"
    ]  # fmt: skip
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
        assert vars(module)["HEARTBEAT_DEFAULT_INTERVAL"] == constant.HEARTBEAT_DEFAULT_INTERVAL == 30
        monkeypatch.setattr(module, "HEARTBEAT_DEFAULT_INTERVAL", 30)
    monkeypatch.setattr(start_client_internal, "time", start_client_internal.time)
    monkeypatch.setattr(start_client_internal, "pull_objects", start_client_internal.pull_objects)
    monkeypatch.setattr(cli, "flower_supernode", lambda: None)
    flower_private.run_supernode(supernode.Pauses())
    assert constant.HEARTBEAT_MIN_INTERVAL <= flower_private.HEARTBEAT_S == 15
    for module in (heartbeat, fleet_http_connection):
        assert vars(module)["HEARTBEAT_DEFAULT_INTERVAL"] == flower_private.HEARTBEAT_S


def test_another_version_of_flower_is_refused(monkeypatch, capsys):
    monkeypatch.setattr(flower_private, "version", lambda name: "1.43.0")
    assert supernode.main() == 2
    assert "flower-supernode" in capsys.readouterr().err


@pytest.mark.parametrize("polled", [False, True])
def test_a_supernode_that_a_superlink_refuses_says_why(monkeypatch, capsys, polled):
    """With a clock that is wrong it said "SuperNode terminated gracefully" and nothing else."""

    def ends(pauses: supernode.Pauses) -> None:
        if polled:
            pauses.sleep(0)
        raise SystemExit(0)

    monkeypatch.setattr(supernode, "run_supernode", ends)
    with pytest.raises(SystemExit):
        supernode.main()
    said = capsys.readouterr().err
    assert ("a key that is not registered, and a machine whose clock" in said) is not polled
