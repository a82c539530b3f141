"""Allocations in centralised training: every cell is a valid run, and tables hold the runs at the
rates that won."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedlgm.mechanisms import UsesPrivateNorms
from fedlgm_lab.studies.tables import central_allocations as bench
from fedlgm_lab.studies.tables.runs import cells
from fedlgm_lab.studies.tables.store import Kept
from simulations.config import recipe as recipes

CELLS = cells(Kept(Path("none.json")), bench.NAME, steps=bench.STEPS)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: str(cell.name))
def test_every_cell_is_a_recipe(cell) -> None:
    recipe = recipes.load(cell.recipe, cell.changes | {"training.lr": 2.0})
    mechanism, (rule, clip, _) = recipe.mechanism.build(), cell.name.values()
    assert (recipe.privacy.epsilon, recipe.training.lr, mechanism.bound) == (3.0, 2.0, 0.1)
    assert isinstance(mechanism, UsesPrivateNorms) == (clip == "MedClip, published")
    assert rule == "flat" or mechanism.allocation == rule


def test_tables_hold_the_rates_that_won(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "none.json")
    assert len(bench.results(kept, bench.STEPS).splitlines()) == 2
    private = [cell.name for cell in CELLS if cell.name["clip"] != "MedClip, published"]
    for at, label in enumerate(private):
        for lr in (1.0, 2.0, 4.0, 8.0):
            kept.rows.append(label | {"lr": lr, "seed": 100, "final": 70 - abs(lr - 2)})
        for lr, final in ((2.0, 80.0), (4.0, 10.0)):
            for seed in (1, 2):
                kept.rows.append(label | {"lr": lr, "seed": seed, "final": final + at + seed})
    lines = bench.results(kept, bench.STEPS).splitlines()
    assert len(lines) == 2 + 1 + 5 + 5
    assert (
        lines[2]
        == "| standard Gaussian (flat) | - | 2 | 81.50 ± 0.71 | 2 |  |  |  | 86.41 ± 0.02 |"
    )
    under_eq = [line for line in lines if "| EqClip |" in line]
    assert "| 2 | 82.50 ± 0.71 | 2 | +1.00 |" in under_eq[0]
    assert [line.split("|")[4:8] for line in under_eq[:2]] == [
        under_eq[0].split("|")[4:8]
    ] * 2  # one mechanism
    assert "70.00" in bench.search(kept, bench.STEPS)
