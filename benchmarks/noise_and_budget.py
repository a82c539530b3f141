"""Correlated noise against secret sampling at several budgets: accuracy of the recipe `digits`,
five seeds per cell.

    python -m benchmarks.noise_and_budget --kept FILE [--minutes M]   # continue the runs
    python -m benchmarks.noise_and_budget --kept FILE --write         # table of
    docs/results/correlated.md

There is no search: all cells have the recipe's server learning rate. Finished runs are kept in
FILE.
"""

from __future__ import annotations

import itertools

from benchmarks.kept import CHANGE, Kept, change, command_line
from benchmarks.noise_and_split import NOISES, PAGE
from benchmarks.pages import show, spread, table

KEPT = PAGE.with_name("noise-and-budget.json")
MARK = "noise and budget: digits"
BUDGETS, SEEDS = (1.0, 2.0, 8.0), (1, 2, 3, 4, 5)
POISSON, CYCLE, BANDED, _ = NOISES


def figures(kept: Kept, budget: float, noise: str) -> dict[int, float]:
    """Available test accuracies in per cent, by seed."""
    return {row["seed"]: row["final"] for row in kept.find(budget=budget, noise=noise)}


def text(kept: Kept) -> str:
    """The cells, and the change from secret sampling to correlated noise in public."""
    rows, columns = [], (POISSON, CYCLE, BANDED)
    for budget in BUDGETS:
        cells = [figures(kept, budget, noise) for noise in columns]
        if not all(cells):
            return ""
        own = [spread(list(cell.values())) for cell in cells]
        rows.append([f"{budget:g}", *own, *change(cells[2], cells[0])])
    return table(["epsilon", *columns, *CHANGE], rows)


def main() -> None:
    """See the module."""
    parser = command_line("Correlated noise against secret sampling at several budgets.", KEPT)
    options = parser.parse_args()
    kept = Kept(options.kept, options.minutes)
    if not options.write:
        for seed, budget, noise in itertools.product(SEEDS, BUDGETS, (POISSON, CYCLE, BANDED)):
            label = {"budget": budget, "noise": noise, "seed": seed}
            overrides = [*NOISES[noise], f"privacy.epsilon={budget:g}", "run.evaluate_every=1000"]
            if kept.measure(label, "digits", overrides) is None:
                break
    if found := text(kept):
        show(PAGE, {MARK: found}, options.write)


if __name__ == "__main__":
    main()
