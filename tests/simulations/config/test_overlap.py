"""A simulation whose epsilon is that of a person with data at several clients."""

from __future__ import annotations

import pytest

import simulations
from fedlgm.errors import ConfigError, PrivacyError
from simulations.config import recipe as recipes
from simulations.config.facts import facts_of
from simulations.runs.folder import RunFolder

SHORT = {"federation.rounds": 2, "federation.clients": 20, "federation.cohort": 5, "run.seed": 3}
PEOPLE = SHORT | {"privacy.relation": "replace-one", "privacy.accountant": "rdp"}


def test_a_run_for_people_keeps_its_budget_and_its_condition(tmp_path):
    one, joint = (
        simulations.simulate(
            "digits", overrides=PEOPLE | {"federation.overlap": overlap}, run_dir=tmp_path / name
        )
        for overlap, name in ((1, "one"), (2, "joint"))
    )
    assert 7.9 < joint.epsilon <= 8.0
    assert joint["noise_multiplier"] > 2 * one["noise_multiplier"]
    condition = "nobody having data at more than 2 clients"
    assert condition in joint.guarantee
    assert joint["attack"].endswith("of the people")
    assert recipes.load("digits").units == "clients"
    assert condition not in one.guarantee
    found = RunFolder.open(joint.folder).verified_result()
    assert condition in found["guarantee"]
    assert found["statement"]["guarantee_status"] == "conditional"
    recipe = tmp_path / "joint" / "recipe.toml"
    assert "overlap = 2" in recipe.read_text()


def test_whole_clients_that_come_or_go_are_not_people(tmp_path):
    with pytest.raises(PrivacyError, match=r"overlap above 1: .*relation 'replace-one'"):
        simulations.simulate(
            "digits", overrides=SHORT | {"federation.overlap": 2}, run_dir=tmp_path / "r"
        )
    assert not (tmp_path / "r").exists()


def test_examples_of_a_person_are_one_at_each_client():
    recipe = recipes.load("dp-sgd-digits", ["federation.overlap=3"])
    facts = facts_of(recipe, 1442)
    rate = facts.sampling.rate
    assert facts.accounted_rate == pytest.approx(1 - (1 - rate) ** 3)
    assert facts.moved == 3.0
    assert "more than one example at a client" in facts.assumes


@pytest.mark.parametrize(
    "values",
    [
        ["privacy.unit=user", "federation.users=10", "federation.cohort=5"],
        ["federation.sampling=cyclic", "federation.rate=0.1", "federation.cohort=none"],
    ],
)
def test_what_is_not_proven_is_refused(values):
    with pytest.raises(ConfigError, match="overlap above 1"):
        facts_of(recipes.load("digits", ["federation.overlap=2", *values]))
