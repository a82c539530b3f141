"""Accuracy of the allocation rules on the digits federation, and the picture of the README.

For every method, the server learning rate is searched in the same way on a separate seed at epsilon
= 3, and the best rate is then run on other seeds.
"""

from __future__ import annotations

from pathlib import Path

from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.pages import picture, spread, table
from fedlgm_lab.studies.tables.runs import cells, labels, measure_cells
from fedlgm_lab.studies.tables.store import Kept

NAME = "allocations"
EPSILONS, TICKS = labels(NAME, "epsilon"), (1, 2, 3, 4, 6, 8)


def texts(store: Kept) -> Pages:
    """Make the table of accuracies by method and epsilon."""
    lines = []
    for method in labels(NAME, "method"):
        runs = cells(store, NAME, method=method)
        figures = [spread(cell.figures(), digits=1) for cell in runs]
        lines.append([method, f"{runs[0].rate():g}", *figures])
    head = ["method", "server lr", *(f"epsilon {e:g}" for e in EPSILONS)]
    return {"allocations.md": {"table": table(head, lines)}}


def draw(store: Kept, path: Path) -> None:
    """Draw the picture that the README shows."""
    with picture(path, (7, 4), dpi=100) as (axes,):
        for method in labels(NAME, "method"):
            figures = [cell.figures() / 100 for cell in cells(store, NAME, method=method)]
            means, spreads = [each.mean() for each in figures], [each.std() for each in figures]
            axes.errorbar(EPSILONS, means, spreads, marker="o", label=method)
        axes.set(
            xscale="log",
            xlabel="proven epsilon (delta = 1e-5)",
            ylabel="test accuracy",
            title="digits, 500 clients",
        )
        axes.set_xticks(TICKS, map(str, TICKS))
        axes.minorticks_off()
        axes.legend(fontsize="small")


MAKER = Maker(
    "allocations.json",
    texts,
    lambda store: measure_cells(cells(store, NAME)),
    pictures={"allocations.png": draw},
)
