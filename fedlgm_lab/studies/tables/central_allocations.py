"""Table 2 of the SNR-consistent paper: noise over the layers in centralised training, at one proven
epsilon of 3.

All 60,000 examples of FashionMNIST, the CNN with 26,010 parameters. Every cell gets the same search
(learning rate, on a separate seed) and is then run on other seeds.
"""

from __future__ import annotations

import itertools
import math

from fedlgm_lab.studies.tables import searched
from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.pages import spread, table
from fedlgm_lab.studies.tables.searched import Search, measure_cells
from fedlgm_lab.studies.tables.store import CHANGE, Kept, Row, change, figures

RECIPE = "dp-sgd-fashion-mnist"
EPOCH = 117  # steps of 512 examples, on average
PASSES, EARLIER = 10, 2  # over the data; those of the runs that are complete
STEPS = PASSES * EPOCH
SEARCH, SEEDS = Search((4.0, 8.0), 1.0, 32.0), (1, 2, 3)
SETTING = (
    "data.pixels=[0, 1]",
    "training.batch_size=512",
    "training.momentum=0.9",
    f"run.evaluate_every={EPOCH}",
)
MED = ("mechanism.clip=med", "mechanism.norms=shares")
PUBLISHED = ("mechanism.variant=published", "mechanism.clip=med")
CLIPS = {"EqClip": (), "MedClip, sound": MED, "MedClip, published": PUBLISHED}
RULES = {
    # rule: the paper's figures under EqClip and MedClip
    "uniform": ("85.53 ± 0.55", "86.29 ± 0.21"),
    "sensitivity-proportional": ("85.53 ± 0.53", "86.14 ± 0.20"),
    "dimension-adjusted": ("85.58 ± 0.47", "86.31 ± 0.11"),
    "min-total-noise": ("86.23 ± 0.36", "86.28 ± 0.19"),
    "snr-consistent": ("86.23 ± 0.36", "86.81 ± 0.23"),
}
SAME = {"sensitivity-proportional": "uniform", "min-total-noise": "snr-consistent"}
"""Rules that are another one under EqClip."""
Cell = tuple[str, str]
FLAT: Cell = ("flat", "EqClip")
CELLS: tuple[Cell, ...] = (
    FLAT,
    *((rule, "EqClip") for rule in RULES if rule not in SAME),
    *((rule, "MedClip, sound") for rule in RULES),
)
NOT_PRIVATE: tuple[Cell, ...] = tuple(
    (rule, "MedClip, published") for rule in ("uniform", "snr-consistent")
)
"""Measured once the others are there: not private, and every step passes its batch twice."""


def overrides(cell: Cell, lr: float) -> list[str]:
    """A cell's changes of the recipe."""
    rule, clip = cell
    split = (
        ()
        if rule == "flat"
        else ("mechanism.style=per-layer", f"mechanism.allocation={rule}", *CLIPS[clip])
    )
    return [*SETTING, *split, f"training.lr={lr}", f"federation.rounds={STEPS}"]


def runs_of(store: Kept, cell: Cell, steps: int = STEPS) -> searched.Cell:
    """The runs of a cell."""
    name = {"rule": cell[0], "clip": cell[1], "steps": steps}

    def run(lr: float, seed: int) -> Row:
        return figures(RECIPE, overrides(cell, lr), seed)

    # The search of the earlier runs ended at the edge of its grid.
    search = SEARCH if steps == STEPS else Search((), math.inf, 0.0)
    return searched.Cell(store, name, search, run, rate="lr")


def measure_all(store: Kept) -> None:
    """The private cells, then the others."""
    for cells in (CELLS, NOT_PRIVATE):
        measure_cells([runs_of(store, cell) for cell in cells], SEEDS)


def results(store: Kept, steps: int = STEPS) -> str:
    """A row for every cell."""
    rows = []
    reference = runs_of(store, FLAT, steps).figures()
    for rule, clip in itertools.product(("flat", *RULES), CLIPS):
        cell = (SAME.get(rule, rule) if clip == "EqClip" else rule, clip)
        runs = runs_of(store, cell, steps)
        own = runs.figures() if runs.figures_by_rate() else {}
        if not own:
            continue
        rows.append([
            "standard Gaussian (flat)" if rule == "flat" else rule,
            "-" if rule == "flat" else clip,
            f"{runs.best():g}",
            spread(list(own.values())),
            str(len(own)),
            *([""] * len(CHANGE) if cell == FLAT else change(own, reference)),
            _paper(rule, clip),
        ])  # fmt: skip
    header = ["rule", "bounds", "lr", "accuracy", "seeds", *CHANGE, "paper, highest"]
    return table(header, rows)


def search(store: Kept, steps: int = STEPS) -> str:
    """Accuracy of every cell's search."""
    found = {
        cell: tried
        for cell in (*CELLS, *NOT_PRIVATE)
        if (tried := runs_of(store, cell, steps).figures_by_rate())
    }
    rates = sorted({lr for figures in found.values() for lr in figures})
    rows = [
        [*cell, *(f"{figures[lr]:.2f}" if lr in figures else "" for lr in rates)]
        for cell, figures in found.items()
    ]
    return table(["rule", "bounds", *(f"lr {lr:g}" for lr in rates)], rows)


def _paper(rule: str, clip: str) -> str:
    if rule == "flat":
        return "86.41 ± 0.02"
    return RULES[rule][0 if clip == "EqClip" else 1] if clip != "MedClip, sound" else ""


def texts(store: Kept) -> Pages:
    """Results and searches of these runs and of the earlier, shorter ones."""
    earlier = EARLIER * EPOCH
    return {
        "central-allocations.md": {"results": results(store)},
        "data/central-allocations.md": {
            "search": search(store),
            "results-earlier": results(store, earlier),
            "search-earlier": search(store, earlier),
        },
    }


MAKER = Maker("central-allocations.json", texts, measure_all, partial=True)
