"""The budget that the LaDP-FL paper charges by its equations 17 to 19, compared with the proven
epsilon (Figure 5 and the last block of Table VIII of the paper).

The runs use the recipe `ladp-fashion-mnist-published`, ten rounds and seeds 1 to 3. The noise of
the baselines is calibrated as in the paper (calibration = "matched"). By equation 17 an upload of
layer j with noise sigma costs epsilon_j = sqrt(2 ln(1.25 / delta)) Delta_j / sigma. The paper does
not say how the costs of the layers are added up. Here every noised layer of every upload costs q
epsilon_j, which gives the paper's 3.6 a round for Full DP: q = 0.1, epsilon = 0.2, ten uploads and
the 18 layers of ResNet-18.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedlgm.mechanisms.ladp_frame import bound_by_training
from fedlgm.planning.layers import LayerTable
from fedlgm_lab.studies.statistics import difference
from fedlgm_lab.studies.tables.ladp_constants import constants
from fedlgm_lab.studies.tables.maker import Maker
from fedlgm_lab.studies.tables.pages import interval, picture, table
from fedlgm_lab.studies.tables.runs import Cell, cells, measure_cells
from fedlgm_lab.studies.tables.store import Kept, Row, simulated
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly
from simulations.runs.folder import RunFolder
from simulations.runs.rows import FullRow

NAME, FULL_DP = "ladp-budgets", "Full DP"
PAPER = {
    # method: the paper's budget over the budget of Full DP, and p of the comparison with LaDP-FL
    FULL_DP: ("1", "2.64e-05"),
    "Time-Varying DP": ("1.573", "2.24e-06"),
    "DPA": ("1.260", "4.67e-06"),
    "Sensitive DP": ("0.488", "0.00349"),
    "AdapLDP": ("1", "2.64e-05"),
    "LaDP-FL (published)": ("0.367", ""),
}
"""The paper's Figure 5, and its Table VIII for ResNet-18 on CIFAR-10."""


def charged_budgets(
    rows: Sequence[FullRow], layers: int, share: float, delta: float, reached: float | None
) -> list[float]:
    """Compute the budget charged after each round, as a sum over all uploads so far, [T].

    Args:
        rows: a run's rounds, from the first one.
        layers: number of the model's layers. A baseline may use one noise scale for all layers.
        share: q = batch size / local examples (equation 18).
        delta: the recipe's delta, which is the delta of one release.
        reached: Delta_f = 2 eta E G_c. If None, a layer's sensitivity is twice its bound, for a
            baseline whose noise is in proportion to this bound.
    """
    total, budgets = 0.0, list[float]()
    for row in rows:
        if "clients" in row:
            # the noise is 0 for a layer that is uploaded without noise; such a layer is charged
            # nothing
            noise = np.array(row["clients"]["sigma"])
            ratios = np.divide(reached, noise, out=np.zeros_like(noise), where=noise > 0)
        else:
            noise = np.array(row["sigma"], dtype=np.float64)
            sensitivity = 2 * np.array(row["clip"]) if reached is None else reached
            ratios = np.tile(sensitivity / noise, (row["present"], layers // len(noise)))
        total += share * math.sqrt(2 * math.log(1.25 / delta)) * float(ratios.sum())
        budgets.append(total)
    return budgets


def run(recipe: str, changes: Mapping[str, Any], seed: int) -> Row:
    """Make one run, and return the budget charged after each round, the epsilon that the mechanism
    claims (q T epsilon for one client) and the proven epsilon.
    """
    parsed = recipes.load(recipe, changes)
    with simulated(recipe, overrides={**changes, "run.seed": seed}) as result:
        rows = RunFolder.open(result.folder).rows(private=True)
    layers = len(LayerTable.from_module(Assembly(parsed).model.module()))
    share, delta = float(parsed.mechanism.options["batch_share"]), parsed.privacy.delta
    moved = 2 * bound_by_training(parsed.training.local)
    reached = None if parsed.mechanism.name == "sensitive" else moved
    budgets = charged_budgets(rows, layers, share, delta, reached)
    return {"charged": budgets, "claimed": result.claimed_epsilon, "proven": str(result.epsilon)}


def budgets_of(cell: Cell) -> np.ndarray:
    """Return the charged budgets of a cell's runs, [seeds, T]."""
    return np.array([row["charged"] for row in cell.store.find(**cell.name)])


def sides(store: Kept) -> tuple[list[Cell], list[Cell]]:
    """Return the cells of the baselines, with Full DP first, and those of LaDP-FL with each pair of
    constants.
    """
    runs = cells(store, NAME)
    return [c for c in runs if "cap" not in c.name], [c for c in runs if "cap" in c.name]


def comparison(store: Kept) -> str:
    """Make the last block of Table VIII: the p-value of the difference between LaDP-FL and each
    baseline, paired by seed.
    """
    baselines, ladp = sides(store)
    lines = []
    for cell in ladp:
        pairs = [(budgets_of(cell)[:, -1], budgets_of(other)[:, -1]) for other in baselines]
        # budgets that differ only in the last digits of a constant count as equal
        tests = [
            "-" if np.allclose(a, b, rtol=1e-4) else f"{difference(a, b).p:.2g}" for a, b in pairs
        ]
        lines.append([*constants(cell), *tests])
    methods = [str(cell.name["method"]) for cell in baselines]
    lines.append(["paper", "", *(PAPER[method][1] for method in methods)])
    return table(("B", "R", *methods), lines)


def text(store: Kept) -> str:
    """Make the table of the methods' budgets after the last round, with their ratios to Full DP's
    budget.
    """
    baselines, ladp = sides(store)
    full, lines = budgets_of(baselines[0])[:, -1], []
    for cell in (*baselines, *ladp):
        last, method = budgets_of(cell)[:, -1], str(cell.name["method"])
        ratio = f"{np.mean(last / full):.3g}"
        spent = [f"{cell.figures(name).mean():.3g}" for name in ("claimed", "proven")]
        lines.append([method, *constants(cell), interval(last), ratio, PAPER[method][0], *spent])
    head = ("method", "B", "R", "charged", "over Full DP", "paper")
    return table((*head, "claimed, one client", "proven, one client"), lines)


def draw(store: Kept, path: Path) -> None:
    """Draw Figure 5 from the stored rows."""
    baselines, ladp = sides(store)
    with picture(path, (6.4, 3.6)) as (axis,):
        for cell, mark in zip((*baselines, *ladp), "os^dvPX*<", strict=True):
            budgets = budgets_of(cell).mean(axis=0)
            values = ", B = {}, R = {}".format(*constants(cell)) if cell in ladp else ""
            label, rounds = f"{cell.name['method']}{values}", range(1, len(budgets) + 1)
            axis.plot(rounds, budgets, label=label, marker=mark, markersize=4, linewidth=1.1)
        axis.set(xlabel="round", ylabel="charged budget")
        axis.legend(fontsize=6)


MAKER = Maker(
    "ladp-budgets.json",
    lambda store: {
        "ladp.md": {"budgets": text(store)},
        "data/ladp.md": {"budgets compared": comparison(store)},
    },
    lambda store: measure_cells(cells(store, NAME, run)),
    pictures={"ladp-budgets.png": draw},
)
