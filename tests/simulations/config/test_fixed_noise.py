"""`privacy.noise_multiplier` in place of `privacy.epsilon`: everything downstream sees the epsilon that follows."""

from __future__ import annotations

import pytest

from fedlgm.errors import ConfigError
from simulations import launch
from simulations.config.assembly import Assembly
from simulations.config.recipe import load
from simulations.summaries.planning import plan_report

NOISE = ["privacy.epsilon=none", "privacy.noise_multiplier=2.0"]


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("digits", []),
        ("digits", ["mechanism.name=gaussian", "privacy.accountant=rdp"]),
        ("digits", ["federation.sampling=fixed"]),
        ("digits", ["privacy.trust=local", "privacy.max_participations=3"]),
        ("correlated-digits", []),
        ("example-level-federation", []),
    ],
)
def test_the_noise_is_the_given_one(name, more, tmp_path):
    recipe = load(name, [*NOISE, *more])
    assert Assembly(recipe).method.facts.noise_multiplier == pytest.approx(2.0, rel=1e-5)
    (tmp_path / "again.toml").write_text(recipe.to_toml(), encoding="utf-8")
    assert load(tmp_path / "again.toml") == recipe
    budget = load(name, [*more, f"privacy.epsilon={recipe.privacy.epsilon!r}"])
    assert Assembly(budget).method.facts.noise_multiplier == pytest.approx(2.0, rel=1e-5)


def test_a_run_and_a_plan_state_the_epsilon_that_follows(tmp_path):
    recipe = load("digits", [*NOISE, "federation.clients=20", "federation.rounds=3"])
    result = launch.simulate(recipe, run_dir=tmp_path / "run", engine="local")
    assert result["epsilon"] == pytest.approx(recipe.privacy.epsilon, rel=1e-4)
    assert result["noise_multiplier"] == pytest.approx(2.0, rel=1e-5)
    assert plan_report(recipe)["noise_multiplier"] == pytest.approx(2.0, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        (
            "digits",
            ["privacy.noise_multiplier=2"],
            r"both given, but this noise gives epsilon .* privacy.epsilon=none",
        ),
        ("digits", [NOISE[0], "privacy.noise_multiplier=0"], "privacy: noise_multiplier must be finite and positive"),
        ("dp-sgd-digits", NOISE, "depends on the number of examples, .* give privacy.epsilon"),
    ],
)
def test_what_does_not_fit_is_refused(name, changes, words):
    with pytest.raises(ConfigError, match=words):
        load(name, changes)


def test_a_mechanism_with_other_levels_is_refused():
    recipe = load("digits", [*NOISE, "mechanism.name=laplace-iid"])
    with pytest.raises(ConfigError, match=r"noise_multiplier = 2: .* give privacy.epsilon instead"):
        _ = Assembly(recipe).method
