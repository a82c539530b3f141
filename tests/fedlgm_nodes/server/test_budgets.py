"""A run that the nodes' budgets cannot carry is refused before its first round."""

from __future__ import annotations

import json
import re

import pytest
from flwr.app import Error

from fedlgm.errors import ConfigError
from fedlgm_nodes.server import inquiries
from fedlgm_nodes.server.budgets import Need
from tests.support.node_grids import NodeFederation, altered
from tests.support.nodes import WORK, NodeProcess, ask, edit, plan, rows


def need(releases: int, multiplier: float = 4.0, **values) -> Need:
    return Need(
        **(
            {"run": "run", "work": WORK, "plan": plan(multiplier).to_json(), "releases": releases}
            | values
        )
    )


@pytest.fixture
def spent(tmp_path):
    """Three nodes with a budget of 4, in which five such releases fit, one of which is spent at one
    of the nodes."""
    made = NodeFederation(tmp_path, epsilon=4.8)
    assert ask(made.folders[1], client=1)[0]["ok"]
    yield made
    for process in made.processes:
        process.stop()


def test_what_fits_is_what_can_be_released(spent):
    spent.grid().require(need(1))
    with pytest.raises(ConfigError, match="nothing has been spent") as error:
        spent.grid().require(need(100))
    fits = int(str(error.value).split("n0 and n2 can make ")[1].split()[0])
    assert f"n1 can make {fits - 1} of the 100" in str(error.value)
    assert f"{fits} rounds would fit" in str(error.value)
    assert [len(rows(folder)) for folder in spent.folders] == [0, 1, 0]
    folder = spent.folders[0]
    answers = [ask(folder, round=round_)[0] for round_ in range(1, fits + 2)]
    assert [answer["ok"] for answer in answers] == [True] * fits + [False]


def test_a_node_that_falls_out_is_named_and_the_quorum_decides(spent):
    grid = spent.grid()  # with a quorum of two of the three
    with pytest.raises(ConfigError):
        grid.require(need(6))
    fits = next(
        releases
        for releases in range(1, 7)
        if _carried(spent, releases) and not _carried(spent, releases + 1)
    )
    spent.lines.clear()
    grid.require(need(fits))
    assert spent.lines == [
        (
            f"n1 can make {fits - 1} of the {fits} releases that this run may ask it for: it is "
            "left out from then on"
        )
    ]


def test_a_spent_node_says_that_nothing_is_left_and_which_budget_the_run_would_take(spent):
    fits = 1
    while _carried(spent, fits):
        fits += 1
    for client, folder in enumerate(spent.folders):
        for round_ in range(1, fits + 1):
            ask(folder, client=client, round=round_)
    with pytest.raises(ConfigError) as error:
        spent.grid().require(need(10))
    said = re.search(
        r"^too few nodes accept this run: n0, n1 and n2 refuse it \(its budget has nothing left for such a run: "
        r"10 more releases "
        r"would bring its epsilon from (\S+) to (\S+); its policy allows 4.8 at delta 1e-05 over its data set's life\)"
        r".*Nothing has been spent; change the recipe, or ask the nodes' operators to approve it or to change their "
        r"policies$",
        str(error.value),
    )
    assert said
    assert 3 < float(said[1]) <= 4.8 < float(said[2]) < 10


def _carried(federation, releases) -> bool:
    try:
        federation.grid().require(need(releases))
    except ConfigError:
        return False
    return True


def test_caps_on_numbers_count_too(federation):
    folder = federation.folders[0]
    for client in range(3):
        federation.processes[client].stop()
        edit(federation.folders[client], "releases_per_run = 1000", "releases_per_run = 2")
        federation.processes[client] = NodeProcess(federation.folders[client])
    federation.grid().require(need(2, 40.0))
    with pytest.raises(ConfigError, match="2 rounds would fit"):
        federation.grid().require(need(3, 40.0))
    assert rows(folder) == []


def test_what_a_node_does_not_do_is_said_before_the_first_round(federation):
    said = r"accept this run: n0, n1 and n2 refuse it \(a plan for central trust; allowed: local\)\. N.*policies$"
    with pytest.raises(ConfigError, match=said):
        federation.grid().require(need(1, plan=plan(trust="central").to_json()))
    with pytest.raises(ConfigError, match="not allowed on this node"):
        federation.grid().require(
            need(
                1, work=WORK | {"model": {"name": "resnet20", "of": "none"}, "task": {"name": "x"}}
            )
        )


def test_nodes_that_do_not_say_are_taken_for_able(federation):
    """They are gone, of an earlier version, or somebody alters what they say: a round will tell."""
    for fault in (
        lambda client, message, reply: Error(1, "down"),
        lambda client, message, reply: altered(reply, releases=0),
        lambda client, message, reply: altered(
            reply, ok=False, code="malformed", why="nothing else"
        ),
    ):
        federation.link.fault = fault
        federation.grid().require(need(100))
    federation.link.fault = lambda client, message, reply: reply
    with pytest.raises(ConfigError):
        federation.grid().require(need(100))


def test_a_node_that_is_behind_is_brought_forth(federation, monkeypatch):
    monkeypatch.setattr(inquiries, "_SILENT_S", 0.3)
    federation.link.behind = {0: []}
    with pytest.raises(ConfigError, match="n0, n1 and n2 can make"):
        federation.grid().require(need(100))


def test_a_stranger_learns_nothing_by_asking_what_is_left(federation):
    """No more than that what he asks for fits: and nothing is charged."""
    from fedlgm_nodes.protocol import frames

    header = need(3).header(0, "00")
    answer, body = frames.exchange(str(federation.folders[0].socket), header, b"", timeout=60)
    assert (answer["releases"], bytes(body)) == (3, b"")
    assert set(answer) == {"ok", "protocol", "client", "releases", "signature"}
    refused, _ = frames.exchange(
        str(federation.folders[0].socket), header | {"client": 1}, b"", timeout=60
    )
    assert refused["code"] == "client"
    assert json.dumps(rows(federation.folders[0])) == "[]"
