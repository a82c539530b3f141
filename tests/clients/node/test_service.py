"""A node's release service in a real process: what strangers can ask of it, and what a crash can lose."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import socket
import sqlite3
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clients.node.folder import NodeFolder
from clients.node.ledger import NodeLedger
from clients.node.release import Releaser
from clients.node.service import Service
from fedlgm import correlation, mechanisms, models
from fedlgm import node_protocol as protocol
from fedlgm.errors import RunError
from fedlgm.facts import Sampling
from fedlgm.layers import LayerTable
from fedlgm.node_protocol import Question
from fedlgm.privacy import composed_epsilon
from fedlgm.privacy.accounting import encode, gaussian_event, laplace_event
from fedlgm.transcript import Transcript
from tests.support import nodes
from tests.support.nodes import BODY, CRASHES, MODEL, NodeProcess, ask, edit, hello, make_node, plan, rows, served
from tests.support.patience import LIMIT_S, wait_until


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeFolder]:
    with served(make_node(tmp_path / "node")) as folder:
        yield folder


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeFolder]:
    """One node for tests after which it must be as before."""
    folder = make_node(tmp_path_factory.mktemp("lasting") / "node")
    edit(folder, "receive_seconds = 60.0", "receive_seconds = 2.0")
    with served(folder):
        yield folder
        assert hello(folder)["ok"]


def numbers(body: bytes) -> np.ndarray:
    return protocol.vector(body, ("<f4", "<f8"))


# -- what it answers ---------------------------------------------------------------------------------------------------


def test_an_answer_is_signed_charged_and_noised(node):
    header, body = ask(node)
    key = protocol.public_key(node.public()["service_key"])
    question = nodes.asked(node)
    assert header["ok"]
    assert header["question"] == question.digest
    position = protocol.Position.of(header["position"])
    signed = protocol.answer_fields(question.digest, 0, 1, protocol.sha256(body), position)
    assert protocol.verify(key, header["signature"], *signed)
    values, sigma = numbers(body), plan().sigma
    assert values.shape == (plan().size,)
    assert 0.5 * sigma.min() < values.std() < 2 * sigma.max() + 1
    (row,) = rows(node)
    assert row.run == "run"
    assert json.loads(row.event)["noise_multiplier"] == pytest.approx(plan().effective_multiplier / 2)


def test_the_same_question_is_one_release_whatever_the_run_is_called(node):
    answers = {ask(node, run=f"run {i}", nonce=f"{i:04x}")[1] for i in range(100)}
    assert len(answers) == 1
    assert len(rows(node)) == 1


def test_other_questions_are_other_releases_with_other_noise(node):
    other_model = protocol.npy(MODEL.numpy() + np.float32(1e-6))
    answers = [
        ask(node)[1], ask(node, round=2)[1], ask(node, body=other_model)[1], ask(node, text=plan(5.0).to_json())[1],
        ask(node, work=nodes.WORK | {"training": {"lr": 0.2, "epochs": 1, "batch_size": 8}})[1],
    ]  # fmt: skip
    noise = [numbers(body) for body in answers]
    for i, one in enumerate(noise):
        for other in noise[:i]:
            assert abs(np.corrcoef(one, other)[0, 1]) < 0.6
    assert len(rows(node)) == len(answers)


def test_one_more_record_gives_other_noise_and_costs(tmp_path):
    folder = make_node(tmp_path / "node")
    with served(folder):
        before = numbers(ask(folder)[1])
    nodes.write_data(tmp_path / "node.npz", nodes.EXAMPLES + 1)
    with served(folder):
        after = numbers(ask(folder)[1])
    # With the same noise the two would differ by less than the bound.
    assert np.linalg.norm(after - before) > 2 * np.linalg.norm(plan().clip)
    assert len(rows(folder)) == 2


def test_the_budget_is_the_composition_of_what_was_asked(tmp_path):
    folder = make_node(tmp_path / "node")
    with served(folder):
        for round_ in (1, 2, 3):
            ask(folder, round=round_, text=plan(4.0 + round_).to_json())
        said = hello(folder)
    events = [(gaussian_event(plan(4.0 + round_).effective_multiplier / 2), 1) for round_ in (1, 2, 3)]
    assert said["epsilon_spent"] == pytest.approx(composed_epsilon(events, 1e-5), rel=1e-6)
    with folder.ledger(readonly=True) as ledger:
        assert ledger.epsilon(1e-5) == said["epsilon_spent"]


def test_a_node_with_a_budget_for_two_releases_answers_two(tmp_path):
    two = composed_epsilon([(gaussian_event(plan().effective_multiplier / 2), 2)], 1e-5)
    with served(make_node(tmp_path / "node", epsilon=two * 1.0001)) as folder:
        answers = [ask(folder, round=round_)[0] for round_ in (1, 2, 3)]
        assert [answer["ok"] for answer in answers] == [True, True, False]
        assert answers[2]["code"] == "budget-spent"
        assert ask(folder, round=2)[0]["ok"]  # again: it costs nothing
        # Less of it, or under another name, is no way around.
        assert ask(folder, round=3, run="another")[0]["code"] == "budget-spent"
        assert ask(folder, round=3, text=plan(40.0).to_json())[0]["code"] == "budget-spent"
    assert len(rows(folder)) == 2


def test_parallel_questions_share_one_budget(tmp_path):
    folder = make_node(tmp_path / "node")
    edit(folder, "releases = 1000 ", "releases = 3 ")
    with served(folder), ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda round_: ask(folder, round=round_)[0], range(1, 9)))
    assert sum(answer["ok"] for answer in answers) == 3
    assert {answer["code"] for answer in answers if not answer["ok"]} == {"budget-spent"}
    assert len(rows(folder)) == 3


@pytest.mark.parametrize("cap", ["releases_per_run", "releases_per_day"])
def test_caps_per_run_and_per_day(tmp_path, cap):
    folder = make_node(tmp_path / "node")
    edit(folder, f"{cap} = 1000", f"{cap} = 1")
    with served(folder):
        assert ask(folder)[0]["ok"]
        assert ask(folder, round=2)[0]["code"] == "budget-spent"
        assert ask(folder, round=2, run="another")[0]["ok"] == (cap == "releases_per_run")


CYCLE = Sampling("cyclic", 4, 0.25, 4)
BANDED = correlation.get("banded", 10, bands=4)


class TestSeparation:
    """Rounds between two participations of one run are kept by the node itself, whoever asks."""

    def asked(self, folder, text=None, **more):
        header = ask(folder, text=text, **more)[0]
        return header["ok"] or (header["code"], header["why"])

    def test_by_policy(self, tmp_path):
        folder = make_node(tmp_path / "node")
        edit(folder, "min_separation = 1 ", "min_separation = 3 ")
        with served(folder):
            assert self.asked(folder, round=5) is True
            assert self.asked(folder, round=5) is True  # the same question is the same release
            for near in (6, 7, 4, 3):
                code, why = self.asked(folder, round=near)
                assert code == "separation"
                assert f"round {near} is {abs(near - 5)} rounds from round 5" in why
            assert self.asked(folder, round=5, text=plan(5.0).to_json())[0] == "separation"  # another one of that round
            assert self.asked(folder, round=6, run="another") is True
            assert self.asked(folder, round=8) is True
            assert self.asked(folder, round=2) is True
        with served(folder):  # after a restart
            assert self.asked(folder, round=9)[0] == "separation"
            assert self.asked(folder, round=11) is True
        assert [row.round for row in rows(folder)] == [5, 6, 8, 2, 11]

    def test_by_the_plan(self, tmp_path):
        """A plan with correlated noise states the separation that its cost rests on, and what each round costs."""
        folder = make_node(tmp_path / "node", population=4)
        edit(folder, 'trust = ["local"]', 'trust = ["central"]')
        text = plan(trust="central", sampling=CYCLE, noise=BANDED, rounds=10).to_json()
        with served(folder):
            assert self.asked(folder, text, round=1) is True
            assert self.asked(folder, text, round=4)[0] == "separation"
            assert self.asked(folder, text, round=5) is True
        # Independent of the round: the column of C is as long as that, not only its first entry.
        norm = BANDED.amplified_column_norm()
        assert {row.event for row in rows(folder)} == {
            json.dumps(encode(gaussian_event(plan(trust="central").effective_multiplier / (2 * norm))), sort_keys=True)
        }

    @pytest.mark.parametrize(
        "noise", [correlation.get("banded", 10, bands=5), correlation.get("blt", 10, min_separation=4)]
    )
    def test_noise_that_is_not_paid_for_round_by_round(self, tmp_path, noise):
        folder = make_node(tmp_path / "node", population=4)
        edit(folder, 'trust = ["local"]', 'trust = ["central"]')
        text = plan(trust="central", sampling=CYCLE, noise=noise, rounds=10).to_json()
        with served(folder):
            code, why = self.asked(folder, text)
        assert code == "privacy"
        assert "correlated over more rounds" in why

    def test_a_run_without_end_is_not_computed_with(self, tmp_path):
        endless = json.loads(
            plan(trust="central", sampling=CYCLE, noise=correlation.get("blt", 10, min_separation=4)).to_json()
        )
        endless["facts"]["noise"]["rounds"] = 10**12
        with served(make_node(tmp_path / "node")) as folder:
            assert self.asked(folder, json.dumps(endless))[0] == "plan"
            assert hello(folder)["ok"]


def test_central_trust_only_where_the_policy_says_so(tmp_path):
    central = plan(trust="central").to_json()
    with served(make_node(tmp_path / "local")) as folder:
        assert ask(folder, text=central)[0]["code"] == "privacy"
    folder = make_node(tmp_path / "central")
    edit(folder, 'trust = ["local"]', 'trust = ["central"]')
    with served(folder):
        assert ask(folder)[0]["code"] == "privacy"
        header, body = ask(folder, text=central)
        assert header["ok"]
        assert np.linalg.norm(numbers(body)) <= np.linalg.norm(
            plan().clip
        )  # bounded, not noised: the server is trusted
    assert [row.trust for row in rows(folder)] == ["central"]


def test_another_task_that_the_policy_lists(tmp_path):
    folder = make_node(tmp_path / "node", classes=1)
    with np.load(tmp_path / "node.npz") as kept:
        np.savez(tmp_path / "node.npz", x=kept["x"], y=kept["y"] / 2)
    edit(folder, 'tasks = ["classification"]', 'tasks = ["regression"]')
    module = models.build("logistic", in_shape=nodes.SHAPE, classes=1)
    layers = LayerTable.from_module(module)
    text = (
        mechanisms.get("snr-consistent").plan(layers, plan().facts, Transcript.start(layers.flatten(module))).to_json()
    )
    body = protocol.npy(layers.flatten(module).numpy())
    with served(folder):
        work = nodes.WORK | {"task": {"name": "regression", "loss": "huber"}}
        assert ask(folder, text=text, body=body, work=work)[0]["ok"]
        assert ask(folder, text=text, body=body)[0]["code"] == "work"


def test_targets_that_no_listed_task_takes(tmp_path):
    folder = make_node(tmp_path / "node")
    with np.load(tmp_path / "node.npz") as kept:
        np.savez(tmp_path / "node.npz", x=kept["x"], y=kept["y"] / 2)
    assert "use the task 'regression'" in refused(folder)


def test_without_examples_there_is_noise_alone(tmp_path):
    folder = make_node(tmp_path / "node")
    nodes.write_data(tmp_path / "node.npz", 0)
    with served(folder):
        assert numbers(ask(folder)[1]).std() > 0


def test_only_the_enrolled_server_is_answered(tmp_path):
    server, stranger = Ed25519PrivateKey.generate(), Ed25519PrivateKey.generate()
    with served(make_node(tmp_path / "node", server_key=protocol.public_text(server))) as folder:
        assert ask(folder)[0]["code"] == "unsigned"
        assert ask(folder, signer=stranger)[0]["code"] == "unsigned"
        stolen = nodes.asked(folder).header(server)
        assert ask(folder, round=2, signature=stolen["signature"])[0]["code"] == "unsigned"
        assert ask(folder, signer=server)[0]["ok"]
    assert len(rows(folder)) == 1


def test_a_recorded_question_is_not_charged_again(tmp_path):
    """Whoever heard it may send it again, after the data or the software have changed; the server asks anew."""
    server = Ed25519PrivateKey.generate()
    folder = make_node(tmp_path / "node", server_key=protocol.public_text(server))
    with served(folder):
        assert ask(folder, signer=server)[0]["ok"]
        assert ask(folder, signer=server, nonce="01")[0]["replayed"]  # another question, the same release
        assert ask(folder, signer=server)[0]["replayed"]
    nodes.write_data(tmp_path / "node.npz", nodes.EXAMPLES + 1)
    with served(folder):
        for recorded in ("00", "01"):
            assert ask(folder, signer=server, nonce=recorded)[0]["code"] == "replayed"
        assert len(rows(folder)) == 1
        assert ask(folder, signer=server, nonce="02")[0]["ok"]
    assert len(rows(folder)) == 2


def test_a_question_for_another_node_is_refused(tmp_path):
    """Of the same client number, such as the node that it takes the place of."""
    server = Ed25519PrivateKey.generate()
    before = make_node(tmp_path / "before", server_key=protocol.public_text(server))
    with served(make_node(tmp_path / "node", server_key=protocol.public_text(server))) as folder:
        header, _ = protocol.exchange(str(folder.socket), nodes.asked(before).header(server), BODY, timeout=LIMIT_S)
    assert header["code"] == "unsigned"


def test_what_is_expected_of_the_ledger_cannot_be_taken_out_of_a_question(tmp_path):
    server = Ed25519PrivateKey.generate()
    with served(make_node(tmp_path / "node", server_key=protocol.public_text(server))) as folder:
        position = ask(folder, signer=server)[0]["position"]
        header = nodes.asked(folder, round=2, expect=position).header(server)
        del header["expect"]
        assert protocol.exchange(str(folder.socket), header, BODY, timeout=LIMIT_S)[0]["code"] == "unsigned"


def test_limits_of_who_asks_and_how_much_and_how_long(tmp_path):
    folder = make_node(tmp_path / "a")
    edit(folder, "runs = []", 'runs = ["good"]')
    edit(folder, "message_mib = 96", "message_mib = 1")
    with served(folder):
        assert ask(folder)[0]["code"] == "run"
        assert ask(folder, run="good", body=bytes(2 << 20))[0]["code"] == "too-large"
        assert ask(folder, run="good")[0]["ok"]
    slow = make_node(tmp_path / "b")
    edit(slow, "release_seconds = 600.0", "release_seconds = 0.001")
    with served(slow):
        assert ask(slow)[0]["code"] == "slow"


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
    body = protocol.npy(layers.flatten(module).numpy())
    work = nodes.WORK | {"model": {"name": "mlp", "hidden": [50_000]}, "mechanism": {"name": "gaussian"}}
    text = mechanisms.get("gaussian").plan(layers, plan().facts, Transcript.start(layers.flatten(module))).to_json()
    with nodes.NodeProcess(folder) as process:
        assert ask(folder, body=body, work=work, text=text)[0]["ok"]
        frame = protocol.encode(nodes.asked(folder, model=protocol.sha256(body), work=work, plan=text).header(), body)
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
    """Training takes 0.3 s here and answers leave once a second: nothing that anybody can see tells of the former."""

    @pytest.fixture
    def slow(self, tmp_path: Path) -> Iterator[NodeFolder]:
        def before() -> None:
            make = Releaser.make
            Releaser.make = lambda *given: (time.sleep(0.3), make(*given))[1]

        folder = make_node(tmp_path / "node")
        edit(folder, "reply_every_seconds = 0.0", "reply_every_seconds = 1.0")
        with NodeProcess(folder, before):
            yield folder

    def test_are_counted_from_the_question_not_from_the_connection(self, slow):
        """Else whoever connects half a second earlier learns whether training took longer than half a second."""
        frame = protocol.encode(nodes.asked(slow).header(), BODY)
        with socket.socket(socket.AF_UNIX) as link:
            link.settimeout(LIMIT_S)
            link.connect(str(slow.socket))
            link.sendall(frame[:-1])
            time.sleep(0.5)
            started = time.monotonic()
            link.sendall(frame[-1:])
            assert link.recv(1)
        assert 0.95 < time.monotonic() - started < 1.45

    def test_of_questions_that_waited_are_as_fixed(self, slow):
        """Else they tell when the question before them was done with."""
        with ThreadPoolExecutor(1) as pool:
            release = pool.submit(ask, slow)
            time.sleep(0.1)
            started = time.monotonic()
            assert hello(slow)["ok"]
            assert 1.8 < time.monotonic() - started < 2.4
            assert release.result()[0]["ok"]


def test_a_kept_answer_is_on_disk_before_the_ledger_says_that_it_left(tmp_path):
    """Else a loss of power leaves a release that was charged and can never be given."""

    def before() -> None:
        on_disk, fsync, answer = set[int](), os.fsync, NodeLedger.answer

        def synced(descriptor: int) -> None:
            fsync(descriptor)
            on_disk.add(os.fstat(descriptor).st_ino)

        def checked(self: NodeLedger, *given: Any) -> None:
            replies = self.path.parent / "replies"
            if not {replies.stat().st_ino, *(one.stat().st_ino for one in replies.iterdir())} <= on_disk:
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


# -- hostile plans, models and work ------------------------------------------------------------------------------------


def changed(**values: Any) -> str:
    return json.dumps(json.loads(plan().to_json()) | values)


GUARANTEE = json.loads(plan().to_json())["guarantee"]
K = len(nodes.LAYERS)
SIGMA, CLIP = plan().sigma.tolist(), plan().clip.tolist()
PLANS = {
    "noise over ten": changed(sigma=[s / 10 for s in SIGMA]),  # would cost a hundred releases: more than the budget
    "no noise": changed(sigma=[0.0] * K),
    "hardly any Laplace noise": changed(family="laplace", sigma=[1e-4] * K),  # its composition would take gigabytes
    "negative noise": changed(sigma=[-s for s in SIGMA]),
    "infinite noise, released": changed(sigma=[None] * K, released=[True] * K),
    "noise that is not a number": changed(sigma=[float("nan")] * K),
    "absurd noise": changed(sigma=[1e300] * K),
    "noise as text": changed(sigma=["none"] * K),
    "bounds times a hundred": changed(clip=[c * 100 for c in CLIP], sigma=[s * 100 for s in SIGMA]),
    "infinite bounds": changed(clip=[float("inf")] * K),
    "negative bounds": changed(clip=[-c for c in CLIP]),
    "bounds below float32": changed(clip=[1e-30] * K),
    "central trust": plan(trust="central").to_json(),
    "no guarantee": changed(protected=False, guarantee=GUARANTEE | {"status": "none"}),
    "no guarantee, called protected": changed(guarantee=GUARANTEE | {"status": "none"}),
    "bounded by the trainer": changed(bounded_by="trainer", guarantee=GUARANTEE | {"unit": "example"}),
    "bounded by nobody": changed(bounded_by="nobody"),
    "another number of layers": changed(clip=[*CLIP, 1.0], sigma=[*SIGMA, 1.0], released=[True] * (K + 1)),
    "nothing released": changed(released=[False] * K, sigma=[None] * K),
    "a query without noise": changed(queries=[["below-bound", 0.0]]),
    "an unknown query": changed(queries=[["raw", 1.0]]),
    "another law of noise": changed(family="none"),
    "not JSON": "{",
    "a list": "[]",
    "empty": " ",
    "deep": "[" * 5000 + "]" * 5000,
}


@pytest.mark.parametrize("case", PLANS)
def test_hostile_plans_are_refused_and_cost_nothing(lasting, case):
    header, body = ask(lasting, text=PLANS[case])
    assert not header["ok"]
    assert header["code"] in ("privacy", "plan", "budget-spent")
    assert body == b""
    assert rows(lasting) == []


OBJECTS = (
    b"\x93NUMPY\x01\x00v\x00"
    + b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(117)
    + b"\n"
    + b"cos\nsystem\n."
)
MODELS = {
    "NaN": protocol.npy(np.full(len(MODEL), np.nan, np.float32)),
    "Inf": protocol.npy(np.full(len(MODEL), np.inf, np.float32)),
    "float64": protocol.npy(MODEL.double().numpy()),
    "too short": protocol.npy(MODEL[:-1].numpy()),
    "too long": protocol.npy(np.zeros(len(MODEL) + 1, np.float32)),
    "two dimensions": protocol.npy(MODEL.numpy()[None]),
    "truncated": BODY[:-1],
    "with a tail": BODY + b"tail",
    "objects": OBJECTS,
    "empty": b"",
    "garbage": b"\x80\x04cos\nsystem\n(S'touch /tmp/owned'\ntR.",
}


@pytest.mark.parametrize("case", MODELS)
def test_hostile_models_are_refused_and_cost_nothing(lasting, case):
    header, _ = ask(lasting, body=MODELS[case])
    assert header["code"] == "model"
    assert rows(lasting) == []


WORKS: dict[str, Any] = {
    "an unknown model": {"model": {"name": "os:system"}},
    "a model that is not listed": {"model": {"name": "torch.nn:Linear"}},
    "another model's size": {"model": {"name": "mlp", "hidden": [8]}},
    "a huge model": {"model": {"name": "mlp", "hidden": [10**9]}},
    "an unknown option": {"model": {"name": "logistic", "hook": "x"}},
    "an option that overrides": {"model": {"name": "logistic", "classes": 1000}},
    "many options": {"model": {"name": "mlp", "hidden": [1] * 5000}},
    "no mechanism": {"mechanism": {"name": "none"}},
    "an unknown mechanism": {"mechanism": {"name": "raw"}},
    "a mechanism as text": {"mechanism": "snr-consistent"},
    "an unknown task": {"task": {"name": "read"}},
    "a task that is not listed": {"task": {"name": "regression"}},
    "a task as an object": {"task": "classification"},
    "an unknown option of the task": {"task": {"name": "classification", "hook": 1}},
    "endless training": {"training": {"epochs": 10**9}},
    "a negative rate": {"training": {"lr": -1.0}},
    "half a batch": {"training": {"batch_size": 0.5}},
    "a rate that no float holds": {"training": {"lr": 10**400}},
    "a momentum that no float holds": {"training": {"momentum": 10**400}},
    "a clip that no float holds": {"training": {"gradient_clip": 10**400}},
    "a batch that no tensor holds": {"training": {"batch_size": 2**70}},
    "no training": {"training": {"epochs": 0}},
    "an unknown setting": {"training": {"callback": "x"}},
    "more keys": {"eval": "1"},
}


@pytest.mark.parametrize("case", WORKS)
def test_hostile_work_is_refused_and_costs_nothing(lasting, case):
    header, _ = ask(lasting, work=nodes.WORK | WORKS[case])
    assert header["code"] in ("work", "model", "malformed")
    assert rows(lasting) == []


class Fussy(torch.nn.Linear):
    """A model of an operator's own that does not take every input."""

    def __init__(self, least: float) -> None:
        super().__init__(int(np.prod(nodes.SHAPE)), nodes.CLASSES)
        self.least = least

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.max() > self.least:
            raise ValueError(f"an input is larger than {self.least}")
        return super().forward(x.flatten(1))


