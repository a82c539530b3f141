"""Rows of a comparison: plain figures of its runs, and of its cells (one method at one budget and partition)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, TypedDict

import numpy as np

from simulations.studies.jobs import Job

Row = dict[str, Any]

CELL = ("method", "epsilon_budget", "partition")
"""Keys of a cell; runs without privacy have no budget."""


class JointCost(TypedDict):
    """The joint cost of all runs.

    Attributes:
        epsilon: epsilon of all runs; infinite if one is not private, None if there is no joint figure.
        epsilon_protected: epsilon of the runs whose releases are private; None if there is no joint figure.
        why: why there is none.
        runs, runs_protected: their numbers.
        delta: the largest among the recipes.
    """

    epsilon: float | None
    epsilon_protected: float | None
    why: str | None
    runs: int
    runs_protected: int
    delta: float


def cells_of(runs: Sequence[Row], figures: Iterable[str]) -> list[tuple[Row, list[Row]]]:
    """Each cell with its runs, in order of first appearance.

    A cell has its keys, the number of its runs as "seeds", mean and standard deviation of the figures, the runs'
    guarantee, and their largest epsilons.

    Args:
        runs: rows of runs.
        figures: names of the figures; see `repeated`.
    """
    cells: dict[tuple[Any, ...], list[Row]] = {}
    for run in runs:
        cells.setdefault(tuple(run[key] for key in CELL), []).append(run)
    return [
        (
            {key: own[0][key] for key in (*CELL, "delta", "guarantee", "guarantee_status")}
            | {"seeds": len(own)}
            | {name: max(run[name] for run in own) for name in ("epsilon", "claimed_epsilon")}
            | repeated(own, figures),
            own,
        )
        for own in cells.values()
    ]


def repeated(rows: Sequence[Row], figures: Iterable[str]) -> Row:
    """Mean of each figure over the rows that have it, and as "NAME_std" the standard deviation, 0 for a single row.

    >>> repeated([{"loss": 1.0}, {"loss": 3.0}, {}], ["loss", "accuracy"])
    {'loss': 2.0, 'loss_std': 1.4142135623730951}
    """
    made: Row = {}
    for name in figures:
        values = [row[name] for row in rows if row.get(name) is not None]
        if values:
            deviation = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
            made |= {name: float(np.mean(values)), f"{name}_std": deviation}
    return made


def keys_of(job: Job) -> Row:
    """Keys of a run's row: those of its cell, and the number of its repetition."""
    return {
        "method": job.method, "epsilon_budget": job.epsilon, "partition": job.partition, "repetition": job.repetition,
    }  # fmt: skip


def budget(row: Row) -> str:
    """A row's budget as text."""
    return "-" if row["epsilon_budget"] is None else f"{row['epsilon_budget']:g}"
