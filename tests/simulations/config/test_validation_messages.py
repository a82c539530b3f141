"""What a user reads who has one value wrong: what, where, what would be right, each said once."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest

from fedlgm import mechanisms
from fedlgm.errors import ConfigError, FedlgmError
from fedlgm.training import models, tasks
from fedlgm.wording import prefix_message
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly
from simulations.config.recipe import Recipe
from simulations.config.validation_messages import section_kind

SAID = {
    "mechanism.name=typo": "mechanism.name: unknown mechanism 'typo'; known: uniform",
    "mechanism.name=snr-consistnt": "mechanism.name: unknown mechanism 'snr-consistnt'; did you "
    "mean 'snr-consistent'?",
    "mechanism.name=a.b:c": "mechanism 'a.b:c': module 'a.b' cannot be imported: there is no "
    "module 'a'",
    "mechanism.bound=0": "mechanism.bound must be finite and positive, got 0",
    "mechanism.bound=x": "mechanism.bound must be a number, got 'x'",
    "mechanism.clip=typo": "mechanism.clip: unknown clip 'typo'; known: eq, med",
    "mechanism.variant=published": "mechanism 'snr-consistent': only clip = 'med' has a published "
    "variant",
    "mechanism.typo=1": "mechanism 'snr-consistent' has no option 'typo'; known: bound",
    "model.name=typo": "model.name: unknown model 'typo'; known: logistic",
    "model.hidden=0": "model.hidden must be a list of integers >= 1 (one per hidden layer), got 0",
    "model.activation=typo": "model.activation: unknown activation 'typo'; known: tanh",
    "model.width=3": "model 'mlp': unknown option 'width'; its options: hidden, activation",
    "task.name=typo": "task.name: unknown task 'typo'; known: classification",
    "task.weird=1": "task 'classification': unknown option 'weird'; its options: none",
    "data.name=typo": "data.name: unknown data set 'typo'; known: digits",
    "data.name=a.b:c": "data 'a.b:c': module 'a.b' cannot be imported",
    "data.image_size=28": "data.image_size is for data.name = 'image-folder' or 'hf:owner/name', "
    "not for 'digits'",
    "data.partition=typo": "data.partition: unknown partition scheme 'typo'; known: iid",
    "data.partition=a.b:c": "data.partition 'a.b:c': module 'a.b' cannot be imported",
    "data.alpha=-1": "data.alpha must be finite and positive, got -1",
    "data.beta=1": "data.partition 'dirichlet': unknown option 'beta'; its options: alpha",
    "data.partition_seed=-1": "data.partition_seed: must be at least 0, got -1",
    "data.pixels=[1]": "data.pixels: must be two numbers, the lower one first, such as [0, 1], got "
    "[1]",
    "data.pixels=3": "data.pixels: must be two numbers, the lower one first, such as [0, 1], got 3",
    "data.channels=2": "data.channels: must be 1 or 3, got 2",
    "federation.server_optimizer=a.b:c": "federation.server_optimizer 'a.b:c': module 'a.b' cannot "
    "be imported",
    "federation.clients=x": "federation.clients: must be a whole number, got 'x'",
    "federation.clients=1.5": "federation.clients: must be a whole number, got 1.5",
    "federation.rate=x": "federation.rate: must be a number, got 'x'",
    "federation.rate=2": "federation.rate: must be at most 1, got 2",
    "federation.dropout=1": "federation.dropout: must be below 1, got 1",
    "training.compile=x": "training.compile: must be true, false or 'auto', got 'x'",
    "training.exact_sums=x": "training.exact_sums: must be true or false, got 'x'",
    "training.vectorize=true": "training.vectorize: must be 'off', 'on' or 'auto', got True",
    "privacy.epsilon=0": "privacy.epsilon: must be above 0, got 0",
    "privacy.epsilon=inf": "privacy.epsilon: must be finite, got inf",
    "run.trackers=x": "run.trackers: must be a list, got 'x'",
    "run.engine=local": "run.engine: is not a key of a recipe: use --engine NAME, or "
    "simulate(engine=NAME)",
    "training.trainer=a:b": "training.trainer: unknown key; did you mean 'trainer.name'?",
    "privacy.clients=3": "privacy.clients: unknown key; did you mean 'federation.clients'?",
    "training.steps=3": "training.steps is for privacy.unit = 'example': set it, or leave "
    "training.steps out",
    "risk.epoch=1": "risk.epoch: unknown key; did you mean 'epochs'",
    "deployment.typo=1": "deployment.typo: unknown key; known: offline_seconds, give_up_seconds",
    "data=3": "data: must be a section of keys, such as [data], got 3",
    "name=3": "name: must be text, got 3",
    "extends=fashion-mnist": "extends belongs in a recipe's file: name the other recipe directly, "
    "or write a file",
}


def message(*changes: str) -> str:
    """What is said when a recipe with these changes is checked as a run checks it, before any
    training."""
    with pytest.raises(FedlgmError) as error:
        Assembly(recipes.load("digits", changes)).check()
    return str(error.value)


@pytest.mark.parametrize("change", SAID)
def test_one_wrong_value(change):
    assert message(change).startswith(SAID[change])
    assert "\n" not in message(change)


BAD: tuple[Any, ...] = ("typo", -1, 0, [], {"a": 1}, True, 10**400)


def _problems() -> dict[str, str]:
    """Every key of every section, and every option of what the sections name, with values of each
    type."""
    raw = recipes.read("digits")
    keys: list[tuple[dict[str, dict[str, Any]], str, str]] = []
    for section, field in Recipe.model_fields.items():
        kind = section_kind(field)
        keys += [({}, section, key) for key in (kind.model_fields if kind else ())]
    for name in mechanisms.names(None):
        keys += [
            ({"mechanism": {"name": name}}, "mechanism", option)
            for option in mechanisms.options(name)
        ]
    for name in sorted(
        {*models.names()} - {"resnet152", "vgg16"}
    ):  # large ones, with the options of others
        keys += [({"model": {"name": name}}, "model", option) for option in models.options(name)]
    for name in ("regression", "classification"):
        keys += [({"task": {"name": name}}, "task", option) for option in tasks.options(name)]
    said = {}
    for named, section, key in keys:
        for value in BAD:
            values = {**raw, **named}
            unit = (
                {"unit": mechanisms.unit_of(named["mechanism"]["name"])}
                if "mechanism" in named
                else {}
            )
            values["privacy"] = values["privacy"] | unit
            values[section] = {**values.get(section, {}), key: value}
            try:
                assembly = Assembly(recipes.Recipe.model_validate(values))
                if section == "model":
                    assembly.model.module()
            except ConfigError as error:
                said[f"{named} {section}.{key}={value!r}"[:150]] = str(error)
            except FedlgmError:
                pass
    return said


def test_no_message_names_a_place_twice_or_speaks_the_checkers_language():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        said = _problems()
    assert len(said) > 500
    sections = "|".join(rf"{name}\b" for name in Recipe.model_fields)
    twice = re.compile(r"\b([\w-]+):? \1\b", re.IGNORECASE)
    for case, text in said.items():
        assert not twice.search(text), (case, text)
        assert "Input should" not in text, (case, text)
        assert "TypeError" not in text, (case, text)
        assert "unhashable" not in text, (case, text)
        assert re.match(sections, text), (case, text)
        assert len(text) < 900, (case, text)


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("mechanism", "bound must be positive", "mechanism.bound must be positive"),
        ("mechanism", "uniform: bound must be positive", "mechanism.bound must be positive"),
        ("mechanism", "uniform: something else", "mechanism 'uniform': something else"),
        ("mechanism", "mechanism.bound is wrong", "mechanism.bound is wrong"),
        ("mechanism", "no such thing", "mechanism: no such thing"),
    ],
)
def test_where_a_message_is_from_is_put_before_it_once(path, text, expected):
    assert prefix_message(path, text, owner="uniform", keys=["bound"]) == expected


@pytest.mark.parametrize("make", [Recipe.model_validate, lambda raw: Recipe(**raw)])
def test_a_recipe_from_values_is_refused_in_the_words_of_a_recipe_from_a_file(make):
    raw = recipes.read("digits")
    for changes in (
        {"federation.rounds": 0},
        {"privacy.epsilom": 4},
        {"federation.cohort": 999},
        {"mechanism.bound": 0},
    ):
        wrong = recipes.read("digits")
        recipes.override(wrong, changes)
        with pytest.raises(ConfigError) as expected:
            recipes.load("digits", changes)
        with pytest.raises(ConfigError) as found:
            make(wrong)
        assert str(found.value) == str(expected.value)
    assert make(raw) == recipes.load("digits")


@pytest.mark.parametrize("values", ["digits", [1], {1: 2}, None])
def test_values_that_are_no_mapping_of_sections_are_refused(values):
    with pytest.raises(ConfigError, match="a recipe's values must be a mapping of its sections"):
        Recipe.model_validate(values)