def fussy(in_shape: Any, classes: int, least: float = 0.5) -> torch.nn.Module:
    return Fussy(least)


class TestTrainingThatFails:
    WORK = nodes.WORK | {"model": {"name": "tests.clients.node.test_service:fussy"}}

    def made(self, path: Path) -> NodeFolder:
        folder = make_node(path)
        edit(folder, 'models = ["logistic"', 'models = ["tests.clients.node.test_service:fussy", "logistic"')
        return folder

    def test_on_any_data_is_refused_and_costs_nothing(self, tmp_path):
        with served(self.made(tmp_path / "node")) as folder:
            never = self.WORK | {"model": {**self.WORK["model"], "least": -1.0}}
            header, _ = ask(folder, work=never)
            assert header["code"] == "work"
            assert "training fails on any data: an input is larger than -1.0" in header["why"]
            assert rows(folder) == []

    def test_on_this_nodes_data_does_not_show(self, tmp_path):
        """Whether it fails depends on the data: an error in place of an answer would be an answer without noise."""
        with served(self.made(tmp_path / "node")) as folder:
            header, body = ask(folder, work=self.WORK)
            assert header["ok"]
            assert numbers(body).std() > 0
            assert "training on this node's data failed" in folder.path.with_name("node.log").read_text()
            assert ask(folder, work=self.WORK)[1] == body
            assert len(rows(folder)) == 1


