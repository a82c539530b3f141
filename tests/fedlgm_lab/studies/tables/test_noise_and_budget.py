"""The kept runs of budgets are complete and within their budgets."""

from pathlib import Path

from fedlgm_lab.studies.tables import noise_and_budget

RESULTS = Path(__file__).parents[4] / "docs" / "results"


def test_the_kept_runs_are_within_their_budgets() -> None:
    store = noise_and_budget.MAKER.open(RESULTS)
    assert {row["guarantee"] for row in store.rows} == {"proven"}
    assert all(row["epsilon"] <= row["budget"] for row in store.rows)
    for budget in noise_and_budget.BUDGETS:
        for noise in (noise_and_budget.POISSON, noise_and_budget.CYCLE, noise_and_budget.BANDED):
            seeds = set(noise_and_budget.figures(store, budget, noise))
            assert seeds == set(noise_and_budget.SEEDS)
