"""Tests of a paper's claims on the figures of a study's runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pandas import DataFrame

from fedlgm_lab.studies import frames
from fedlgm_lab.studies.claim import Claim
from fedlgm_lab.studies.results import Sides, left_out, pair_seeds
from fedlgm_lab.studies.statistics import MOST_SEEDS, Difference, over_cells
from fedlgm_lab.studies.verdicts import Case, Outcome, decide
from simulations.runs.headline import is_share


@dataclass(frozen=True)
class Checked(Difference):
    """A claim with its result.

    Attributes:
        mean, low, high, p, seeds: statistics of the difference, paired by seed over all its cells
            (see `Difference`). NaN if fewer than two seeds have figures of both sides. For a
            ranking, these are the statistics of the difference between the two neighbours that
            support the ranking least.
        says, paper, metric, expect, effect: see `Claim`.
        margin: largest difference that still counts as equal, as not lower or as level (see
            `Claim`).
        p_holm: p-value of the test that decides whether the claim or its contrary holds, adjusted
            for the number of the study's claims.
        outcome: see `check`.
        needed: number of seeds that would decide an undecided claim; None if the claim is decided
            or the number is not known.
        evidence: the figures of both sides, with their seeds.
    """

    says: str
    paper: str
    metric: str
    expect: str
    effect: float | None
    margin: float
    p_holm: float
    outcome: Outcome
    needed: int | None
    evidence: frozenset[tuple[int, Any, float]] = field(default=frozenset(), repr=False)

    @property
    def verdict(self) -> str:
        """The outcome in words.

        Example:
            >>> figures = (0.001, -0.002, 0.004, 0.4, 5, "a leads", "", "accuracy", "higher", None)
            >>> Checked(*figures, 0.01, 1.0, "level", None).verdict
            'level within 1 point'
            >>> Checked(*figures, 0.0, 1.0, "not decided", 12).verdict
            'not decided (12 seeds would decide)'
        """
        scale, unit = self._unit()
        if self.outcome == "level":
            amount = scale * self.margin
            return f"level within {amount:.3g}{unit[:-1] if amount == 1 else unit}"
        if self.outcome == "effect excluded":
            return "paper's effect excluded"
        if math.isnan(self.mean) and self.outcome == "not decided":
            return "not decided (fewer than two seeds)"
        if self.outcome == "not decided":
            seeds = f"more than {MOST_SEEDS}" if self.needed is None else self.needed
            return f"not decided ({seeds} seeds would decide)"
        return self.outcome

    def in_words(self) -> str:
        """Describe the difference in words, with shares in percentage points."""
        if math.isnan(self.mean):
            return "no interval"
        scale, unit = self._unit()
        mean, low, high = (f"{scale * value:+.3g}" for value in (self.mean, self.low, self.high))
        return (
            f"{self.metric} {mean}{unit}, 95 % interval {low} to {high}, {self.seeds} seeds, "
            f"p {self.p_holm:.2g} after Holm's correction"
        )

    def to_row(self) -> dict[str, Any]:
        """Return the fields that a study's file contains: all fields except the evidence."""
        return {name: value for name, value in vars(self).items() if name != "evidence"}

    def _unit(self) -> tuple[int, str]:
        return (100, " points") if is_share(self.metric) else (1, "")


