"""Correlated noise against secret sampling at several budgets: accuracy of the recipe `digits`,
five seeds per cell. There is no search: all cells have the recipe's server learning rate.
"""

from __future__ import annotations

from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.pages import spread, table
from fedlgm_lab.studies.tables.runs import cells, labels, measure_cells
from fedlgm_lab.studies.tables.store import CHANGE, Kept, change

NAME = "noise-and-budget"


def texts(store: Kept) -> Pages:
    """The cells, and the change from secret sampling to correlated noise in public."""
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
