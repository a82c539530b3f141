"""Claims that a paper, or a page, makes about a study's figures."""

from __future__ import annotations

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from simulations.runs.headline import is_share

LEVEL_MARGIN = 0.01
"""Largest difference of shares that counts as level if a claim has no margin: one percentage point.
"""


class Claim(BaseModel):
    """A claim about the difference between two methods, about the difference between two settings
    of one method, or about the order of several methods.

    Attributes:
        says: the claim, in one sentence.
        paper: the paper's figures for the claim, and where the paper prints them; empty if no paper
            makes the claim.
        a: label of a method.
        b: label of the method with which `a` is compared; not used with `along` or `then`.
        along: a key of the grid. `a` at the key's last value is compared with `a` at the first
            value.
        then: for a ranking, labels of the methods that follow `a`, in this order.
        at: values of the grid's keys to which the claim is restricted.
        metric: column of the frame; default: the task's headline.
        expect: expected order of `a`'s figures: "higher", "lower", "equal" or "not lower". "equal"
            means that the difference is within `margin`. "not lower" means that `a` is higher, or
            lower by less than `margin` (non-inferiority).
        at_least: smallest difference that is claimed, in the metric's unit; 0 if only a direction
            is claimed.
        margin: largest difference that counts as equal, as not lower or, for a direction, as level.
            If the claim is about a direction and the metric is a share, the default is one
            percentage point, or half of `effect` if that is less. Other metrics have no default.
        effect: difference a - b that the paper states, in the metric's unit; the smallest
            difference if the paper states several.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    says: str
    paper: str = ""
    a: str
    b: str | None = None
    along: str | None = None
    then: list[str] | None = Field(default=None, min_length=2)
    at: dict[str, Any] = {}
    metric: str | None = None
    expect: Literal["higher", "lower", "equal", "not lower"] = "higher"
    at_least: float = Field(default=0.0, ge=0)
    margin: float = Field(default=0.0, ge=0)
    effect: float | None = None

    @model_validator(mode="after")
    def _one_comparison(self) -> Claim:
        if (self.b, self.along, self.then).count(None) != 2:
            raise ValueError(
                "a claim compares with `b`, `along` a key, or ranks with `then`: give one of them"
            )
        if not self.directed:
            if not self.margin:
                raise ValueError("expect = 'equal' and 'not lower' need a `margin`")
            if self.at_least or self.effect is not None or self.then is not None:
                raise ValueError(
                    "`at_least`, `effect` and `then` belong to expect = 'higher' and 'lower'"
                )
        elif self.then is not None and (self.margin or self.effect is not None):
            raise ValueError("a ranking with `then` has neither a `margin` nor an `effect`")
        elif self.effect is not None and (self.effect > 0) != (self.expect == "higher"):
            raise ValueError(
                f"`effect` is the paper's difference a - b, so it has the sign of expect = "
                f"{self.expect!r}; got {self.effect:g}"
            )
        return self

    @property
    def directed(self) -> bool:
        """Whether the claim is about a direction, and not about equality or non-inferiority."""
        return self.expect in ("higher", "lower")

    @property
    def labels(self) -> list[str]:
        """Labels of the methods that the claim compares."""
        return [self.a, *(self.then or []), *([] if self.b is None else [self.b])]

    def level_margin(self, metric: str) -> float:
        """Return the largest difference that counts as level, in the unit of a metric (see
        `margin`); 0 if no difference counts as level.
        """
        if not self.directed or self.then is not None:
            return 0.0
        default = LEVEL_MARGIN if is_share(metric) else 0.0
        return self.margin or min(default, abs(self.effect or math.inf) / 2)
