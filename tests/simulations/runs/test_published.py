"""Published rules that are not private run as printed, and every report says what they claim and
what is proven."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from simulations import launch
from simulations.config import recipe as recipes
from simulations.summaries import planning


def test_published_medclip_claims_the_budget_and_proves_nothing(tmp_path: Path) -> None:
    recipe = recipes.load(
        "digits",
        [
            "federation.clients=50",
            "federation.rounds=2",
            "privacy.delta=1e-3",
            "privacy.accountant='rdp'",
            "mechanism.clip=med",
            "mechanism.variant=published",
        ],
    )
    result = launch.simulate(recipe, engine="local", run_dir=tmp_path / "run")
    assert math.isinf(result["epsilon"])
    assert result["claimed_epsilon"] == pytest.approx(recipe.privacy.epsilon, rel=1e-3)
    assert result["guarantee"].startswith("NOT PRIVATE")
    assert "MedClip" in result["guarantee"]


@pytest.mark.slow
def test_sampled_replace_one_is_conditional_and_says_on_what() -> None:
    overrides = ["federation.sampling=fixed", "privacy.accountant='rdp'"]
    report = planning.plan_report(recipes.load("digits", overrides))
    assert report["guarantee"].startswith("conditional (client-level, replace-one")
    assert "section Replace-one" in report["guarantee"]
    assert planning.plan_report(recipes.load("digits"))["guarantee"].startswith("proven")
