"""The budget that the LaDP-FL paper charges by its equations 17 to 19, beside the proven epsilon:
its Figure 5 and the last block of its Table VIII.

Recipe `ladp-fashion-mnist-published`, ten rounds, seeds 1 to 3. The baselines are in the paper's
frame (calibration = "matched"). By equation 17 an upload of layer j with noise sigma costs
epsilon_j = sqrt(2 ln(1.25 / delta)) Delta_j / sigma. The paper does not say how layers are added
up. Here every noised layer of every upload costs q epsilon_j, which gives the paper's 3.6 a round
for Full DP: q = 0.1, epsilon = 0.2, ten uploads and the 18 layers of ResNet-18.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import matplotlib as mpl
import numpy as np

import simulations
from fedlgm.mechanisms.ladp_frame import bound_by_training
from fedlgm.planning.layers import LayerTable
from fedlgm_lab.studies.statistics import difference
from fedlgm_lab.studies.tables.ladp_constants import CONSTANTS, RECIPE, SEEDS
from fedlgm_lab.studies.tables.maker import Maker
from fedlgm_lab.studies.tables.pages import interval, table
from fedlgm_lab.studies.tables.store import Kept, Row
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly
from simulations.runs.folder import RunFolder
from simulations.runs.rows import FullRow

mpl.use("Agg")
import matplotlib.pyplot as plt

ROUNDS = 10
LADP, FULL_DP = "LaDP-FL (published)", "Full DP"
BASELINES = {
    FULL_DP: ("full-dp", "1"),
    "Time-Varying DP": ("time-varying", "1.573"),
    "DPA": ("dpa", "1.260"),
    "Sensitive DP": ("sensitive", "0.488"),
    "AdapLDP": ("adapldp", "1"),
}
"""Name of each baseline's mechanism, and the paper's budget over that of Full DP."""
PAPER = "0.367"
PAPER_P = ("2.64e-05", "2.24e-06", "4.67e-06", "0.00349", "2.64e-05")
"""Table VIII, ResNet-18 on CIFAR-10: LaDP-FL beside each baseline."""


def charged_budgets(
    rows: Sequence[FullRow], layers: int, share: float, delta: float, reached: float | None
) -> list[float]:
    """The budget charged so far after each round, over all uploads, [T].

    Args:
        rows: a run's rounds, from the first one.
        layers: number of the model's layers. A baseline may treat them as one, with one noise
            scale.
        share: q = batch size / local examples (equation 18).
        delta: the recipe's delta, of one release.
        reached: Delta_f = 2 eta E G_c; None takes twice the bound of each layer, for noise that
            follows it.
    """
    total, budgets = 0.0, list[float]()
    for row in rows:
        if "clients" in row:
            noise = np.array(
                row["clients"]["sigma"]
            )  # 0 where a layer is uploaded as it is, which costs nothing
            ratios = np.divide(reached, noise, out=np.zeros_like(noise), where=noise > 0)
        else:
            noise = np.array(row["sigma"], dtype=np.float64)
            sensitivity = 2 * np.array(row["clip"]) if reached is None else reached
            ratios = np.tile(sensitivity / noise, (row["present"], layers // len(noise)))
        total += share * math.sqrt(2 * math.log(1.25 / delta)) * float(ratios.sum())
        budgets.append(total)
    return budgets


def run(overrides: tuple[str, ...], seed: int) -> Row:
    """One run: the budget charged after each round, the run's own claim (q T epsilon of one client)
    and the proof.
    """
    frame = (
        f"federation.rounds={ROUNDS}",
        f"privacy.max_participations={ROUNDS}",
        "run.evaluate_every=1000",
        "run.checkpoint_every=1000",
        f"run.seed={seed}",
        "run.trackers=[]",
    )
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "run"
        result = simulations.simulate(RECIPE, overrides=[*frame, *overrides], run_dir=folder)
        rows = RunFolder.open(folder).rows(private=True)
    recipe = recipes.load(RECIPE, [*overrides])
    layers = len(LayerTable.from_module(Assembly(recipe).model.module()))
    share, delta = float(recipe.mechanism.options["batch_share"]), recipe.privacy.delta
    reached = (
        None
        if recipe.mechanism.name == "sensitive"
        else 2 * bound_by_training(recipe.training.local)
    )
    budgets = charged_budgets(rows, layers, share, delta, reached)
    return {"charged": budgets, "claimed": result.claimed_epsilon, "proven": str(result.epsilon)}


def cells() -> list[tuple[Row, str, tuple[str, ...]]]:
    """(name of the cell, the paper's ratio, overrides)."""
    made: list[tuple[Row, str, tuple[str, ...]]] = []
    for method, (mechanism, ratio) in BASELINES.items():
        frame = (
            f"mechanism.name={mechanism}",
            "mechanism.variant=sound",
            "mechanism.calibration=matched",
        )
        made.append(({"method": method, "cap": None, "threshold": None}, ratio, frame))
    for cap, threshold in CONSTANTS:
        changed = (f"mechanism.score_cap={cap!r}", f"mechanism.threshold={threshold}")
        made.append(({"method": LADP, "cap": cap, "threshold": threshold}, PAPER, changed))
    return made


def last(store: Kept, cell: Row) -> list[float]:
    """The cell's budgets after the last round, one per seed."""
    return [row["charged"][-1] for row in store.find(**cell)]


def comparison(store: Kept) -> str:
    """The last block of Table VIII: p of the paired difference between LaDP-FL and each baseline,
    over the seeds.
    """
    baselines = [cell for cell, *_ in cells() if cell["method"] != LADP]
    lines = []
    for cell in (cell for cell, *_ in cells() if cell["method"] == LADP):
        pairs = [(last(store, cell), last(store, baseline)) for baseline in baselines]
        # Budgets that differ only in the last digits of a constant are equal.
        found = [
            "-" if np.allclose(a, b, rtol=1e-4) else f"{difference(a, b).p:.2g}" for a, b in pairs
        ]
        lines.append([f"{cell['cap']:g}", f"{cell['threshold']:g}", *found])
    lines.append(["paper", "", *PAPER_P])
    return table(("B", "R", *(cell["method"] for cell in baselines)), lines)


def text(store: Kept) -> str:
    """The table: budgets after the last round, each method beside Full DP."""
    reference, lines = last(store, cells()[0][0]), []
    for cell, paper, _ in cells():
        rows, values = store.find(**cell), last(store, cell)
        ratios = [value / full for value, full in zip(values, reference, strict=True)]
        lines.append(
            [
                cell["method"],
                *(
                    "-" if cell[name] is None else f"{cell[name]:g}"
                    for name in ("cap", "threshold")
                ),
                interval(values),
                f"{np.mean(ratios):.3g}",
                paper,
                f"{np.mean([row['claimed'] for row in rows]):.3g}",
                f"{np.mean([float(row['proven']) for row in rows]):.3g}",
            ]
        )
    head = (
        "method",
        "B",
        "R",
        "charged",
        "over Full DP",
        "paper",
        "claimed, one client",
        "proven, one client",
    )
    return table(head, lines)


def draw(store: Kept, path: Path) -> None:
    """Figure 5, from the kept rows."""
    figure, axis = plt.subplots(figsize=(6.4, 3.6))
    for (cell, _, _), mark in zip(cells(), "os^dvPX*<", strict=True):
        curves = [row["charged"] for row in store.find(**cell)]
        label = cell["method"] + (
            f", B = {cell['cap']:g}, R = {cell['threshold']:g}" if cell["cap"] else ""
        )
        axis.plot(
            range(1, ROUNDS + 1),
            np.mean(curves, axis=0),
            label=label,
            marker=mark,
            markersize=4,
            linewidth=1.1,
        )
    axis.set(xlabel="round", ylabel="charged budget")
    axis.grid(alpha=0.3)
    axis.legend(fontsize=6)
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)


def measure(store: Kept) -> None:
    """All cells, seed by seed."""
    for seed in SEEDS:
        for cell, _, overrides in cells():
            store.keep({**cell, "seed": seed}, partial(run, overrides, seed))


MAKER = Maker(
    "ladp-budgets.json",
    lambda store: {
        "ladp.md": {"budgets": text(store)},
        "data/ladp.md": {"budgets compared": comparison(store)},
    },
    measure,
    pictures={"ladp-budgets.png": draw},
)
