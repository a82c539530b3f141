"""A paper's claims about a study's figures, tested on its runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pandas import DataFrame
from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedlgm_lab.studies import frames
from fedlgm_lab.studies.results import Sides, pair_seeds
from fedlgm_lab.studies.statistics import LEVEL, Difference, holm, over_cells
from simulations.runs.headline import is_share

Outcome = Literal["reproduced", "refuted", "not decided", "fragile"]
BY_INTERVAL = ("equal", "not lower")
"""Expectations that the interval of the difference decides, without a p-value."""


class Claim(BaseModel):
    """A statement about the difference of two methods, or of one method at two values of a key.

    Attributes:
        says: the statement, in one sentence.
        paper: figures that the paper prints for the statement; empty if it prints none.
        a: label of a method.
        b: label of the method with which `a` is compared; not used with `along`.
        along: a key of the grid; `a` at its last value is compared with `a` at its first.
        at: values of the grid's keys to which the statement is restricted.
        metric: column of the frame; default: the task's headline.
        expect: expected order of `a`'s figures: "higher", "lower", "equal", which means within
            `margin`, or "not lower", which means lower by less than `margin` (non-inferiority).
        margin: largest difference that counts as equal or as not lower, in the metric's unit.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    says: str
    paper: str = ""
    a: str
    b: str | None = None
    along: str | None = None
    at: dict[str, Any] = {}
    metric: str | None = None
    expect: Literal["higher", "lower", "equal", "not lower"] = "higher"
    margin: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _one_comparison(self) -> Claim:
        if (self.b is None) == (self.along is None):
            raise ValueError("a claim compares with `b` or `along` a key: give one of them")
        if (self.expect in BY_INTERVAL) != (self.margin > 0):
            raise ValueError("`margin` belongs to expect = 'equal' and 'not lower', which need one")
        return self


@dataclass(frozen=True)
class Checked(Difference):
    """A claim with its result.

    Attributes:
        mean, low, high, p, seeds: statistics of the difference, paired by seed over all its cells
            (see `Difference`). NaN if fewer than two seeds have figures of both sides.
        says, paper, metric, expect: see `Claim`.
        p_holm: p adjusted for the study's claims of a direction; 1 for "equal" and "not lower",
            which the interval decides.
        outcome: see `check`.
    """

    says: str
    paper: str
    metric: str
    expect: str
    p_holm: float
    outcome: Outcome

    def in_words(self) -> str:
        """The difference in words, with shares in percentage points."""
        if math.isnan(self.mean):
            return "fewer than two seeds"
        scale, unit = (100, " points") if is_share(self.metric) else (1, "")
        mean, low, high = (f"{scale * value:+.3g}" for value in (self.mean, self.low, self.high))
        adjusted = (
            "" if self.expect in BY_INTERVAL else f", p {self.p_holm:.2g} after Holm's correction"
        )
        return f"{self.metric} {mean}{unit}, 95 % interval {low} to {high}, {self.seeds} seeds{adjusted}"


def check(
    claims: Sequence[Claim], frame: DataFrame, keys: Sequence[str], headline: str
) -> list[Checked]:
    """Test claims on a study's figures.

    A direction is reproduced if the difference has it and its p-value, adjusted by Holm's method
    over the study's claims of a direction, is below 0.05. It is refuted if the difference has the
    other direction at that level. Equality is reproduced if the 95 % interval lies within the
    margin, and refuted if it lies outside. "Not lower" is reproduced if the interval lies above
    -margin, and refuted if it lies below: a method that is worse by the margin passes in at most
    2.5 % of studies. All other cases are undecided.

    Args:
        claims: the study's claims.
        frame: see `Study.to_frame`.
        keys: see `Study.compared_keys`.
        headline: metric for claims that name none.
    """
    differences = [_difference(claim, frame, keys, claim.metric or headline) for claim in claims]
    directed = [
        i
        for i, claim in enumerate(claims)
        if claim.expect not in BY_INTERVAL and not math.isnan(differences[i].mean)
    ]
    adjusted = dict(zip(directed, holm([differences[i].p for i in directed]), strict=True))
    checked = []
    for index, (claim, difference) in enumerate(zip(claims, differences, strict=True)):
        p_holm = adjusted.get(index, 1.0)
        checked.append(
            Checked(
                **vars(difference),
                says=claim.says,
                paper=claim.paper,
                metric=claim.metric or headline,
                expect=claim.expect,
                p_holm=p_holm,
                outcome=_outcome(claim, difference, p_holm),
            )
        )
    return checked


def weigh(paper: Sequence[Checked], tuned: Sequence[Checked]) -> list[Checked]:
    """The claims at the paper's settings, with the outcome "fragile" where tuned settings give
    another outcome: no conclusion may rest on such a claim.

    Args:
        paper: the claims at the paper's settings.
        tuned: the same claims, with settings searched alike for every method.

    Example:
        >>> one = Checked(0.1, 0.05, 0.15, 0.01, 5, "a leads", "", "accuracy", "higher", 0.01, "reproduced")
        >>> [claim.outcome for claim in weigh([one], [replace(one, outcome="refuted")])]
        ['fragile']
    """
    return [
        one if one.outcome == other.outcome else replace(one, outcome="fragile")
        for one, other in zip(paper, tuned, strict=True)
    ]


def _outcome(claim: Claim, difference: Difference, p: float) -> Outcome:
    if math.isnan(difference.mean):
        return "not decided"
    if claim.expect == "not lower":
        if difference.low > -claim.margin:
            return "reproduced"
        return "refuted" if difference.high < -claim.margin else "not decided"
    if claim.expect == "equal":
        if -claim.margin < difference.low and difference.high < claim.margin:
            return "reproduced"
        return (
            "refuted"
            if difference.low > claim.margin or difference.high < -claim.margin
            else "not decided"
        )
    if p >= LEVEL:
        return "not decided"
    return "reproduced" if (difference.mean > 0) == (claim.expect == "higher") else "refuted"


def _difference(claim: Claim, frame: DataFrame, keys: Sequence[str], metric: str) -> Difference:
    """Difference of the claim's sides over the cells that both have."""
    subset = frames.at(frame, claim.at)
    sides: Sides = ("method", claim.a, claim.b)
    if claim.along is not None:
        values = [value for value in subset[claim.along].tolist() if not frames.is_missing(value)]
        subset = frames.at(subset, {"method": claim.a})
        sides = (claim.along, *((values[-1], values[0]) if values else (None, None)))
    cells = frames.cells_of(subset, [key for key in keys if key != claim.along], {})
    return over_cells(
        row
        for cell in cells
        for row in pair_seeds(subset, cell, sides, metric)[0].itertuples(name=None)
    )
