"""How a round waits: for nodes that are down, slow, late, behind, or asked no more."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Error, Message, RecordDict

from fedlgm import wire
from fedlgm.errors import PrivacyError, RunError
from fedlgm.planning.plan import ReleasePlan
from fedlgm_nodes.protocol.frames import HEADER
from fedlgm_nodes.server import answers
from fedlgm_nodes.server.round import Patience
from tests.support import nodes
from tests.support.node_grids import QUICK
from tests.support.nodes import NodeProcess, rows


def test_a_node_that_is_not_connected_counts_as_zero(federation):
    federation.link.offline = {1}
    federation.run(2)
    assert [report.lost for report in federation.reports] == [{"n1": "not connected"}] * 2
    assert federation.reports[1].seconds < QUICK.offline_seconds  # known by then
    named = "n1: not connected; its operator should check its processes"
    assert [line for line in federation.lines if "n1" in line and "counts as zero" not in line] == [
        named
    ]
    assert federation.lines[0] == named  # at once: the run waits for it now
    assert len(rows(federation.folders[1])) == 0
    federation.link.offline = set()
    federation.run()
    assert federation.reports[-1].lost == {}


def test_below_the_quorum_the_run_stops_and_can_go_on(federation):
    federation.link.offline = {0, 1}
    with pytest.raises(
        RunError,
        match=r"1 of 3 nodes answered, but the quorum is 2 .*n0 and n1: not connected.*without --fresh, resumes",
    ):
        federation.run(1, federation.grid(dataclasses.replace(QUICK, give_up_seconds=0.5)))
    federation.link.offline = set()
    federation.run()
    assert [len(rows(folder)) for folder in federation.folders] == [1, 1, 1]


def test_a_run_that_the_nodes_refuse_is_not_said_to_go_on_if_it_is_repeated(federation):
    refusal = RecordDict(
        {
            wire.CONFIG: ConfigRecord(
                {HEADER: json.dumps({"ok": False, "code": "gone", "why": "kept"})}
            )
        }
    )
    federation.link.fault = lambda client, message, reply: refusal if client else reply
    with pytest.raises(
        RunError,
        match=r"n1 and n2: refused \(gone\): kept.*The same command meets the same refusals until",
    ):
        federation.run()


def test_a_service_that_was_killed_counts_as_zero(federation):
    federation.processes[2].stop()
    NodeProcess(federation.folders[2]).kill()
    federation.run()
    assert "does not answer" in federation.reports[0].lost["n2"]
    assert federation.lines[0].startswith("n2: does not answer: ")


HOSTILE = "x\x1b]0;gone\x07\nround 1: 3 nodes asked" + "y" * 10_000


@pytest.mark.parametrize("how", ["a refusal", "an error"])
def test_a_nodes_own_words_are_one_short_line(federation, how):
    """What a relay says is printed on the server's terminal and kept in the run's log."""
    refusal = json.dumps({"ok": False, "code": HOSTILE, "why": HOSTILE})
    said = {
        "a refusal": RecordDict({wire.CONFIG: ConfigRecord({HEADER: refusal})}),
        "an error": Error(1, HOSTILE),
    }
    federation.link.fault = lambda client, message, reply: said[how] if client == 1 else reply
    federation.run()
    told = [*federation.lines, *federation.reports[0].lost.values()]
    assert any("x?]0;gone??round 1: 3 nodes asked" in line for line in told)
    assert all(line.isprintable() and len(line) < 500 for line in told)


def test_two_replies_to_one_question_are_named_and_counted_once(federation):
    pull = federation.link.pull_messages

    def twice(ids: Iterable[str]) -> list[Message]:
        return [copy for one in pull(ids) for copy in (one, one)]

    federation.link.pull_messages = twice
    federation.run()
    assert federation.reports[0].answered == ["n0", "n1", "n2"]
    assert federation.reports[0].late == 3
    assert sum("has answered twice" in line for line in federation.lines) == 3


@pytest.mark.slow
def test_a_node_that_comes_back_is_not_dropped_while_it_works(federation):
    federation.link.offline, federation.link.work_seconds = {1}, 3.0
    first, nodes_of = time.monotonic(), federation.link.get_nodes

    def come_back() -> list[Any]:
        if time.monotonic() - first > 1.0:
            federation.link.offline = set()
        return nodes_of()

    federation.link.get_nodes = come_back
    patient = Patience(
        quorum=0.5, round_seconds=30, offline_seconds=2.5, give_up_seconds=30, poll_seconds=0.05
    )
    federation.run(1, federation.grid(patient))
    assert federation.reports[0].lost == {}


def test_whoever_is_given_up_is_named(federation):
    federation.link.offline = {1}
    hasty = Patience(
        quorum=0.5,
        round_seconds=60,
        offline_seconds=60,
        give_up_seconds=1,
        poll_seconds=0.05,
        tell_seconds=0.25,
    )
    federation.run(1, federation.grid(hasty))
    assert federation.reports[0].lost == {"n1": "no answer within 1 s"}
    assert any(line.startswith("waiting for n1 (2 of 3 answered") for line in federation.lines)


@pytest.mark.slow
def test_a_node_that_is_slow_counts_as_zero_and_its_late_answer_is_told(federation):
    late: list[tuple[str, RecordDict, Message]] = []

    def hold(client: int, message: Message, reply: RecordDict) -> RecordDict | None:
        if client == 1 and not late:
            late.append((message.metadata.message_id, reply, message))
            return None
        return reply

    federation.link.fault = hold
    grid = federation.grid()
    federation.run(1, grid)
    assert federation.reports[0].lost == {"n1": "no answer within 2 s"}
    federation.link._replies[late[0][0]] = Message(late[0][1], reply_to=late[0][2])
    federation.run(2, grid)
    assert sum(report.late for report in federation.reports) == 1
    assert any(
        "too late: it was charged, and its answer does not count" in line
        for line in federation.lines
    )


@pytest.mark.slow
def test_a_supernode_that_stays_behind_by_one_is_greeted(federation):
    federation.link.behind = {1: []}
    quick = Patience(
        quorum=1.0,
        round_seconds=60,
        offline_seconds=60,
        give_up_seconds=60,
        poll_seconds=0.01,
        greet_seconds=0.3,
    )
    federation.run(3, federation.grid(quick))
    assert [report.lost for report in federation.reports] == [{}] * 3
    assert federation.reports[2].seconds < 30
    federation.link.behind = {}
    federation.run(3, federation.grid(quick))
    assert [len(rows(folder)) for folder in federation.folders] == [3, 3, 3]


@pytest.mark.slow
def test_a_node_behind_by_one_is_greeted_soon_from_its_second_round_on(federation):
    """However long the answer takes that the first greeting brings forth."""
    federation.link.behind = {1: []}
    push = federation.link.push_messages

    def slowly(messages: Iterable[Message]) -> list[str]:
        batch = list(messages)
        ids = push(batch)
        if batch[0].metadata.group_id == "hello":
            federation.link._ready |= dict.fromkeys(
                federation.link._replies, time.monotonic() + 0.6
            )
        return ids

    federation.link.push_messages = slowly
    patient = Patience(
        quorum=1.0,
        round_seconds=60,
        offline_seconds=60,
        give_up_seconds=60,
        poll_seconds=0.01,
        greet_seconds=4,
    )
    federation.run(4, federation.grid(patient))
    first, *later = [report.seconds for report in federation.reports]
    assert first > 4
    assert max(later) < 3.5


@pytest.mark.slow
def test_nodes_that_always_take_long_are_greeted_once(federation):
    federation.link.work_seconds = 1.6
    patient = Patience(
        quorum=1.0,
        round_seconds=9,
        offline_seconds=9,
        give_up_seconds=9,
        poll_seconds=0.01,
        greet_seconds=1,
    )
    federation.run(3, federation.grid(patient))
    greeted = [
        client for client, message in federation.link.sent if message.metadata.group_id == "hello"
    ]
    assert sorted(greeted) == [0, 1, 2]
    assert [report.lost for report in federation.reports] == [{}] * 3


def test_a_rejected_part_called_ledger_does_not_exclude_its_node(federation, monkeypatch):
    """Only a node's ledger ends its part in a run, and not a message with this word: a layer may
    have any name."""
    honest, rejected = answers.check_bounds, []

    def once(values: np.ndarray, plan: ReleasePlan) -> np.ndarray:
        if not rejected:
            rejected.append(values)
            raise PrivacyError("its part 'ledger.weight' has norm 9, but the plan allows 1")
        return honest(values, plan)

    monkeypatch.setattr(answers, "check_bounds", once)
    federation.run(2)
    assert ["ledger" in why for why in federation.reports[0].lost.values()] == [True]
    assert federation.reports[1].lost == {}


def test_a_node_whose_budget_is_spent_is_not_asked_again(federation):
    federation.processes[0].stop()
    nodes.edit(federation.folders[0], "releases = 1000 ", "releases = 2 ")
    federation.processes[0] = NodeProcess(federation.folders[0])
    federation.run(4)
    lost = [report.lost.get("n0", "") for report in federation.reports]
    assert ["budget-spent" in reason for reason in lost] == [False, False, True, True]
    assert len(rows(federation.folders[0])) == 2
    assert sum(client == 0 for client, _ in federation.link.sent) == 3
