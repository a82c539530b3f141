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
    ],
)
def test_wrong_keys_and_values_do_not(values):
    checker = jsonschema.Draft202012Validator(recipe_schema())
    assert list(checker.iter_errors(values))


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