@pytest.mark.parametrize(
    ("code", "more"),
    [
        ("client", {"client": 1}),
        ("malformed", {"round": 0}),
        ("malformed", {"round": -1}),
        ("malformed", {"round": 1.5}),
        ("malformed", {"run": "x" * 1000}),
        ("malformed", {"ask": "evaluate"}),
        ("malformed", {"ask": "norms"}),
        ("malformed", {"raw": True}),
        ("protocol", {"protocol": 1}),
        ("expect", {"expect": {"ledger": "x", "seq": 0, "head": "x", "signature": "00"}}),
        ("expect", {"expect": {}}),
    ],
)
def test_other_questions_are_refused_and_cost_nothing(lasting, code, more):
    header, _ = protocol.exchange(
        str(lasting.socket),
        Question("run", 1, 0, plan().to_json(), protocol.sha256(BODY), nodes.WORK, "00").header() | more,
        BODY,
        timeout=LIMIT_S,
    )
    assert header["code"] == code
    assert rows(lasting) == []


def test_a_crafted_model_is_bounded_and_noised_like_any_other(node):
    header, body = ask(node, body=protocol.npy(np.full(len(MODEL), 1e30, np.float32)))
    assert header["ok"]
    values = numbers(body)
    assert np.isfinite(values).all()
    assert np.linalg.norm(values) < np.linalg.norm(plan().clip) + 6 * np.sqrt(len(values)) * plan().sigma.max()


