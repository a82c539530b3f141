"""Correlated noise against secret sampling at several budgets: accuracy of the recipe `digits`,
five seeds per cell. There is no search: all cells have the recipe's server learning rate.
"""

from __future__ import annotations

import itertools

from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.noise_and_split import NOISES
from fedlgm_lab.studies.tables.pages import spread, table
from fedlgm_lab.studies.tables.store import CHANGE, Kept, change

BUDGETS, SEEDS = (1.0, 2.0, 8.0), (1, 2, 3, 4, 5)
POISSON, CYCLE, BANDED, _ = NOISES


def figures(store: Kept, budget: float, noise: str) -> dict[int, float]:
    """Available test accuracies in per cent, by seed."""
    return {row["seed"]: row["final"] for row in store.find(budget=budget, noise=noise)}


def text(store: Kept) -> str:
    """The cells, and the change from secret sampling to correlated noise in public."""
    rows, columns = [], (POISSON, CYCLE, BANDED)
    for budget in BUDGETS:
        cells = [figures(store, budget, noise) for noise in columns]
        if not all(cells):
            return ""
        own = [spread(list(cell.values())) for cell in cells]
        rows.append([f"{budget:g}", *own, *change(cells[2], cells[0])])
    return table(["epsilon", *columns, *CHANGE], rows)


def measure(store: Kept) -> None:
    """All cells, seed by seed."""
    for seed, budget, noise in itertools.product(SEEDS, BUDGETS, (POISSON, CYCLE, BANDED)):
        label = {"budget": budget, "noise": noise, "seed": seed}
        overrides = [*NOISES[noise], f"privacy.epsilon={budget:g}", "run.evaluate_every=1000"]
        store.measure(label, "digits", overrides)


def texts(store: Kept) -> Pages:
    """The table of its page."""
    return {"correlated.md": {"noise and budget: digits": text(store)}}


MAKER = Maker("noise-and-budget.json", texts, measure)
