"""The kept runs of budgets are complete and within their budgets."""

from pathlib import Path

from fedlgm_lab.studies.tables import noise_and_budget
from fedlgm_lab.studies.tables.runs import cells

RESULTS = Path(__file__).parents[4] / "docs" / "results"


def test_the_kept_runs_are_within_their_budgets() -> None:
    store = noise_and_budget.MAKER.open(RESULTS)
    assert {row["guarantee"] for row in store.rows} == {"proven"}
    assert all(row["epsilon"] <= row["budget"] for row in store.rows)
    for cell in cells(store, noise_and_budget.NAME):
        assert list(cell.figures().index) == list(cell.seeds)