# -- hostile bytes -----------------------------------------------------------------------------------------------------

LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.text(max_size=20), st.just("release"), st.just(1)
)  # fmt: skip
FRAMES = st.one_of(
    st.binary(max_size=200),
    st.builds(lambda h, b: protocol.encode({}, b)[:8] + h, st.binary(max_size=50), st.binary(max_size=20)),
    st.builds(
        lambda header, body: struct.pack("<IQ", len(header), len(body)) + header + body,
        st.one_of(st.binary(max_size=100), st.text(max_size=100).map(str.encode)),
        st.binary(max_size=100),
    ),
    st.builds(
        lambda values, body: protocol.encode(values, body),
        st.dictionaries(
            st.sampled_from(["protocol", "ask", "run", "round", "client", "plan", "work", "nonce", "expect", "x"]),
            st.recursive(
                LEAVES,
                lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
                max_leaves=5,
            ),
        ),
        st.binary(max_size=100),
    ),
    st.builds(
        lambda cut, flip, at: _damaged(cut, flip, at),
        st.integers(0, 3000), st.integers(1, 255), st.integers(0, 3000),
    ),
)  # fmt: skip
WHOLE = protocol.encode(
    Question("run", 1, 1, plan().to_json(), protocol.sha256(BODY), nodes.WORK, "00").header(), BODY
)  # for client 1: whole, it is refused


