"""Flower's own loops, as fedlgm's processes run them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from types import SimpleNamespace

import pytest
from flwr.app import Message

from clients.flower_private import wait_by_steady_clock


@pytest.mark.parametrize(
    ("file", "name"), [("http_grid", "HttpGrid"), ("inmemory_grid", "InMemoryGrid")]
)
@pytest.mark.parametrize("jump", [-3600.0, 3600.0, -3e7, 3e7])
def test_a_clock_that_is_set_changes_no_timeout(
    file: str, name: str, jump: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flwr.superlink.grid import http_grid, inmemory_grid

    module = {"http_grid": http_grid, "inmemory_grid": inmemory_grid}[file]

    class Silent(vars(module)[name]):
        pull_interval = 0.01

        def __init__(self) -> None:
            self.pulls = 0

        def push_messages(self, messages: Iterable[Message]) -> list[str]:
            return ["1"]

        def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
            self.pulls += 1
            monkeypatch.setattr(time, "time", lambda: now + jump)
            return []

    for one in (http_grid, inmemory_grid):
        monkeypatch.setattr(one, "time", time)  # restores it
    wait_by_steady_clock()
    steady = vars(module)["time"]
    monkeypatch.setattr(
        module, "time", SimpleNamespace(time=steady.time, sleep=lambda _: time.sleep(0.01))
    )
    now, began, grid = time.time(), time.monotonic(), Silent()
    assert list(grid.send_and_receive([], timeout=0.2)) == []
    assert 0.15 < time.monotonic() - began < 2
    assert grid.pulls > 2
