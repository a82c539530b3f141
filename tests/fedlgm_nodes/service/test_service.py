"""What a node's release service answers, in a real process, and what that costs the node."""

from __future__ import annotations

import contextlib
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from fedlgm import mechanisms
from fedlgm.errors import ConfigError
from fedlgm.noise import correlation
from fedlgm.planning.facts import Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy import composed_epsilon
from fedlgm.privacy.events import encode, gaussian_event
from fedlgm.training import models
from fedlgm_nodes.policy import Refusal
from fedlgm_nodes.protocol import frames
from fedlgm_nodes.protocol import messages as protocol
from fedlgm_nodes.service.ask import Ask
from fedlgm_nodes.service.row import CLIENT
from fedlgm_nodes.service.service import Service
from fedlgm_nodes.service.workshop import Workshop
from tests.support import nodes
from tests.support.nodes import (
    MODEL,
    ask,
    edit,
    hello,
    make_node,
    numbers,
    plan,
    refused,
    rows,
    served,
)


def test_an_answer_is_signed_charged_and_noised(node):
    header, body = ask(node)
    key = protocol.public_key(node.public()["service_key"])
    question = nodes.asked(node)
    assert header["ok"]
    assert header["question"] == question.digest
    position = protocol.record_of(protocol.Position, header["position"])
    signed = protocol.answer_fields(question.digest, 0, 1, protocol.sha256(body), position)
    assert protocol.verify(key, header["signature"], *signed)
    values, sigma = numbers(body), plan().sigma
    assert values.shape == (plan().size,)
    assert 0.5 * sigma.min() < values.std() < 2 * sigma.max() + 1
    (row,) = rows(node)
    assert row.run == "run"
    assert json.loads(row.event)["noise_multiplier"] == pytest.approx(
        plan().effective_multiplier / 2
    )


def test_the_same_question_is_one_release_whatever_the_run_is_called(node):
    answers = {ask(node, run=f"run {i}", nonce=f"{i:04x}")[1] for i in range(100)}
    assert len(answers) == 1
    assert len(rows(node)) == 1


def test_other_questions_are_other_releases_with_other_noise(node):
    other_model = frames.npy(MODEL.numpy() + np.float32(1e-6))
    answers = [
        ask(node)[1],
        ask(node, round=2)[1],
        ask(node, body=other_model)[1],
        ask(node, text=plan(5.0).to_json())[1],
        ask(node, work=nodes.WORK | {"training": {"lr": 0.2, "epochs": 1, "batch_size": 8}})[1],
    ]
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
    events = [
        (gaussian_event(plan(4.0 + round_).effective_multiplier / 2), 1) for round_ in (1, 2, 3)
    ]
    assert said["epsilon_spent"] == pytest.approx(composed_epsilon(events, 1e-5), rel=1e-6)
    with folder.ledger(readonly=True) as ledger:
        assert ledger.epsilon(1e-5, CLIENT) == said["epsilon_spent"]


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
            assert (
                self.asked(folder, round=5, text=plan(5.0).to_json())[0] == "separation"
            )  # another one of that round
            assert self.asked(folder, round=6, run="another") is True
            assert self.asked(folder, round=8) is True
            assert self.asked(folder, round=2) is True
        with served(folder):  # after a restart
            assert self.asked(folder, round=9)[0] == "separation"
            assert self.asked(folder, round=11) is True
        assert [row.round for row in rows(folder)] == [5, 6, 8, 2, 11]

    def test_by_the_plan(self, tmp_path):
        """A plan with correlated noise states the separation that its cost rests on, and what each
        round costs."""
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
            json.dumps(
                encode(gaussian_event(plan(trust="central").effective_multiplier / (2 * norm))),
                sort_keys=True,
            )
        }

    def test_every_run_of_central_trust_is_charged_and_keeps_its_own_rounds_apart(self, tmp_path):
        """Each adds its own noise to the same answer: it was charged once, and the second run's
        schedule began late."""
        folder = make_node(tmp_path / "node", population=4)
        edit(folder, 'trust = ["local"]', 'trust = ["central"]')
        text = plan(trust="central", sampling=CYCLE, noise=BANDED, rounds=10).to_json()
        with served(folder):
            for run in ("one", "other", "other"):
                assert self.asked(folder, text, round=1, run=run) is True
            assert [(row.run, row.round) for row in rows(folder)] == [("one", 1), ("other", 1)]
            assert self.asked(folder, text, round=2, run="other")[0] == "separation"

    @pytest.mark.parametrize(
        "noise",
        [correlation.get("banded", 10, bands=5), correlation.get("blt", 10, min_separation=4)],
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
            plan(
                trust="central", sampling=CYCLE, noise=correlation.get("blt", 10, min_separation=4)
            ).to_json()
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
        mechanisms.get("snr-consistent")
        .plan(layers, plan().facts, Transcript.start(layers.flatten(module)))
        .to_json()
    )
    body = frames.npy(layers.flatten(module).numpy())
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


def test_data_that_fit_no_model_are_named_before_anything_is_served(tmp_path):
    folder = make_node(tmp_path / "node")
    edit(folder, "classes = 3", f"classes = {10**20}")
    with pytest.raises(ConfigError, match=r"data\.classes of the policy"):
        Service(folder)


def test_admission_checks_a_question_and_builds_nothing(tmp_path, monkeypatch):
    folder = make_node(tmp_path / "node")
    monkeypatch.setattr(Workshop, "job", lambda *_: pytest.fail("a work was built"))

    def admit(**values: Any) -> Any:
        header = nodes.asked(folder, **values).header(None)
        return service.admit(Ask.model_validate(header), nodes.BODY)

    with contextlib.closing(Service(folder)) as service:
        question, model = admit(plan="not a plan")  # which needs the model's layers
        assert question.plan == "not a plan"
        np.testing.assert_array_equal(model, nodes.MODEL.numpy())
        for code, values in {
            "client": {"client": 1},
            "malformed": {"round": 0},
        }.items():
            with pytest.raises(Refusal) as refusal:
                admit(**values)
            assert refusal.value.code == code
        assert rows(folder) == []


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


def test_a_service_that_is_asked_while_it_works_says_so_or_waits(node):
    results: list[Any] = []
    threads = [
        threading.Thread(target=lambda r=r: results.append(ask(node, round=r)[0]))
        for r in range(1, 6)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(result["ok"] for result in results)
    assert sorted(result["seq"] for result in results) == [1, 2, 3, 4, 5]
