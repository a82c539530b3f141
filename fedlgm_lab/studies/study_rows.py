"""Rows of a comparison: plain figures of its runs and cells, where a cell is a method at a budget
and partition.
"""

from __future__ import annotations

from typing import Any, TypedDict

Row = dict[str, Any]

CELL = ("method", "epsilon_budget", "partition")
"""Keys of a comparison's cell. Runs without privacy have no budget."""


class JointCost(TypedDict):
    """The joint cost of all runs.

    Attributes:
        epsilon: epsilon of all runs; infinite if one run is not private, None if there is no joint
            figure.
        epsilon_protected: epsilon of the runs whose releases are private; None if there is no joint
            figure.
        why: reason why there is no joint figure.
        runs, runs_protected: number of these runs.
        delta: largest delta among the recipes.
    """

    epsilon: float | None
    epsilon_protected: float | None
    why: str | None
    runs: int
    runs_protected: int
    delta: float
