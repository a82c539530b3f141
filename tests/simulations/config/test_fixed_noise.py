"""`privacy.noise_multiplier` in place of `privacy.epsilon`: everything downstream sees the epsilon
that follows."""

from __future__ import annotations

import numpy as np
import pytest

import simulations
from fedlgm.errors import ConfigError
from fedlgm_lab.attacks.runs.inversion import protections
from fedlgm_lab.studies.jobs import grid_jobs, jobs
from simulations import launch
from simulations.arguments import resolve
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
        ("example-level-federation", ["privacy.accountant=rdp"]),
        ("dp-sgd-digits", ["privacy.accountant=rdp"]),
        (
            "dp-sgd-digits",
            [
                "data.name=digits/private",
                "federation.clients=3",
                "federation.rate=1",
                "privacy.accountant=rdp",
            ],
        ),
    ],
)
def test_the_noise_is_the_given_one(name, more, tmp_path):
    more = [*more, "federation.rounds=10"]
    recipe = load(name, [*NOISE, *more])
    assert Assembly(recipe).privacy.method.facts.noise_multiplier == pytest.approx(2.0, rel=1e-5)
    (tmp_path / "again.toml").write_text(recipe.to_toml(), encoding="utf-8")
    assert load(tmp_path / "again.toml") == recipe
    budget = load(name, [*more, f"privacy.epsilon={recipe.privacy.epsilon!r}"])
    assert Assembly(budget).privacy.method.facts.noise_multiplier == pytest.approx(2.0, rel=1e-5)


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
            ["privacy.epsilon=8", "privacy.noise_multiplier=2"],
            r"both given, but this noise gives epsilon .* privacy.epsilon=none",
        ),
        (
            "digits",
            [NOISE[0], "privacy.noise_multiplier=0"],
            "privacy.noise_multiplier: must be above 0, got 0",
        ),
        (
            "digits",
            [NOISE[0], "privacy.noise_multiplier=1e9"],
            r"privacy.noise_multiplier = 1e\+09 gives epsilon 0, .* lower it",
        ),
        (
            "digits",
            [NOISE[0], "privacy.noise_multiplier=0.03"],
            r"privacy.noise_multiplier = 0.03 is below 0.05, .* raise it",
        ),
        (
            "dp-sgd-digits",
            [*NOISE, "data.partition=dirichlet"],
            "training examples is not known .* give privacy.epsilon",
        ),
    ],
)
def test_what_does_not_fit_is_refused(name, changes, words):
    with pytest.raises(ConfigError, match=words):
        load(name, changes)


def test_the_examples_of_own_data_are_not_known_from_the_recipe():
    x = np.random.default_rng(0).normal(size=(400, 64)).astype(np.float32)
    y = np.arange(400) % 10
    with pytest.raises(
        ConfigError, match=r"training examples is not known .* give privacy.epsilon"
    ):
        simulations.simulate(
            "dp-sgd-digits", data={"train": (x, y), "test": (x, y)}, overrides=NOISE
        )


def test_budget_and_noise_replace_each_other():
    noisy = load("digits", ["privacy.noise_multiplier=2.0"])
    assert noisy == load("digits", NOISE)
    again = resolve(noisy, {}, ["privacy.epsilon=8"])[0]
    assert again.privacy == load("digits").privacy


def test_a_recipe_that_extends_another_replaces_or_removes_one_of_them(tmp_path):
    (tmp_path / "noise.toml").write_text(
        'extends = "digits"\n[privacy]\nnoise_multiplier = 2.0\n', encoding="utf-8"
    )
    base = f'extends = "{tmp_path}/noise.toml"\n[privacy]\n'
    (tmp_path / "budget.toml").write_text(f"{base}epsilon = 3.0\n", encoding="utf-8")
    (tmp_path / "same.toml").write_text(f'{base}epsilon = "none"\n', encoding="utf-8")
    noisy = load(tmp_path / "noise.toml")
    assert noisy.privacy.noise_multiplier == 2.0
    budget = load(tmp_path / "budget.toml").privacy
    assert (budget.epsilon, budget.noise_multiplier) == (3.0, None)
    assert load(tmp_path / "same.toml").privacy == noisy.privacy


def test_a_changed_recipe_keeps_its_noise():
    noisy = load("digits", NOISE)
    longer = resolve(noisy, {}, {"federation.rounds": 200})[0]
    assert longer.privacy.noise_multiplier == 2.0
    assert longer.privacy.epsilon > noisy.privacy.epsilon


def test_a_mechanism_without_noise_ignores_it():
    assert (
        Assembly(
            load("digits", [*NOISE, "mechanism.name=none"])
        ).privacy.method.facts.noise_multiplier
        == 0
    )


def test_studies_vary_it_or_keep_it():
    base, noise = load("digits", NOISE), "privacy.noise_multiplier"
    varied = grid_jobs(load("digits"), {"mechanism": ["gaussian", "none"], noise: [1.0, 2.0]}, [0])
    assert [job.refused for job in varied] == [""] * 3  # a method without privacy has one run
    assert [job.recipe.privacy.noise_multiplier for job in varied[:2]] == [1.0, 2.0]
    longer = grid_jobs(base, {"federation.rounds": [50, 100]}, [0])
    assert [job.refused for job in longer] == ["", ""]
    assert (
        longer[0].recipe.privacy.epsilon < longer[1].recipe.privacy.epsilon == base.privacy.epsilon
    )
    budgets = grid_jobs(base, {"privacy.epsilon": [1.0, 4.0]}, [0])
    assert [(job.refused, job.recipe.privacy.noise_multiplier) for job in budgets] == [
        ("", None)
    ] * 2


def test_comparisons_and_searches_take_it(tmp_path):
    planned = jobs("digits", None, 1, [*NOISE, "federation.rounds=3"])
    for job in planned:
        Assembly(job.recipe, job.own).check()
    found = simulations.tune(
        "digits",
        search={"federation.server_lr": [0.1, 0.2]},
        expected_runs=1.5,
        overrides=[*NOISE, "federation.rounds=2"],
        folder=tmp_path / "search",
    )
    assert found["epsilon_one_run"] == pytest.approx(
        load("digits", [*NOISE, "federation.rounds=2"]).privacy.epsilon
    )


def test_attacks_vary_the_budget():
    noisy = load("digits", NOISE)
    _, protected = protections(noisy, [1.0])
    assert protected.recipe is not None
    assert (protected.recipe.privacy.epsilon, protected.recipe.privacy.noise_multiplier) == (
        1.0,
        None,
    )


def test_a_mechanism_with_other_levels_is_refused():
    recipe = load("digits", [*NOISE, "mechanism.name=laplace-iid", "federation.rounds=2"])
    with pytest.raises(ConfigError, match=r"noise_multiplier = 2: .* give privacy.epsilon instead"):
        _ = Assembly(recipe).privacy.method
