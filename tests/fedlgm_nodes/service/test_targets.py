"""Targets that a task's options do not take: an answer never depends on one example without
noise."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from clients.source import ClientData
from fedlgm.errors import DataError
from fedlgm.training.tasks.classification import Classification
from fedlgm_nodes.service import data as node_data
from fedlgm_nodes.service.folder import NodeFolder
from fedlgm_nodes.service.release import Releaser
from fedlgm_nodes.service.units import SingleExamples
from fedlgm_nodes.service.work import Work
from tests.fedlgm_nodes.service import test_example_level as example_level
from tests.support import nodes
from tests.support.nodes import ask, edit, make_node, rows, served

TASK = "tests.fedlgm_nodes.service.test_targets:UpTo"


class UpTo(Classification):
    """A task of an operator's own, with an option that a server chooses."""

    def __init__(self, most: int = 9) -> None:
        super().__init__()
        self.most = most

    def targets(self, y: np.ndarray, part: str) -> np.ndarray:
        if (y > self.most).any():
            raise DataError(f"a label is larger than {self.most}")
        return super().targets(y, part)


def made(path: Path, unit: str) -> NodeFolder:
    folder = make_node(path, unit=unit)
    edit(folder, 'tasks = ["classification"', f'tasks = ["{TASK}", "classification"')
    return folder


@pytest.mark.parametrize("unit", ["client", "example"])
def test_they_do_not_show(tmp_path, unit):
    """An error in place of an answer would say without noise that a label is larger than 1."""
    text, work = {
        "client": (nodes.plan().to_json(), nodes.WORK),
        "example": (example_level.plan().to_json(), example_level.WORK),
    }[unit]
    with served(made(tmp_path / "node", unit)) as folder:
        said, body = ask(folder, text=text, work=work | {"task": {"name": TASK, "most": 1}})
        assert said["ok"], said
        assert nodes.numbers(body).std() > 0
        assert len(rows(folder)) == 1
        assert "a label is larger than 1" in folder.path.with_name("node.log").read_text()


def test_the_other_examples_count(tmp_path):
    """The result is a sum over examples also here: the data are those of a node without such
    examples."""
    folder = made(tmp_path / "node", "example")
    section = folder.policy().data
    data = node_data.read(section, folder.path)
    for most in (9, 1, 0):
        found = SingleExamples().examples(
            data, partial(node_data.targets, section, task=UpTo(most))
        )
        fit = data.y <= most
        assert torch.equal(found.x, data.x[fit])
        assert torch.equal(found.y, data.y[fit])


def test_an_example_whose_target_does_not_fit_those_of_others_is_left_out():
    """By the target of a public zero, so that which examples count depends on no other example."""

    def targets(y):
        if len(y) > 1:
            raise ValueError("several")
        return y[:, None].expand(-1, 2) if y > 1 else y.double() if y > 0 else y

    data = ClientData(torch.arange(5)[:, None], torch.tensor([2, 0, 1, 0, 2]))
    found = SingleExamples().examples(data, targets)
    assert (found.x.flatten().tolist(), found.y.tolist()) == ([1, 3], [0, 0])


def test_targets_are_made_alone_from_the_first_call_on():
    """A task that sees all examples at first could keep something of them for its losses."""
    asked = []

    def targets(y):
        asked.append(len(y))
        return y

    data = ClientData(torch.arange(5)[:, None], torch.tensor([2, 0, 1, 0, 2]))
    found = SingleExamples().examples(data, targets, apart=True)
    assert (found.y.tolist(), set(asked)) == ([2, 0, 1, 0, 2], {1})


@pytest.mark.parametrize("trust", ["local", "central"])
def test_a_plan_for_users_is_refused_before_it_is_charged(tmp_path, trust):
    raw = json.loads(nodes.plan(trust=trust).to_json())
    raw["facts"]["sampling"]["of"] = "user"
    with served(make_node(tmp_path / "node", trust=["local", "central"])) as folder:
        said, _ = ask(folder, text=json.dumps(raw))
        assert said["code"] == "plan"
        assert "a plan for users" in said["why"]
        assert rows(folder) == []


class Centred(Classification):
    """A task of an operator's own that makes labels of all of the node's."""

    def targets(self, y: np.ndarray, part: str) -> np.ndarray:
        return super().targets((y - y.min()) % 2, part)


class Keeping(Classification):
    """A task of an operator's own that makes labels by means of the first."""

    first: int | None = None

    def targets(self, y: np.ndarray, part: str) -> np.ndarray:
        if part == "node's" and self.first is None and y.any():
            self.first = int(y[0])
        return super().targets(y if self.first is None else (y - self.first) % 2, part)


@pytest.mark.parametrize("task", [Centred, Keeping])
def test_a_target_is_made_without_those_of_other_examples(tmp_path, monkeypatch, task):
    """One example with the label 1 would otherwise change the labels of all others."""
    folder = made(tmp_path / "node", "example")
    name = f"tests.fedlgm_nodes.service.test_targets:{task.__name__}"
    edit(folder, f'tasks = ["{TASK}"', f'tasks = ["{name}"')
    trained = []
    original = SingleExamples.examples

    def seen(self, *given, **options):
        trained.append(original(self, *given, **options))
        return trained[-1]

    monkeypatch.setattr(SingleExamples, "examples", seen)
    policy = folder.policy()
    data = node_data.read(policy.data, folder.path)
    releaser = Releaser(policy, data, node_data.digest(data), bytes(32))
    work = Work.parse(example_level.WORK | {"task": {"name": name}}, policy)
    request = releaser.understand(1, example_level.plan().to_json(), work)
    releaser.make(request, "a" * 64)
    assert len(trained[0]) == len(data)
    assert not trained[0].y.any()  # each label minus itself