def _damaged(cut: int, flip: int, at: int) -> bytes:
    frame = bytearray(WHOLE[: max(20, len(WHOLE) - cut)])
    frame[at % len(frame)] ^= flip
    return bytes(frame)


def send(path: Path, data: bytes) -> bytes:
    """Send bytes, say that no more come, and read what comes back."""
    with socket.socket(socket.AF_UNIX) as link:
        link.settimeout(30)
        link.connect(str(path))
        received = b""
        try:
            link.sendall(data)
            link.shutdown(socket.SHUT_WR)
            while piece := link.recv(1 << 16):
                received += piece
        except (BrokenPipeError, ConnectionResetError):
            pass
        return received


def _check_fuzz(folder: NodeFolder, frame: bytes) -> None:
    answer = send(folder.socket, frame)
    if answer:
        head, _ = protocol.lengths(answer[: protocol.PREFIX_BYTES], 1 << 20)
        header = protocol.parse_header(answer[protocol.PREFIX_BYTES : protocol.PREFIX_BYTES + head])
        assert header["ok"] is False or "epsilon_spent" in header


@settings(max_examples=400, suppress_health_check=list(HealthCheck), database=None)
@given(frame=FRAMES)
def test_no_bytes_are_answered_with_a_release(lasting, frame):
    _check_fuzz(lasting, frame)


