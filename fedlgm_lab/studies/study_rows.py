"""Types of the rows that hold a comparison's figures. A cell is a method with a budget and a
partition.
"""

from __future__ import annotations

from typing import Any, TypedDict

Row = dict[str, Any]

CELL = ("method", "epsilon_budget", "partition")
"""Keys that identify a comparison's cell. Runs without privacy have no budget."""


class JointCost(TypedDict):
    """The joint cost of all runs.

    Attributes:
        epsilon: joint epsilon of all runs; infinite if a run is not private, None if there is no
            joint epsilon.
        epsilon_protected: joint epsilon of the private runs; None if there is no joint epsilon.
        why: reason why there is no joint epsilon; None if there is one.
        runs: number of all runs.
        runs_protected: number of the private runs.
        delta: largest delta among the recipes.
    """

    epsilon: float | None
    epsilon_protected: float | None
    why: str | None
    runs: int
    runs_protected: int
    delta: float
