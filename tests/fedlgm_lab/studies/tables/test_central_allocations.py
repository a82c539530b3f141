"""Allocations in centralised training: every cell is a valid run, and tables hold the runs at the
rates that won."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedlgm.mechanisms import UsesPrivateNorms
from fedlgm_lab.studies.tables import central_allocations as bench
from fedlgm_lab.studies.tables.store import Kept
from simulations.config import recipe as recipes


@pytest.mark.parametrize("cell", [*bench.CELLS, *bench.NOT_PRIVATE])
def test_every_cell_is_a_recipe(cell: bench.Cell) -> None:
    recipe = recipes.load(bench.RECIPE, bench.overrides(cell, 2.0))
    mechanism = recipe.mechanism.build()
    assert (recipe.privacy.epsilon, recipe.training.lr, mechanism.bound) == (3.0, 2.0, 0.1)
    assert isinstance(mechanism, UsesPrivateNorms) == (cell in bench.NOT_PRIVATE)
    assert cell == bench.FLAT or mechanism.allocation == cell[0]


def test_tables_hold_the_rates_that_won(tmp_path: Path) -> None:
    kept = Kept(tmp_path / "none.json")
    assert len(bench.results(kept).splitlines()) == 2
    for at, (rule, clip) in enumerate(bench.CELLS):
        label = {"rule": rule, "clip": clip, "steps": bench.STEPS}
        for lr in (1.0, 2.0, 4.0, 8.0):
            kept.rows.append(
                label
                | {"lr": lr, "seed": bench.SEARCH.seed, "final": 70 - abs(lr - 2), "highest": 70}
            )
        for lr, final in ((2.0, 80.0), (4.0, 10.0)):
            for seed in (1, 2):
                kept.rows.append(
                    label
                    | {"lr": lr, "seed": seed, "final": final + at + seed, "highest": 90 + seed}
                )
    lines = bench.results(kept).splitlines()
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
    assert "70.00" in bench.search(kept)