@pytest.mark.slow
def test_ten_thousand_frames(lasting):
    @settings(max_examples=10_000, suppress_health_check=list(HealthCheck), database=None)
    @given(frame=FRAMES)
    def check(frame: bytes) -> None:
        _check_fuzz(lasting, frame)

    check()
    assert rows(lasting) == []


def test_nothing_was_charged_by_the_fuzz(lasting):
    assert rows(lasting) == []


@pytest.mark.parametrize("more", [{"x" * 300_000: 1}, {"work": {"mechanism": {}, "model": {}, "\u00e9" * 300_000: 1}}])
def test_a_refusal_is_short_whatever_was_asked(lasting, more):
    """It travels back in a header, and is a line of this node's log."""
    log = lasting.path.with_name("node.log")
    before = log.stat().st_size
    header, _ = protocol.exchange(str(lasting.socket), nodes.asked(lasting).header() | more, BODY, timeout=LIMIT_S)
    assert header["ok"] is False
    assert len(header["why"]) <= 1000
    assert log.stat().st_size - before < 3000


def test_sizes_are_limited_before_anything_is_read(lasting):
    for prefix in (struct.pack("<IQ", 2**32 - 1, 0), struct.pack("<IQ", 10, 2**63)):
        answer = send(lasting.socket, prefix)
        assert b"too-large" in answer


