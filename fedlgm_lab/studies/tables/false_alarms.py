"""Rates of false alarms and of coverage of the paired test, in simulated comparisons of methods
that do not differ.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from fedlgm_lab.studies.statistics import difference, holm
from fedlgm_lab.studies.tables.maker import Maker
from fedlgm_lab.studies.tables.pages import table
from fedlgm_lab.studies.tables.store import Kept

SEEDS, WITHIN = (3, 5, 10), (0.0, 0.3, 0.9)
ROUNDS, TRIALS, CELLS = 5, 5000, 4


def runs(draw: np.random.Generator, seeds: int, within: float) -> np.ndarray:
    """Draw the figures of two methods that do not differ, [2, seeds, rounds]. The rounds of a run
    are correlated, and the two runs of a seed share a component.
    """
    start = draw.normal(size=(1, seeds, 1))
    run = draw.normal(size=(2, seeds, 1))
    return (
        start + np.sqrt(within) * run + np.sqrt(1 - within) * draw.normal(size=(2, seeds, ROUNDS))
    )


def rates(seeds: int, within: float, trials: int = TRIALS) -> dict[str, Any]:
    """Estimate the share of comparisons with p below 0.05, the share of intervals that contain 0,
    and the share of families of cells in which Holm's method raises a false alarm.
    """
    draw = np.random.default_rng(1000 * seeds + int(10 * within))
    found = [difference(*runs(draw, seeds, within)) for _ in range(trials)]
    families = [found[low : low + CELLS] for low in range(0, trials, CELLS)]
    return {
        "trials": trials,
        "alarms": float(np.mean([each.p < 0.05 for each in found])),
        "coverage": float(np.mean([each.low <= 0 <= each.high for each in found])),
        "family_alarms": float(
            np.mean([min(holm([each.p for each in family])) < 0.05 for family in families])
        ),
    }


def page(rows: Sequence[dict[str, Any]]) -> str:
    """Make the table of the stored rates."""
    lines = [
        [
            str(row["seeds"]),
            f"{row['within']:g}",
            *(f"{100 * row[key]:.1f} %" for key in ("alarms", "coverage", "family_alarms")),
        ]
        for row in rows
    ]
    families = f"any of {CELLS} cells with Holm's p below 0.05"
    return table(
        ["seeds", "correlation of a run's rounds", "p below 0.05", "interval contains 0", families],
        lines,
    )


def measure(store: Kept) -> None:
    """Estimate the rates for all numbers of seeds and all correlations."""
    for seeds, within in itertools.product(SEEDS, WITHIN):
        store.keep({"seeds": seeds, "within": within}, partial(rates, seeds, within))


MAKER = Maker(
    "false-alarms.json", lambda store: {"studies.md": {"false alarms": page(store.rows)}}, measure
)
