"""The comparison of adapters with full fine-tuning: its runs are recipes, and its page shows what was kept."""

from __future__ import annotations

from benchmarks import adapters
from benchmarks.kept import Kept
from simulations.config import recipe as recipes


def test_every_method_spends_the_same_budget() -> None:
    made = {method: recipes.load("text-adapters", changes) for method, (changes, _) in adapters.METHODS.items()}
    assert len({(made[name].privacy, made[name].federation.rounds, made[name].sampling) for name in made}) == 1
    assert {name for name, recipe in made.items() if recipe.model.weights is None} == {"everything, random start"}
    assert {name for name, recipe in made.items() if recipe.federation.server_lr != 0.01} == {"everything, public base"}


def test_the_page_has_the_kept_figures() -> None:
    kept = Kept(adapters.KEPT)
    assert len({row["base"] for row in kept.rows}) == 1
    assert adapters.page(kept) in adapters.PAGE.read_text(encoding="utf-8")