def test_slow_questions_are_ended_and_others_answered_meanwhile(lasting):
    with socket.socket(socket.AF_UNIX) as slow:
        slow.settimeout(10)
        slow.connect(str(lasting.socket))
        slow.sendall(WHOLE[:30])
        assert hello(lasting)["ok"]
        started = time.monotonic()
        assert b"slow" in slow.recv(1 << 16)
        assert time.monotonic() - started < 5


def test_a_hundred_half_sent_questions(lasting):
    links = []
    try:
        for _ in range(100):
            link = socket.socket(socket.AF_UNIX)
            link.settimeout(LIMIT_S)
            link.connect(str(lasting.socket))
            with contextlib.suppress(BrokenPipeError):  # refused already
                link.sendall(b"\x01")
            links.append(link)
    finally:
        answered = sum(b"busy" in link.recv(1 << 16) for link in links[20:40])
        for link in links:
            link.close()
    assert answered == 20
    wait_until(lambda: hello(lasting)["ok"])


# -- crashes -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bytes]:
    """A node's files before anything was asked, and the answer of an undisturbed service to the first question."""
    folder = make_node(tmp_path_factory.mktemp("first") / "node")
    copy = folder.path.with_name("copy")
    shutil.copytree(folder.path, copy)
    with served(folder):
        body = ask(folder)[1]
    return copy, body


def restored(undisturbed: tuple[Path, bytes], tmp_path: Path) -> NodeFolder:
    shutil.copytree(undisturbed[0], tmp_path / "node")
    nodes.write_data(tmp_path / "node.npz")
    return NodeFolder(tmp_path / "node")


@pytest.mark.parametrize("point", CRASHES)
def test_killed_at_every_step(undisturbed, tmp_path, point):
    folder = restored(undisturbed, tmp_path)
    process = NodeProcess(folder, CRASHES[point])
    with pytest.raises(RunError):
        ask(folder)
    process.wait()
    charged = 0 if point == "before the charge" else 1
    with served(folder):
        assert len(rows(folder)) == charged
        header, body = ask(folder)
        assert header["ok"]
        assert body == undisturbed[1]
    assert len(rows(folder)) == 1


def test_killed_at_thirty_random_points(undisturbed, tmp_path):
    folder, chance = restored(undisturbed, tmp_path), random.Random(5)
    answers: dict[int, bytes] = {}
    for attempt in range(30):
        round_ = 1 + attempt // 3
        process = NodeProcess(folder, nodes.die_after(chance.uniform(0, 0.03)))
        try:
            header, body = ask(folder, round=round_)
            assert header["ok"]
            assert answers.setdefault(round_, body) == body  # what was answered before is answered again, bit by bit
        except RunError:
            pass
        process.kill()
        known = rows(folder)
        assert len({row.request for row in known}) == len(known)
        assert len(known) >= len(answers)
    assert len(rows(folder)) <= 10
    with served(folder):
        for round_, body in answers.items():
            header, again = ask(folder, round=round_)
            assert header.get("code") == "gone" or again == body


# -- older, other and edited ledgers -----------------------------------------------------------------------------------


def refused(folder: NodeFolder) -> str:
    with pytest.raises(AssertionError) as error, served(folder):
        pass
    return str(error.value)


def test_an_older_ledger_is_refused(tmp_path):
    folder = make_node(tmp_path / "node")
    with served(folder):
        ask(folder)
    older = folder.ledger_file.read_bytes()
    with served(folder):
        ask(folder, round=2)
    folder.ledger_file.write_bytes(older)
    assert "rolled back: it has 1 releases, its witness saw 2" in refused(folder)


def test_an_older_ledger_beside_a_log_that_a_crash_left_loses_nothing(tmp_path):
    folder = make_node(tmp_path / "node")
    older = folder.ledger_file.read_bytes()
    process = NodeProcess(folder)
    ask(folder)
    ask(folder, round=2)
    process.kill()
    assert folder.ledger_file.with_name("ledger.sqlite-wal").exists()
    folder.ledger_file.write_bytes(older)
    said = ""
    try:
        process = NodeProcess(folder)
    except AssertionError as error:
        said = str(error)
    else:
        process.stop()
    assert "rolled back" in said or "cannot be used" in said or len(rows(folder)) == 2


def test_another_nodes_ledger_is_refused(tmp_path):
    folder, other = make_node(tmp_path / "node"), make_node(tmp_path / "other")
    folder.ledger_file.write_bytes(other.ledger_file.read_bytes())
    assert "was exchanged" in refused(folder)


def test_ledger_and_witness_restored_together_are_refused_once_the_server_says_what_it_saw(tmp_path):
    folder = make_node(tmp_path / "node")
    with served(folder):
        ask(folder)
    shutil.copytree(folder.path, tmp_path / "snapshot")
    with served(folder):
        seen = ask(folder, round=2)[0]["position"]
    shutil.rmtree(folder.path)
    shutil.copytree(tmp_path / "snapshot", folder.path)
    with served(folder):
        assert ask(folder, round=3, expect=seen)[0]["code"] == "rolled-back"
        assert ask(folder, round=3)[0]["code"] == "rolled-back"  # from then on, whoever asks
    assert "rolled back" in refused(folder)  # and after a restart


