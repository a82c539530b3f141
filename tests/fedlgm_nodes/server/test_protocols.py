"""Nodes and server one protocol apart, with real services: whoever is upgraded first."""

from __future__ import annotations

import pytest

from fedlgm.errors import RunError
from fedlgm_nodes import policy
from fedlgm_nodes.protocol import messages
from fedlgm_nodes.server.budgets import Need
from tests.support.node_grids import NodeFederation
from tests.support.nodes import WORK, plan

NEXT = messages.PROTOCOL + 1


def raised() -> None:
    """In a service's own process: a later version of it."""
    messages.PROTOCOL, messages.SUPPORTED = NEXT, (NEXT, NEXT - 1)
    policy.PROTOCOL = NEXT


def need() -> Need:
    return Need("run", WORK, plan().to_json(), 1)


def ended(federation: NodeFederation) -> None:
    for process in federation.processes:
        process.stop()


def test_later_nodes_answer_an_earlier_server(tmp_path):
    federation = NodeFederation(tmp_path, raised)
    try:
        grid = federation.grid()
        grid.require(need())
        federation.run(2, grid)
        assert [len(report.answered) for report in federation.reports] == [3, 3]
    finally:
        ended(federation)


@pytest.mark.parametrize("introduced", [True, False])
def test_a_later_server_asks_earlier_nodes_in_their_protocol(tmp_path, monkeypatch, introduced):
    """It learns their protocol from the first refusal, before the run's first round."""
    federation = NodeFederation(tmp_path)
    try:
        monkeypatch.setattr(messages, "PROTOCOL", NEXT)
        monkeypatch.setattr(messages, "SUPPORTED", (NEXT, NEXT - 1))
        grid = federation.grid()
        if introduced:
            grid.require(need())
            federation.run(1, grid)
        else:  # the nodes were not connected at the beginning
            with pytest.raises(RunError, match=f"this service speaks protocol {NEXT - 1}, but"):
                federation.run(1, grid)
            federation.run(1, grid)
        assert len(federation.reports[-1].answered) == 3
    finally:
        ended(federation)


def test_a_server_two_protocols_ahead_is_told_so(tmp_path, monkeypatch):
    federation = NodeFederation(tmp_path)
    try:
        monkeypatch.setattr(messages, "PROTOCOL", NEXT + 1)
        monkeypatch.setattr(messages, "SUPPORTED", (NEXT + 1, NEXT))
        with pytest.raises(RunError, match="server and nodes need compatible versions of fedlgm"):
            federation.run()
    finally:
        ended(federation)
