"""The objects of a run: data, model and privacy, each of which is built from the one before."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedlgm import data
from fedlgm.data import DataSet
from fedlgm.errors import ConfigError
from fedlgm.training.fedprox import FedProx
from simulations.arguments import resolve
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly
from simulations.config.own import Own
from simulations.config.run_data import RunData
from simulations.config.run_model import RunModel
from simulations.config.run_privacy import RunPrivacy

FEW = ["federation.clients=20", "federation.rate=0.5", "federation.rounds=2"]


def test_each_object_is_built_from_the_one_before_and_is_enough_alone() -> None:
    recipe = recipes.load("digits", FEW)
    run = Assembly(recipe)
    own_data = RunData(recipe, Own())
    model = RunModel(own_data)
    assert own_data.sizes.tolist() == run.data.sizes.tolist()
    assert torch.equal(model.initial(), run.model.initial())
    assert RunPrivacy(model).first_plan().to_json() == run.privacy.first_plan().to_json()
    assert run.model.data is run.data
    assert run.privacy.model is run.model


def test_given_data_replace_the_recipes_and_are_not_divided_again() -> None:
    x, y = np.zeros((6, 64), np.float32), np.arange(6) % 10
    few = DataSet.from_arrays((x, y), (x, y), classes=10)
    parts = data.partition(np.zeros(6, np.int64), 2, "iid")
    run = Assembly(recipes.load("digits", FEW), divided=(few, parts))
    assert run.data.present
    assert run.data.division == (few, parts)


def test_a_plan_of_shapes_alone_reads_no_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "load", lambda *_, **__: pytest.fail("the data were read"))
    run = Assembly(recipes.load("fashion-mnist"), planned=True)
    assert run.privacy.first_plan().protected
    assert not run.data.present


def test_fingerprints_are_of_users_objects_only() -> None:
    recipe = recipes.load("digits", FEW)
    assert Assembly(recipe).fingerprints() == {}
    recipe, own = resolve("digits", {"model": nn.Linear(64, 10)}, FEW)
    assert "structure of the model" in Assembly(recipe, own).fingerprints()


def test_a_trainer_without_a_form_is_refused_by_the_key_that_asks_for_it() -> None:
    run = Assembly(recipes.load("digits", [*FEW, "trainer.name=fedprox"]))
    assert isinstance(run.model.trainer(), FedProx)
    with pytest.raises(ConfigError, match=r"training\.kernel: .* no native form"):
        run.model.native(torch.device("cpu"))
