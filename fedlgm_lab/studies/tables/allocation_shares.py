"""A numerical check of the comparison of allocation rules in paper 000, Table 1.

For bounds and sizes of four layers, each rule's budget shares and ratio of signal to noise are
compared with the table's formulas. The rule's objective is compared with the objectives of 10,000
random divisions of the same budget.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fedlgm.planning import allocation
from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.pages import table
from fedlgm_lab.studies.tables.store import Values

# layers of the CNN, unequal bounds
CLIP, SIZES = np.array([0.4, 0.2, 0.3, 0.1]), np.array([1040, 8224, 16416, 330])

Formula = Callable[[np.ndarray, np.ndarray], np.ndarray]
SHARES: dict[str, Formula] = {
    "uniform": lambda s, d: s**2,
    "sensitivity-proportional": lambda s, d: np.ones_like(s),
    "dimension-adjusted": lambda s, d: d.astype(float),
    "min-total-noise": lambda s, d: s * np.sqrt(d),
    "max-snr-sum": lambda s, d: (d == d.min()).astype(float),
    "snr-consistent": lambda s, d: np.sqrt(d),
}
"""The column "Budget Allocation" of the table: shares up to a constant factor."""
OBJECTIVES: dict[str, Callable[[np.ndarray], float]] = {
    "uniform": lambda v: float(((v - v.mean()) ** 2).sum()),
    "sensitivity-proportional": lambda v: float((v / CLIP**2).sum()),
    "dimension-adjusted": lambda v: float((SIZES**2 * v / CLIP**2).sum()),
    "min-total-noise": lambda v: float((SIZES * v).sum()),
    "max-snr-sum": lambda v: -float((CLIP**2 / (SIZES * v)).sum()),
    "snr-consistent": lambda v: float((SIZES * v / CLIP**2).sum()),
}
"""The column "Implicit Objective" of the table, as functions of the variances [K]."""


def measure_rules() -> list[dict[str, Any]]:
    """Compute the figures of every rule."""
    random = np.random.default_rng(0).dirichlet(np.ones(len(SIZES)), size=10_000)
    rows = []
    for rule, formula in SHARES.items():
        share, expected = allocation.shares(rule, CLIP, SIZES), formula(CLIP, SIZES)
        objective = OBJECTIVES[rule]
        with np.errstate(divide="ignore"):
            least = min(objective(allocation.spread(other, CLIP, 1.0) ** 2) for other in random)
            own = objective(allocation.spread(share, CLIP, 1.0) ** 2)
        rows.append(
            {
                "rule": rule,
                "shares": share.tolist(),
                "largest_deviation": float(np.abs(share - expected / expected.sum()).max()),
                "objective": own,
                "least_of_random": least,
            }
        )
    return rows


def measure(store: Values) -> None:
    """Compute the figures of the table."""
    for name, figures in (
        ("bounds", CLIP.tolist),
        ("sizes", SIZES.tolist),
        ("rows", measure_rules),
    ):
        store.get(name, figures)


def texts(store: Values) -> Pages:
    """Make the table with one row per rule."""
    shown = [
        [
            row["rule"],
            *(f"{100 * share:.1f}" for share in row["shares"]),
            f"{row['largest_deviation']:.0e}",
            "yes" if row["objective"] <= row["least_of_random"] else "no",
        ]
        for row in store.values["rows"]
    ]
    sizes = [f"{size:,} (bound {bound})" for size, bound in zip(SIZES, CLIP, strict=True)]
    head = [
        "rule",
        *sizes,
        "largest deviation from the paper's formula",
        "least objective of 10,000 random divisions",
    ]
    return {"allocations.md": {"shares": table(head, shown)}}


MAKER = Maker("allocation-shares.json", texts, measure, Values)
