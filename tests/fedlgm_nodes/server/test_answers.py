"""Which answers count: those of the enrolled service, to this question, of a ledger that goes
on."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict

from fedlgm import wire
from fedlgm.errors import RunError
from fedlgm_nodes.protocol.frames import BODY, HEADER
from fedlgm_nodes.service.release import Releaser
from tests.support.node_grids import altered, pem
from tests.support.nodes import NodeProcess, make_node, rows


def config(values: dict[str, Any]) -> RecordDict:
    return RecordDict({wire.CONFIG: ConfigRecord(values)})


def other_numbers(content: RecordDict) -> RecordDict:
    content = copy.deepcopy(content)
    data = bytearray(content.config_records[wire.CONFIG][BODY])
    data[-1] ^= 1
    content.config_records[wire.CONFIG][BODY] = bytes(data)
    return content


REFUSAL = '{"ok": false, "code": "privacy"}'
FORGED = {"ledger": "x", "seq": 1, "head": "x", "signature": "00"}
TAMPERED: dict[str, tuple[Callable[[RecordDict], Any], str]] = {
    "numbers": (other_numbers, "was not signed"),
    "number of the release": (lambda c: altered(c, seq=99), "was not signed"),
    "signature": (lambda c: altered(c, signature="00"), "was not signed"),
    "no numbers": (lambda c: config({HEADER: c[wire.CONFIG][HEADER]}), "is incomplete"),
    "no position": (lambda c: altered(c, position=None), "is incomplete"),
    "position": (lambda c: altered(c, position=FORGED), "was not signed"),
    "no header": (lambda c: config({BODY: c[wire.CONFIG][BODY]}), "not one of a release service"),
    "not JSON": (lambda c: config({HEADER: "{"}), "not one of a release service"),
    "a refusal": (lambda c: config({HEADER: REFUSAL}), "refused"),
}  # fmt: skip


@pytest.mark.parametrize("what", TAMPERED)
def test_an_altered_answer_counts_as_zero_by_name(federation, what):
    alter, reason = TAMPERED[what]
    federation.link.fault = lambda client, message, reply: alter(reply) if client == 1 else reply
    federation.run()
    assert federation.reports[0].answered == ["n0", "n2"]
    assert reason in federation.reports[0].lost["n1"]
    assert any("n1 counts as zero" in line for line in federation.lines)


def test_a_node_for_tests_is_left_out_whatever_is_said_of_it(federation, tmp_path):
    """Its noise is known; the flag in its answer is not signed, the identity of its ledger is."""
    federation.processes[1].stop()
    folder = make_node(tmp_path / "known", client=1, test_seed=7)
    federation.folders[1] = federation.link.folders[1] = folder
    federation.processes[1] = NodeProcess(folder)
    federation.link.fault = lambda client, message, reply: (
        altered(reply, test=False) if client == 1 else reply
    )
    federation.run()
    assert federation.reports[0].answered == ["n0", "n2"]
    assert "a node for tests" in federation.reports[0].lost["n1"]


def test_a_newer_position_does_not_hide_an_older_ledger(federation, tmp_path):
    """A relay that takes what is expected out of the questions and puts a position of its own into
    the answers."""
    federation.run(1)
    federation.processes[1].stop()
    shutil.copytree(federation.folders[1].path, tmp_path / "older")
    federation.processes[1] = NodeProcess(federation.folders[1])
    seen: dict[str, Any] = {}

    def keep(client: int, message: Message, reply: RecordDict) -> RecordDict:
        if client == 1:
            seen["position"] = json.loads(str(reply.config_records[wire.CONFIG][HEADER]))[
                "position"
            ]
        return reply

    federation.link.fault = keep
    federation.run(2)
    federation.processes[1].stop()
    shutil.rmtree(federation.folders[1].path)
    shutil.copytree(tmp_path / "older", federation.folders[1].path)
    federation.processes[1] = NodeProcess(federation.folders[1])
    push = federation.link.push_messages

    def without(messages: Iterable[Message]) -> list[str]:
        batch = list(messages)
        for message in batch:
            config = message.content.config_records[wire.CONFIG]
            header = json.loads(str(config[HEADER]))
            if federation.link.node_of[message.metadata.dst_node_id] == 1:
                header.pop("expect", None)
            config[HEADER] = json.dumps(header)
        return push(batch)

    federation.link.push_messages = without
    federation.link.fault = lambda client, message, reply: (
        altered(reply, **seen) if client == 1 else reply
    )
    federation.reports.clear()
    federation.run(1)
    assert "was not signed" in federation.reports[0].lost["n1"]


def test_an_answer_to_another_question_does_not_count(federation):
    kept: dict[int, RecordDict] = {}

    def replay(client: int, message: Message, reply: RecordDict) -> RecordDict:
        return kept.setdefault(client, reply)  # the first round's, for ever

    federation.link.fault = replay
    with pytest.raises(RunError, match="answers another question"):
        federation.run(2)
    assert federation.reports[0].lost == {}


def test_one_nodes_answer_is_not_anothers(federation):
    kept: list[RecordDict] = []

    def swap(client: int, message: Message, reply: RecordDict) -> RecordDict:
        kept.append(reply)
        return kept[0]

    federation.link.fault = swap
    with pytest.raises(RunError, match="was not signed by its enrolled service"):
        federation.run()


def test_a_node_with_an_older_ledger_is_left_out(federation, tmp_path):
    federation.run(1)
    federation.processes[1].stop()
    shutil.copytree(federation.folders[1].path, tmp_path / "snapshot")
    federation.processes[1] = NodeProcess(federation.folders[1])
    federation.run(3)
    federation.processes[1].stop()
    shutil.rmtree(federation.folders[1].path)
    shutil.copytree(tmp_path / "snapshot", federation.folders[1].path)
    federation.processes[1] = NodeProcess(federation.folders[1])
    federation.reports.clear()
    federation.run(2)
    assert all("rolled" in report.lost["n1"] for report in federation.reports)
    # Also by a server that asks without saying what it has seen: the node's signed position is
    # compared here.
    federation.processes[1].stop()
    with pytest.raises(AssertionError, match="rolled back"):
        NodeProcess(federation.folders[1])


def test_a_node_that_takes_the_place_of_another_is_asked(federation, tmp_path):
    """It cannot know the ledger of the node before it, and is not expected to."""
    federation.run(1)
    federation.processes[1].stop()
    folder = make_node(tmp_path / "new", client=1)
    federation.folders[1] = federation.link.folders[1] = folder
    federation.processes[1] = NodeProcess(folder)
    federation.keys[1] = federation.link.keys[1] = pem()
    federation.run(2)
    assert federation.reports[-1].lost == {}
    assert len(rows(folder)) == 2


def test_a_signed_answer_beyond_the_plan_is_rejected_by_name_and_is_no_answer(federation):
    """Nobody but the server's own check of the numbers can tell."""

    def huge() -> None:
        honest = Releaser.make
        Releaser.make = lambda *given: honest(*given) * np.float32(1e6)  # type: ignore[method-assign]

    federation.processes[1].stop()
    federation.processes[1] = NodeProcess(federation.folders[1], before=huge)
    federation.run()
    (report,) = federation.reports
    assert report.answered == ["n0", "n2"]
    assert report.lost["n1"].startswith("its answer was rejected: its part '")
    assert f"round 1: n1 counts as zero: {report.lost['n1']}" in federation.lines
    assert len(rows(federation.folders[1])) == 1  # it was charged, and its ledger goes on
    federation.run(2)
    assert [report.answered for report in federation.reports[1:]] == [["n0", "n2"]] * 2
