"""The statement of a run: its fields follow from recipe and ledger, under every trust and unit."""

from __future__ import annotations

import json
from typing import get_args

import pytest
from federations import tiny_values

import simulations
from fedlgm.errors import ConfigError
from fedlgm.privacy import Ledger
from fedlgm.privacy.guarantee import ACCOUNTING, Accountant
from simulations import launch
from simulations.config import recipe as recipes
from simulations.runs.folder import RunFolder


def finish(folder, **sections) -> RunFolder:
    values = tiny_values()
    for name, keys in sections.items():
        values[name] = values.get(name, {}) | keys
    launch.simulate(recipes.Recipe.model_validate(values), run_dir=folder, trackers=[])
    return RunFolder.open(folder)


def test_the_fields_are_those_of_recipe_and_ledger(tmp_path):
    run = finish(tmp_path / "run", statement={"purpose": "a test", "searched": "none"})
    result, recipe = run.verified_result(), run.recipe()
    told = result["statement"]
    with Ledger(run.ledger_file) as ledger:
        assert told["epsilon"] == ledger.epsilon(recipe.privacy.delta, recipe.privacy.accountant)
    assert told["schema"] == 1
    assert (told["purpose"], told["searched"]) == ("a test", "none")
    assert "responsible" not in told
    assert told["population"] == recipe.federation.clients
    assert told["rounds_done"] == told["rounds_planned"] == recipe.federation.rounds
    assert sum(release["count"] for release in told["releases"]) == recipe.federation.rounds
    assert told["earlier_releases"] == 0
    for name in ("unit", "delta", "guarantee", "attack", "attack_rates", "claimed_epsilon"):
        assert told[name] == result[name], name
    assert told["groups"]["2"]["advantage"] > told["attack_rates"]["advantage"]


def test_an_edited_statement_has_no_effect(tmp_path):
    run = finish(tmp_path / "run")
    true = run.verified_result()["statement"]
    edited = json.loads(run.result_file.read_text())
    edited["statement"] |= {"epsilon": 0.1, "trust": "local", "searched": "none"}
    run.result_file.write_text(json.dumps(edited))
    assert run.verified_result()["statement"] == true


def test_a_run_of_an_earlier_version_gets_a_statement(tmp_path):
    run = finish(tmp_path / "run")
    result = json.loads(run.result_file.read_text())
    for name in ("statement", "attack", "attack_rates"):
        del result[name]
    run.result_file.write_text(json.dumps(result))
    assert run.verified_result()["statement"]["schema"] == 1


def test_local_trust_names_who_adds_the_noise_and_what_the_server_sees(tmp_path):
    told = finish(tmp_path / "run", privacy={"trust": "local", "max_participations": 3})
    statement = told.verified_result()["statement"]
    assert statement["noise_added_by"] == "each client adds its own noise"
    assert statement["released"].startswith("every client's noisy update")
    assert statement["max_participations"] == 3


def test_a_run_without_privacy_says_so(tmp_path):
    run = finish(tmp_path / "run", mechanism={"clip": "med", "variant": "published"})
    told = run.verified_result()["statement"]
    assert told["guarantee_status"] == "none"
    assert told["guarantee"].startswith("NOT PRIVATE")
    assert told["epsilon"] == float("inf")
    assert told["attack_rates"]["tpr"]["0.001"] == 1


def test_a_line_is_a_line():
    with pytest.raises(ConfigError, match=r"statement\.purpose: must be one line of text"):
        recipes.load("digits", {"statement.purpose": "two\nlines"})
    with pytest.raises(ConfigError, match="statement"):
        recipes.load("digits", ["statement.owner='somebody'"])


def test_a_result_has_its_statement(tmp_path):
    result = simulations.simulate(overrides=["federation.rounds=1"], run_dir=tmp_path / "run")
    assert result.statement() == result["statement"]


def test_every_accountant_has_its_line() -> None:
    assert set(ACCOUNTING) == set(get_args(Accountant))