def test_a_restored_ledger_that_has_grown_since_is_refused_after_a_restart_too(tmp_path):
    """Whoever may ask can make it longer than what was signed before anybody says what that was."""
    folder = make_node(tmp_path / "node")
    shutil.copytree(folder.path, tmp_path / "snapshot")
    with served(folder):
        seen = ask(folder)[0]["position"]
    shutil.copytree(folder.path, tmp_path / "right")
    shutil.rmtree(folder.path)
    shutil.copytree(tmp_path / "snapshot", folder.path)
    with served(folder):
        assert [ask(folder, round=round_)[0]["ok"] for round_ in (2, 3)] == [True, True]
        assert ask(folder, round=4, expect=seen)[0]["code"] == "rolled-back"
    assert "rows were exchanged" in refused(folder)
    shutil.rmtree(folder.path / "state")  # the right ledger is taken back by the same witness
    shutil.copytree(tmp_path / "right" / "state", folder.path / "state")
    with served(folder):
        assert ask(folder, round=4, expect=seen)[0]["ok"]


def test_an_exchanged_ledger_is_refused_after_a_restart_too(tmp_path):
    """Another ledger with its own witness, as a folder made anew around the old keys has."""
    folder, other = make_node(tmp_path / "node"), make_node(tmp_path / "other")
    with served(folder):
        seen = ask(folder)[0]["position"]
    for file in ("ledger_file", "witness_file"):
        getattr(folder, file).write_bytes(getattr(other, file).read_bytes())
    with served(folder):
        assert ask(folder, round=2, expect=seen)[0]["code"] == "rolled-back"
    assert "was exchanged" in refused(folder)


def test_a_question_that_waits_while_a_rollback_is_found_out_is_refused(tmp_path):
    folder = make_node(tmp_path / "node")
    shutil.copytree(folder.path, tmp_path / "snapshot")
    with served(folder):
        seen = ask(folder)[0]["position"]
    shutil.rmtree(folder.path)
    shutil.copytree(tmp_path / "snapshot", folder.path)

    def slow() -> None:
        admit = Service.admit
        Service.admit = lambda *given: (time.sleep(0.5), admit(*given))[1]

    with NodeProcess(folder, before=slow), ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, folder, round=3, expect=seen)
        time.sleep(0.2)
        second = pool.submit(ask, folder, round=4)
        assert first.result()[0]["code"] == "rolled-back"
        assert second.result()[0].get("code") == "rolled-back"


def test_a_ledger_is_used_by_one_service(node):
    sock = node.socket.stat().st_ino
    copy = NodeFolder(node.path)
    process = nodes._fork.Process(target=nodes._serve, args=(copy, node.path.with_name("second.log"), None))
    process.start()
    process.join(30)
    assert "another process holds the ledger" in node.path.with_name("second.log").read_text()
    assert node.socket.stat().st_ino == sock
    assert hello(node)["ok"]


def test_an_edited_cost_is_refused(tmp_path):
    folder = make_node(tmp_path / "node")
    with served(folder):
        ask(folder)
    with sqlite3.connect(folder.ledger_file) as database:
        database.execute("UPDATE releases SET event = replace(event, '2', '9')")
    database.close()
    assert "was changed" in refused(folder)


@pytest.mark.parametrize("gone", ["ledger_file", "witness_file"])
def test_a_missing_file_is_refused(tmp_path, gone):
    folder = make_node(tmp_path / "node")
    getattr(folder, gone).unlink()
    assert "is gone" in refused(folder)


def test_a_ledger_that_no_finite_epsilon_covers_is_told(tmp_path):
    """At another delta than the one that it was charged under."""
    folder = make_node(tmp_path / "node")
    with folder.ledger() as ledger:
        ledger.charge("x", laplace_event(0.5, 1.0, "replace-one"), trust="local", run="run", round=1, data="d")
    edit(folder, "delta = 1e-05", "delta = 1e-20")
    with served(folder):
        said = hello(folder)
        assert (said["code"], said["why"]) == ("budget-spent", "what was released has no finite epsilon at delta 1e-20")
        assert ask(folder)[0]["code"] == "budget-spent"


def test_what_an_answer_may_not_depend_on(tmp_path):
    """Two nodes with other data, keys set equal: everything but the numbers and the ledger's heads is the same."""
    headers = []
    for name, examples in (("one", 10), ("two", 500)):
        folder = make_node(tmp_path / name)
        nodes.write_data(tmp_path / f"{name}.npz", examples, seed=examples)
        with served(folder):
            headers.append(ask(folder)[0])
    shown = {"signature", "position", "question"}  # the question's digest holds the service's public key
    assert {k: v for k, v in headers[0].items() if k not in shown} == {
        k: v for k, v in headers[1].items() if k not in shown
    }


def test_a_service_that_is_asked_while_it_works_says_so_or_waits(node):
    results: list[Any] = []
    threads = [threading.Thread(target=lambda r=r: results.append(ask(node, round=r)[0])) for r in range(1, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(result["ok"] for result in results)
    assert sorted(result["seq"] for result in results) == [1, 2, 3, 4, 5]
