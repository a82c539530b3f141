"""Answers of a node's service: when they leave, how long they are kept, what they may not depend
on."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from fedlgm import mechanisms
from fedlgm.errors import RunError
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.transcript import Transcript
from fedlgm.training import models
from fedlgm_nodes.protocol import frames
from fedlgm_nodes.protocol import messages as protocol
from fedlgm_nodes.service.folder import NodeFolder
from fedlgm_nodes.service.ledger import NodeLedger
from fedlgm_nodes.service.listener import moment
from fedlgm_nodes.service.release import Releaser
from tests.support import nodes
from tests.support.nodes import BODY, NodeProcess, ask, edit, hello, make_node, plan, rows, served
from tests.support.patience import LIMIT_S


def test_an_answer_made_late_is_kept(tmp_path):
    """A release that was charged before a crash has the lowest number of those that are kept."""
    folder = make_node(tmp_path / "node")
    crashing = nodes.NodeProcess(folder, nodes.CRASHES["after the charge"])
    with pytest.raises(RunError):
        ask(folder)
    crashing.wait()
    with served(folder):
        for round_ in range(2, 7):
            assert ask(folder, round=round_)[0]["ok"]
        assert [ask(folder)[0]["ok"] for _ in range(2)] == [True, True]


def test_answers_that_nobody_reads_are_dropped(tmp_path):
    folder = make_node(tmp_path / "node")
    edit(folder, "receive_seconds = 60.0", "receive_seconds = 0.5")
    module = models.build("mlp", in_shape=nodes.SHAPE, classes=3, hidden=[50_000])
    layers = mechanisms.get("gaussian").table(LayerTable.from_module(module))
    body = frames.npy(layers.flatten(module).numpy())
    work = nodes.WORK | {
        "model": {"name": "mlp", "hidden": [50_000]},
        "mechanism": {"name": "gaussian"},
    }
    text = (
        mechanisms.get("gaussian")
        .plan(layers, plan().facts, Transcript.start(layers.flatten(module)))
        .to_json()
    )
    with nodes.NodeProcess(folder) as process:
        assert ask(folder, body=body, work=work, text=text)[0]["ok"]
        frame = frames.encode(
            nodes.asked(folder, model=protocol.sha256(body), work=work, plan=text).header(), body
        )
        before, links = psutil.Process(process.pid).num_fds(), []
        for _ in range(3):
            links.append(socket.socket(socket.AF_UNIX))
            links[-1].connect(str(folder.socket))
            links[-1].sendall(frame)
        deadline = time.monotonic() + LIMIT_S
        while psutil.Process(process.pid).num_fds() <= before and time.monotonic() < deadline:
            time.sleep(0.02)  # until the first is taken
        while psutil.Process(process.pid).num_fds() > before and time.monotonic() < deadline:
            time.sleep(0.1)
        assert time.monotonic() < deadline
        for link in links:
            link.close()


def test_a_kept_answer_is_on_disk_before_the_ledger_says_that_it_left(tmp_path):
    """Else a loss of power leaves a release that was charged and can never be given."""

    def before() -> None:
        on_disk, fsync, answer = set[int](), os.fsync, NodeLedger.answer

        def synced(descriptor: int) -> None:
            fsync(descriptor)
            on_disk.add(os.fstat(descriptor).st_ino)

        def checked(self: NodeLedger, *given: Any) -> None:
            replies = self.path.parent / "replies"
            if (
                not {replies.stat().st_ino, *(one.stat().st_ino for one in replies.iterdir())}
                <= on_disk
            ):
                nodes.die()
            answer(self, *given)

        os.fsync, NodeLedger.answer = synced, checked  # type: ignore[method-assign]

    folder = make_node(tmp_path / "node")
    with NodeProcess(folder, before):
        assert ask(folder)[0]["ok"]


def test_an_answer_that_is_no_longer_kept_is_not_made_again(node):
    for round_ in range(1, 6):  # one more than are kept
        ask(node, round=round_)
    assert ask(node, round=2)[0]["ok"]
    assert ask(node, round=1)[0]["code"] == "gone"
    assert len(rows(node)) == 5


def test_answers_leave_at_fixed_times(tmp_path):
    folder = make_node(tmp_path / "node")
    edit(folder, "reply_every_seconds = 0.0", "reply_every_seconds = 0.6")
    with served(folder):
        for _ in range(2):  # a new release, then a kept answer
            started = time.monotonic()
            ask(folder)
            late = (time.monotonic() - started) % 0.6
            assert late < 0.3


class TestTimesOfAnswers:
    """Training takes 0.3 s here and answers leave once a second: nothing that anybody can see tells
    of the former."""

    @pytest.fixture
    def slow(self, tmp_path: Path) -> Iterator[NodeFolder]:
        def before() -> None:
            make = Releaser.make

            def slowly(*given: Any) -> Any:
                (tmp_path / "training").touch()
                time.sleep(0.3)
                return make(*given)

            Releaser.make = slowly

        folder = make_node(tmp_path / "node")
        edit(folder, "reply_every_seconds = 0.0", "reply_every_seconds = 1.0")
        with NodeProcess(folder, before):
            yield folder

    def test_are_counted_from_the_question_not_from_the_connection(self, slow):
        """Else whoever connects half a second earlier learns whether training took longer than half
        a second."""
        frame = frames.encode(nodes.asked(slow).header(), BODY)
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(LIMIT_S)
            link.connect(str(slow.socket))
            link.sendall(frame[:-1])
            time.sleep(0.5)
            started = time.monotonic()
            link.sendall(frame[-1:])
            assert link.recv(1)
        assert 0.95 < time.monotonic() - started < 1.45

    def test_of_questions_that_waited_are_as_fixed(self, slow, tmp_path):
        """Else they tell when the question before them was done with."""

        def released() -> float:
            assert ask(slow)[0]["ok"]
            return time.monotonic()

        with ThreadPoolExecutor(1) as pool:
            release = pool.submit(released)
            while not ((tmp_path / "training").exists() or release.done()):
                time.sleep(0.005)
            assert hello(slow)["ok"]
            assert (
                0.7 < time.monotonic() - release.result() < 1.6
            )  # 0.3 if its turn came when training ended


@pytest.mark.parametrize("seconds", [0.0, 0.01, 0.49, 0.5, 0.51, 3.0, 80.0, 599.0])
def test_there_are_few_moments_at_which_answers_leave(seconds):
    left = moment(seconds, 0.5, 600.0)
    assert seconds <= left <= 600.0
    assert left in {0.5 * 2**k for k in range(11)} | {600.0}
    assert moment(seconds, 600.0, 600.0) == 600.0  # a policy may leave one alone


@pytest.mark.slow
def test_what_is_late_is_refused_at_a_time_of_the_policys(tmp_path):
    """And its answer, asked for again, at one of the few moments: how late it was nobody sees."""

    def before() -> None:
        make = Releaser.make
        Releaser.make = lambda *given: (time.sleep(1.3), make(*given))[1]

    folder = make_node(tmp_path / "node")
    edit(folder, "reply_every_seconds = 0.0", "reply_every_seconds = 1.0")
    edit(folder, "release_seconds = 600.0", "release_seconds = 1.0")
    with NodeProcess(folder, before):
        started = time.monotonic()
        assert ask(folder)[0]["code"] == "slow"
        assert 0.95 < time.monotonic() - started < 1.25
        time.sleep(1.5)
        started = time.monotonic()
        assert ask(folder)[0]["replayed"]
        assert 0.95 < time.monotonic() - started < 1.4
    assert len(rows(folder)) == 1


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace-iid"])
def test_no_question_is_nearly_free(tmp_path, mechanism):
    """Whether and when it is answered shows something that no noise covers."""
    folder = make_node(tmp_path / "node")
    edit(folder, "releases = 1000 #", "releases = 10 #")
    text = plan(1e6, mechanism=mechanism).to_json()
    work = nodes.WORK | {"mechanism": {"name": mechanism}}
    with served(folder):
        spent = []
        for round_ in range(1, 11):
            answer = ask(folder, text=text, work=work, round=round_)[0]
            if not answer["ok"]:
                assert answer["code"] == "budget-spent"
                break
            spent.append(hello(folder)["epsilon_spent"])
    assert spent[0] > 8.0 / 20
    assert spent[-1] > 8.0 / 2
    assert spent == sorted(spent)


def test_what_an_answer_may_not_depend_on(tmp_path):
    """Two nodes with other data, keys set equal: everything but the numbers and the ledger's heads
    is the same."""
    headers = []
    for name, examples in (("one", 10), ("two", 500)):
        folder = make_node(tmp_path / name)
        nodes.write_data(tmp_path / f"{name}.npz", examples, seed=examples)
        with served(folder):
            headers.append(ask(folder)[0])
    shown = {
        "signature",
        "position",
        "question",
    }  # the question's digest holds the service's public key
    assert {k: v for k, v in headers[0].items() if k not in shown} == {
        k: v for k, v in headers[1].items() if k not in shown
    }
