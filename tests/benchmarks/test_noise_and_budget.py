"""The table of budgets is that of the runs that are kept."""

from benchmarks import noise_and_budget
from benchmarks.kept import Kept
from benchmarks.noise_and_split import PAGE


def test_the_page_shows_the_kept_runs() -> None:
    kept = Kept(noise_and_budget.KEPT)
    assert noise_and_budget.text(kept) in PAGE.read_text(encoding="utf-8")
    assert {row["guarantee"] for row in kept.rows} == {"proven"}
    assert all(row["epsilon"] <= row["budget"] for row in kept.rows)
    for budget in noise_and_budget.BUDGETS:
        for noise in (noise_and_budget.POISSON, noise_and_budget.CYCLE, noise_and_budget.BANDED):
            assert set(noise_and_budget.figures(kept, budget, noise)) == set(noise_and_budget.SEEDS)
