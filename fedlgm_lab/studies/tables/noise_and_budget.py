"""Accuracy of the recipe `digits` with correlated noise and with secret sampling at several
budgets, with five seeds per cell.

Nothing is searched; all cells use the recipe's server learning rate.
"""

from __future__ import annotations

from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.pages import spread, table
from fedlgm_lab.studies.tables.runs import cells, labels, measure_cells
from fedlgm_lab.studies.tables.store import CHANGE, Kept, change

NAME = "noise-and-budget"


def texts(store: Kept) -> Pages:
    """Make the table of the cells, with the change from secret sampling to correlated noise and
    public sampling.
    """
    rows, noises = [], list[str]()
    for budget in labels(NAME, "budget"):
        figures = {
            str(cell.name["noise"]): cell.figures() for cell in cells(store, NAME, budget=budget)
        }
        noises = list(figures)
        secret, _, banded = figures.values()
        rows.append([f"{budget:g}", *map(spread, figures.values()), *change(banded, secret)])
    text = table(["epsilon", *noises, *CHANGE], rows)
    return {"correlated.md": {"noise and budget: digits": text}}


MAKER = Maker("noise-and-budget.json", texts, lambda store: measure_cells(cells(store, NAME)))
