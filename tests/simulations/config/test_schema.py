"""The JSON schema of recipes accepts every bundled recipe and refuses what recipes refuse."""

from __future__ import annotations

import json
import tomllib

import jsonschema
import pytest

from simulations.config import recipe as recipes
from simulations.config.schema import recipe_schema


def test_every_bundled_recipe_fits():
    checker = jsonschema.Draft202012Validator(recipe_schema())
    for name in recipes.names():
        values = tomllib.loads((recipes.BUNDLED / f"{name}.toml").read_text(encoding="utf-8"))
        assert [error.message for error in checker.iter_errors(values)] == [], name


@pytest.mark.parametrize(
    "values",
    [
        {"privacy": {"epsilon": -1}},
        {"federation": {"round": 3}},
        {"training": {"optimizer": "adagrad"}},
        {"privcy": {}},
        {"mechanism": {"name": "snr-consistent", "bond": 1.0}},
        {"mechanism": {"name": "gaussian", "threshold": 0.5}},  # of another mechanism
        {"extends": "digits", "mechanism": {"bund": 1.0}},
        {"data": {"name": "table", "partition": "natural", "target_": "ill"}},
        {"data": {"name": "digits", "partition": "dirichlet", "alhpa": 0.1}},
        {"extends": "ten-hospitals", "data": {"standardize": "test"}},
        {"model": {"name": "mlp", "hiden": [64]}},
        {"task": {"name": "hazards", "break": [6, 12]}},
        {"trainer": {"name": "fedprox", "nu": 0.1}},
    ],
)
def test_wrong_keys_and_values_do_not(values):
    checker = jsonschema.Draft202012Validator(recipe_schema())
    assert list(checker.iter_errors(values))


@pytest.mark.parametrize(
    "values",
    [
        {"mechanism": {"name": "snr-consistent", "bound": 1.0, "group_by": "tensor"}},
        {"mechanism": {"name": "lm-dp-sgd", "variant": "published", "weights": "table"}},
        {"mechanism": {"name": "my.rules:Own", "tau": 0.5}},
        {"mechanism": {"name": "registered-elsewhere", "tau": 0.5}},
        {"extends": "digits", "mechanism": {"bound": 1.0}},
        {"extends": "mine.toml", "mechanism": {"tau": 1.0}},
        {"extends": "ten-hospitals", "data": {"fill": {"age": 60}}},
        {"data": {"name": "digits", "partition": "dirichlet", "alpha": 0.1}},
        {"data": {"name": "digits", "partition": "ShardPartitioner", "shard_size": 5}},
        {"extends": "digits", "trainer": {"name": "fedprox", "mu": 0.1}},
    ],
)
def test_options_of_the_named_part_and_of_ones_own_parts_do(values):
    checker = jsonschema.Draft202012Validator(recipe_schema())
    assert [error.message for error in checker.iter_errors(values)] == []


def test_the_command_prints_it(run):
    status, out, err = run("schema")
    assert (status, err) == (0, "")
    assert json.loads(out) == json.loads(json.dumps(recipe_schema()))


@pytest.mark.parametrize(
    ("arguments", "kind", "said"),
    [
        (["plan", "digit", "--json"], "ConfigError", "did you mean 'digits'?"),
        (["plan", "--epsilon", "3", "--json"], "UsageError", "--set privacy.epsilon=VALUE"),
        (["ledger", "nowhere", "--json"], "RunError", "nowhere"),
    ],
)
def test_with_json_an_error_is_an_object_on_standard_output(run, arguments, kind, said):
    status, out, err = run(*arguments)
    assert status == 2
    error = json.loads(out)["error"]
    assert (error["kind"], error["status"]) == (kind, 2)
    assert said in error["message"]
    assert err
    assert run(*arguments[:-1])[1] == ""
