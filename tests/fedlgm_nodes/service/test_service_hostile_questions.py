"""Hostile plans, models and work are refused by a node's service and cost nothing."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedlgm import mechanisms
from fedlgm.mechanisms.method import Method
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.transcript import Transcript
from fedlgm.training import models
from fedlgm_nodes.protocol import frames
from fedlgm_nodes.protocol import messages as protocol
from fedlgm_nodes.protocol.messages import Question
from fedlgm_nodes.service.folder import NodeFolder
from tests.support import nodes
from tests.support.hostile_questions import MODELS, PLANS, WORKS
from tests.support.nodes import BODY, MODEL, ask, edit, make_node, numbers, plan, rows, served
from tests.support.patience import LIMIT_S


@pytest.mark.parametrize("case", PLANS)
def test_hostile_plans_are_refused_and_cost_nothing(lasting, case):
    header, body = ask(lasting, text=PLANS[case])
    assert not header["ok"]
    assert header["code"] in ("privacy", "plan", "budget-spent")
    assert body == b""
    assert rows(lasting) == []


@pytest.mark.parametrize("case", MODELS)
def test_hostile_models_are_refused_and_cost_nothing(lasting, case):
    header, _ = ask(lasting, body=MODELS[case])
    assert header["code"] == "model"
    assert rows(lasting) == []


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
    WORK = nodes.WORK | {
        "model": {"name": "tests.fedlgm_nodes.service.test_service_hostile_questions:fussy"}
    }

    def made(self, path: Path) -> NodeFolder:
        folder = make_node(path)
        edit(
            folder,
            'models = ["logistic"',
            'models = ["tests.fedlgm_nodes.service.test_service_hostile_questions:fussy", '
            '"logistic"',
        )
        return folder

    def test_on_any_data_is_refused_and_costs_nothing(self, tmp_path):
        with served(self.made(tmp_path / "node")) as folder:
            never = self.WORK | {"model": {**self.WORK["model"], "least": -1.0}}
            header, _ = ask(folder, work=never)
            assert header["code"] == "work"
            assert "training fails on any data: an input is larger than -1.0" in header["why"]
            assert rows(folder) == []

    def test_on_this_nodes_data_does_not_show(self, tmp_path):
        """Whether it fails depends on the data: an error in place of an answer would be an answer
        without noise."""
        with served(self.made(tmp_path / "node")) as folder:
            header, body = ask(folder, work=self.WORK)
            assert header["ok"]
            assert numbers(body).std() > 0
            assert (
                "training on this node's data failed"
                in folder.path.with_name("node.log").read_text()
            )
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
    header, _ = frames.exchange(
        str(lasting.socket),
        Question("run", 1, 0, plan().to_json(), protocol.sha256(BODY), nodes.WORK, "00").header()
        | more,
        BODY,
        timeout=LIMIT_S,
    )
    assert header["code"] == code
    assert rows(lasting) == []


def test_a_crafted_model_is_bounded_and_noised_like_any_other(node):
    header, body = ask(node, body=frames.npy(np.full(len(MODEL), 1e30, np.float32)))
    assert header["ok"]
    values = numbers(body)
    assert np.isfinite(values).all()
    assert (
        np.linalg.norm(values)
        < np.linalg.norm(plan().clip) + 6 * np.sqrt(len(values)) * plan().sigma.max()
    )


@pytest.mark.parametrize(
    "fills", [(51,), (1,) * 51, (3, 48), (48, 3)], ids=["one", "single numbers", "others", "own"]
)
def test_parts_that_a_plan_levels_are_those_of_the_work(node, fills):
    """A plan of a million parts would take minutes and gigabytes, after it was charged."""
    layers = LayerTable.from_module(
        models.build("logistic", in_shape=nodes.SHAPE, classes=nodes.CLASSES), "tensor"
    )
    own = Method(mechanisms.get("water-filling"), layers.as_single_layer(), plan().facts).plan(
        Transcript.start(nodes.MODEL)
    )
    work = nodes.WORK | {"mechanism": {"name": "water-filling"}, "group_by": "tensor"}
    assert own.fills == (48, 3)
    header, _ = ask(node, text=replace(own, fills=fills).to_json(), work=work)
    assert header["ok"] is (fills == own.fills)
    assert header.get("code") == (None if header["ok"] else "plan")
    assert len(rows(node)) == header["ok"]


@pytest.mark.slow
def test_a_thousand_hostile_questions_are_refused_and_cost_nothing(tmp_path):
    """Of a server that is hostile itself, of strangers, and of those who have recorded a question."""
    order, server = random.Random(0), Ed25519PrivateKey.generate()
    stranger = Ed25519PrivateKey.generate()
    folder = make_node(tmp_path / "node", server_key=protocol.public_text(server))
    with served(folder):
        answered = nodes.asked(folder).header(server)
        assert frames.exchange(str(folder.socket), answered, BODY, timeout=LIMIT_S)[0]["ok"]
        for number in range(1, 1001):
            kind, body = order.choice(["plan", "model", "work", "signer", "replayed"]), BODY
            asked: dict[str, Any] = {"round": number, "nonce": f"{number:04x}"}
            if kind == "plan":
                asked["plan"] = order.choice([*PLANS.values()])
            elif kind == "model":
                body = order.choice([*MODELS.values()])
                asked["model"] = protocol.sha256(body)
            elif kind == "work":
                asked["work"] = nodes.WORK | order.choice([*WORKS.values()])
            key = order.choice([None, stranger]) if kind == "signer" else server
            header = nodes.asked(folder, **asked).header(key)
            if kind == "replayed":
                part = order.choice(["run", "nonce", "plan", "signature"])
                other = {"run": "other", "nonce": "ff", "plan": plan(5.0).to_json()}
                header = answered | {part: other.get(part, "0" * 128)}
            said, numbers_ = frames.exchange(str(folder.socket), header, body, timeout=LIMIT_S)
            assert not said["ok"], (kind, asked)
            assert bytes(numbers_) == b""
    assert len(rows(folder)) == 1
