"""The effect of the constants B (score cap) and R (threshold), which the LaDP-FL paper does not
state, on its published mechanism.

The runs use the recipe `ladp-fashion-mnist-published`, five rounds and seeds 1 to 3. The seeds
differ in the initial model, the cohorts and the noise. Full DP is calibrated in the same way
(calibration = "matched").
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedlgm_lab.studies.tables.maker import Maker
from fedlgm_lab.studies.tables.pages import interval, table
from fedlgm_lab.studies.tables.runs import Cell, cells, measure_cells
from fedlgm_lab.studies.tables.store import Kept, Row, simulated

NAME = "ladp-constants"


def run(recipe: str, changes: Mapping[str, Any], seed: int) -> Row:
    """Make one run; return its last accuracy, its noise, its scores and its noised share."""
    started = time.process_time()
    with simulated(recipe, overrides={**changes, "run.seed": seed}) as result:
        rows, sizes = result.history[1:], np.array([row["size"] for row in result.layers()])
    found: Row = {
        "accuracy": 100 * float(result["accuracy"]),
        "noise_scale": float(sum(row["noise_scale"] for row in rows)),
        "claimed": result.claimed_epsilon,
        "proven": str(result.epsilon),
    }
    if "clients" in rows[0]:
        first = rows[0]["clients"]
        noised = np.array(first["selected"]) > 0
        scores = np.array(first["score"])[noised]
        found["noised_share"] = float((noised * sizes).sum(axis=1).mean() / sizes.sum())
        quantiles = np.quantile(scores, [0, 0.5, 1]).tolist() if scores.size else []
        found["first_scores"] = [float(f"{value:.4g}") for value in quantiles]
    return found | {"seconds": round(time.process_time() - started, 1)}


def constants(cell: Cell) -> list[str]:
    """Format B and R of a cell's mechanism."""
    return [f"{cell.name[key]:g}" if key in cell.name else "-" for key in ("cap", "threshold")]


def text(store: Kept) -> str:
    """Make the table that compares accuracy and noise with Full DP's."""
    full, *_ = runs = cells(store, NAME)
    lines = []
    for cell in runs:
        if len(accuracies := cell.figures("accuracy")):
            ratio = cell.figures("noise_scale").mean() / full.figures("noise_scale").mean()
            share = 1.0 if cell is full else cell.figures("noised_share").mean()
            figures = [f"{100 * share:.0f} %", interval(accuracies), f"{ratio:.3g}"]
            lines.append([cell.name["method"], *constants(cell), *figures, len(accuracies)])
    head = ("method", "B", "R", "noised, first round", "accuracy (%)", "noise / Full DP's", "seeds")
    return table(head, lines)


MAKER = Maker(
    "ladp-constants.json",
    lambda store: {"ladp.md": {"constants": text(store)}},
    lambda store: measure_cells(cells(store, NAME, run)),
)