def check(
    claims: Sequence[Claim], frame: DataFrame, keys: Sequence[str], headline: str
) -> list[Checked]:
    """Test claims on a study's figures.

    A claim of a direction is reproduced if the difference has this direction and exceeds `at_least`
    (0 by default), and refuted if it does not. Equality is reproduced if the difference is within
    the margin, and refuted if the difference is beyond the margin. "Not lower" is reproduced if the
    difference is above -margin, and refuted if the difference is below -margin. A ranking is
    reproduced if all neighbours are in the claimed order, and refuted if any two neighbours are in
    the opposite order. Each of these outcomes needs p < 0.05, adjusted by Holm's method over the
    study's claims.

    If neither outcome is decided, a claim of a direction may be "level" (the difference is within
    the claim's margin), or the outcome may be "effect excluded" (the difference falls short of the
    paper's). These outcomes also need p < 0.05, adjusted in the same way. The outcome is "seeds
    left out" if some seed lacks a figure of one side, because a run diverged or failed.

    Args:
        claims: the study's claims.
        frame: see `Study.to_frame`.
        keys: see `Study.compared_keys`.
        headline: metric for claims that name none.
    """
    metrics = [claim.metric or headline for claim in claims]
    pairs = [
        _figures(claim, frame, keys, metric) for claim, metric in zip(claims, metrics, strict=True)
    ]
    cases = [
        Case(claim, [over_cells(rows) for rows in steps], claim.level_margin(metric), complete)
        for claim, metric, (steps, complete) in zip(claims, metrics, pairs, strict=True)
    ]
    return [
        Checked(
            **vars(case.shown),
            says=case.claim.says,
            paper=case.claim.paper,
            metric=metric,
            expect=case.claim.expect,
            effect=case.claim.effect,
            margin=case.claim.margin or case.margin,
            p_holm=verdict.p_holm,
            outcome=verdict.outcome,
            needed=case.seeds_needed(len(cases)) if verdict.outcome == "not decided" else None,
            evidence=frozenset(
                (side, seed, figure)
                for rows in steps
                for seed, *both in rows
                for side, figure in enumerate(both)
            ),
        )
        for case, metric, (steps, _), verdict in zip(
            cases, metrics, pairs, decide(cases), strict=True
        )
    ]


def weigh(paper: Sequence[Checked], tuned: Sequence[Checked]) -> list[Checked]:
    """Mark a claim as "fragile" if its outcome at tuned settings differs from its outcome at the
    paper's settings.

    No conclusion may rest on a fragile claim.

    Args:
        paper: the claims at the paper's settings.
        tuned: the same claims, at settings for which every method was searched in the same way.

    Example:
        >>> figures = (0.1, 0.05, 0.15, 0.01, 5, "a leads", "", "accuracy", "higher", None, 0.01)
        >>> one = Checked(*figures, 0.01, "reproduced", None)
        >>> [claim.outcome for claim in weigh([one], [replace(one, outcome="refuted")])]
        ['fragile']
    """
    return [
        one if one.outcome == other.outcome else replace(one, outcome="fragile", needed=None)
        for one, other in zip(paper, tuned, strict=True)
    ]


def count_once(checked: Sequence[Checked]) -> list[Checked]:
    """Leave out claims whose runs are all among the runs of another claim.

    A paper's table and figure can have runs in common; claims that are made about both then count
    once.

    Example:
        >>> figures = (0.1, 0.05, 0.15, 0.01, 5, "a leads", "", "accuracy", "higher", None, 0.01)
        >>> table = Checked(*figures, 0.01, "reproduced", None, frozenset({(0, 1, 0.7), (1, 1, 0.6)}))
        >>> figure = replace(table, evidence=table.evidence | {(0, 2, 0.7), (1, 2, 0.5)})
        >>> len(count_once([table, figure])), len(count_once([table, table]))
        (1, 1)
    """

    def repeats(index: int, other: int) -> bool:
        mine, others = checked[index].evidence, checked[other].evidence
        return bool(mine) and (mine < others or (mine == others and other < index))

    places = range(len(checked))
    return [
        checked[index] for index in places if not any(repeats(index, other) for other in places)
    ]


def _figures(
    claim: Claim, frame: DataFrame, keys: Sequence[str], metric: str
) -> tuple[list[list[tuple[Any, float, float]]], bool]:
    """Collect the triples (seed, figure of one side, figure of the other side) of all cells that
    both sides have, in one list for each step of a ranking. Also tell whether both sides have a
    figure for every seed.
    """
    subset = frames.at(frame, claim.at)
    steps: list[Sides] = [("method", claim.a, claim.b)]
    if claim.then is not None:
        steps = [("method", *both) for both in itertools.pairwise(claim.labels)]
    if claim.along is not None:
        values = [value for value in subset[claim.along].tolist() if not frames.is_missing(value)]
        subset = frames.at(subset, {"method": claim.a})
        steps = [(claim.along, *((values[-1], values[0]) if values else (None, None)))]
    cells = list(frames.cells_of(subset, [key for key in keys if key != claim.along], {}))
    found, complete = [], True
    for sides in steps:
        rows: list[tuple[Any, float, float]] = []
        for cell in cells:
            both, _ = pair_seeds(subset, cell, sides, metric)
            rows += both.itertuples(name=None)
            complete = complete and not left_out(subset, cell, sides, both)
        found.append(rows)
    return found, complete
