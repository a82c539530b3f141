"""Waiting for Ray's workers says how long and for what, and ends with one sentence."""

import pytest

from fedlgm.errors import Notice, RunError
from simulations.engines import ray as engine


class Waiting(engine.RayGrid):
    """A grid whose only worker is still starting."""

    def __init__(self):
        self._starting, self._said = {"signal": 0}, set()


@pytest.fixture
def clock(monkeypatch):
    """Each wait takes 30 seconds; the machine's load and the end of the start can be set."""
    state = {"now": 0.0, "load": 0.1, "starts": 1e9}

    def wait(signals, num_returns, timeout):
        state["now"] += timeout
        return (signals, []) if state["now"] > state["starts"] else ([], signals)

    monkeypatch.setattr(engine.ray, "wait", wait)
    monkeypatch.setattr(engine.ray, "available_resources", lambda: {"CPU": 0.0})
    monkeypatch.setattr(engine.time, "monotonic", lambda: state["now"])
    monkeypatch.setattr(engine.os, "getloadavg", lambda: (state["load"] * 2, 0, 0))
    monkeypatch.setattr(engine.os, "cpu_count", lambda: 2)
    return state


def test_a_worker_that_never_starts_ends_the_run_with_the_reason(clock):
    with (
        pytest.warns(
            Notice,
            match="no worker has started for 30 s: 0 of Ray's CPUs are free, load 0.1 per CPU",
        ),
        pytest.raises(RunError, match="no worker started within 210 s: 0 of Ray's CPUs are free"),
    ):
        Waiting()._next(["signal"])


def test_a_busy_machine_is_given_longer(clock):
    clock.update(load=12.5, starts=600.0)
    with pytest.warns(
        Notice, match=r"no worker has started for 600 s: .* load 12\.5 per CPU; still waiting"
    ):
        assert Waiting()._next(["signal"]) == "signal"
