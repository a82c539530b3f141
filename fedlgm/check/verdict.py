"""The verdict on one assumption, with its effect on the proven figure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Status = Literal["holds", "conditional", "broken"]
STATUSES: tuple[Status, ...] = ("holds", "conditional", "broken")
"""All statuses, from the best to the worst."""


@dataclass(frozen=True)
class Verdict:
    """The verdict on one assumption.

    Attributes:
        status: "holds"; "conditional" (the assumption holds only on a condition, a setting is
            missing, or the stated epsilon is valid but is that of another mechanism); or "broken".
        why: the reason for the verdict, as text.
        factor: the run's effective noise multiplier divided by the stated one.
        times: how often all releases took place.
        units: number of units that one person contributes or that one replacement changes.
        scheduled: whether the proof must treat the schedule of participations as fixed, so that
            sampling does not lower epsilon and the relation is "zero-out".
        bound: whether a figure can be proven in spite of this verdict.
        missing: settings without which the assumption cannot be judged.
        rule: name of the rule.

    Example:
        >>> Verdict("broken", "the same batch is used twice", times=2).bound
        True
    """

    status: Status
    why: str
    factor: float = 1.0
    times: int = 1
    units: int = 1
    scheduled: bool = False
    bound: bool = True
    missing: tuple[str, ...] = ()
    rule: str = ""
