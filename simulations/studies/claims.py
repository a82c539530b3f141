"""A paper's claims about a study's figures, tested on its runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from simulations.reports.headline import is_share
from simulations.studies import frames
from simulations.studies.statistics import difference, holm, over_cells

if TYPE_CHECKING:
    from pandas import DataFrame

Outcome = Literal["reproduced", "refuted", "not decided"]
_LEVEL = 0.05


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
        expect: expected order of `a`'s figures: "higher", "lower", or "equal", which means within `margin`.
        margin: largest difference that counts as equal, in the metric's unit.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    says: str
    paper: str = ""
    a: str
    b: str | None = None
    along: str | None = None
    at: dict[str, Any] = {}
    metric: str | None = None
    expect: Literal["higher", "lower", "equal"] = "higher"
    margin: float = Field(default=0.0, ge=0)

    @model_validator(mode="after")
    def _one_comparison(self) -> Claim:
        if (self.b is None) == (self.along is None):
            raise ValueError("a claim compares with `b` or `along` a key: give one of them")
        if (self.expect == "equal") != (self.margin > 0):
            raise ValueError("`margin` belongs to expect = 'equal', which needs one")
        return self


@dataclass(frozen=True)
class Checked:
    """A claim with its result.

    Attributes:
        says, paper, metric, expect: see `Claim`.
        mean, low, high, p: statistics of the difference, paired by seed over all its cells (see `Difference`). NaN if
            fewer than two seeds have figures of both sides.
        p_holm: p adjusted for the study's claims of a direction; 1 for "equal", which the interval decides.
        seeds: number of pairs.
        outcome: see `check`.
    """

    says: str
    paper: str
    metric: str
    expect: str
    mean: float
    low: float
    high: float
    p: float
    p_holm: float
    seeds: int
    outcome: Outcome

    def found(self) -> str:
        """The difference in words, with shares in percentage points."""
        if math.isnan(self.mean):
            return "fewer than two seeds"
        scale, unit = (100, " points") if is_share(self.metric) else (1, "")
        mean, low, high = (f"{scale * value:+.3g}" for value in (self.mean, self.low, self.high))
        adjusted = "" if self.expect == "equal" else f", p {self.p_holm:.2g} after Holm's correction"
        return f"{self.metric} {mean}{unit}, 95 % interval {low} to {high}, {self.seeds} seeds{adjusted}"

    def record(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def check(claims: Sequence[Claim], frame: DataFrame, keys: Sequence[str], headline: str) -> list[Checked]:
    """Test claims on a study's figures.

    A direction is reproduced if the difference has it and its p-value, adjusted by Holm's method over the study's
    claims of a direction, is below 0.05. It is refuted if the difference has the other direction at that level.
    Equality is reproduced if the 95 % interval lies within the margin, and refuted if it lies outside. All other cases
    are undecided.

    Args:
        claims: the study's claims.
        frame: see `Study.to_frame`.
        keys: see `Study.compared_keys`.
        headline: metric for claims that name none.
    """
    found = [_pairs(claim, frame, keys, claim.metric or headline) for claim in claims]
    tested = [difference(*pairs.T) if len(pairs) > 1 else None for pairs in found]
    directed = [i for i, claim in enumerate(claims) if claim.expect != "equal" and tested[i] is not None]
    adjusted = dict(zip(directed, holm([tested[i].p for i in directed]), strict=True))  # type: ignore[union-attr]
    checked = []
    for index, (claim, one, pairs) in enumerate(zip(claims, tested, found, strict=True)):
        mean, low, high, p = (math.nan,) * 4 if one is None else (one.mean, one.low, one.high, one.p)
        p_holm = adjusted.get(index, 1.0)
        checked.append(Checked(
            claim.says, claim.paper, claim.metric or headline, claim.expect, mean, low, high, p, p_holm, len(pairs),
            _outcome(claim, mean, low, high, p_holm),
        ))  # fmt: skip
    return checked


def _outcome(claim: Claim, mean: float, low: float, high: float, p: float) -> Outcome:
    if math.isnan(mean):
        return "not decided"
    if claim.expect == "equal":
        if -claim.margin < low and high < claim.margin:
            return "reproduced"
        return "refuted" if low > claim.margin or high < -claim.margin else "not decided"
    if p >= _LEVEL:
        return "not decided"
    return "reproduced" if (mean > 0) == (claim.expect == "higher") else "refuted"


def _pairs(claim: Claim, frame: DataFrame, keys: Sequence[str], metric: str) -> np.ndarray:
    """Figures of both sides, means over the cells that both have, [seeds, 2]; see `over_cells`."""
    own = frames.at(frame, claim.at)
    first, second = {"method": claim.a}, {"method": claim.b}
    if claim.along is not None:
        values = [value for value in own[claim.along].tolist() if frames.name_of(value) != "none"]
        first, second = ({"method": claim.a, claim.along: values[place]} for place in (-1, 0)) if values else ({}, {})
    shared = [key for key in keys if key != claim.along]
    sides = []
    for side in (first, second):
        rows = frames.at(own, side)
        rows = rows[np.isfinite(rows[metric].astype(float))]
        sides.append(
            {
                (row["seed"], *(frames.name_of(row[key]) for key in shared)): float(row[metric])
                for row in rows.to_dict("records")
            }
        )
    return over_cells((cell[0], own, sides[1][cell]) for cell, own in sides[0].items() if cell in sides[1])
