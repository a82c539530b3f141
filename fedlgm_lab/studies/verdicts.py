"""Decides the outcomes of claims by tests for each form of claim, with Holm's correction over a
study.

A study has three families of tests: tests of the claims themselves, tests whether differences are
level, and tests of the papers' effects. Each family is corrected over all claims of the study. The
probability that a study contains a false outcome of a family is therefore at most 5 %.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from fedlgm_lab.studies.claim import Claim
from fedlgm_lab.studies.statistics import LEVEL, Difference, holm, p_at, seeds_to_reject

Outcome = Literal[
    "reproduced", "refuted", "level", "effect excluded", "not decided", "fragile", "seeds left out"
]


@dataclass(frozen=True)
class Case:
    """A claim with the figures of its runs.

    Attributes:
        claim: the claim.
        differences: the claim's difference, or the differences between neighbours in a ranking.
        margin: largest difference that counts as level; 0 if no difference does.
        complete: whether both sides have a figure for every seed. Runs that diverge or fail are not
            a random sample, so such a claim is not decided by the other seeds.
    """

    claim: Claim
    differences: Sequence[Difference]
    margin: float
    complete: bool = True

    @property
    def has_runs(self) -> bool:
        """Whether at least two seeds have figures of both sides."""
        return not any(math.isnan(tested.mean) for tested in self.differences)

    @property
    def sign(self) -> int:
        """-1 if the claim expects `a` to be lower; otherwise 1."""
        return -1 if self.claim.expect == "lower" else 1

    @property
    def shown(self) -> Difference:
        """The claim's difference; in a ranking, the difference between the two neighbours that
        support the ranking least.
        """
        return min(self.differences, key=lambda tested: self.sign * tested.mean)

    @property
    def bounds(self) -> tuple[float, ...]:
        """Values of the difference at which the claim and its contrary meet."""
        claim = self.claim
        if claim.expect == "equal":
            return (-claim.margin, claim.margin)
        return (-claim.margin if claim.expect == "not lower" else self.sign * claim.at_least,)

    @property
    def supported(self) -> bool:
        """Whether the estimate is on the claim's side of the bounds."""
        if self.claim.expect == "equal":
            return abs(self.shown.mean) < self.claim.margin
        return self.sign * self.shown.mean > self.sign * self.bounds[0]

    def p(self) -> float:
        """Compute the p-value for the claim, if the estimate supports the claim, or for its
        contrary.

        Equality holds only if both bounds are rejected, and a ranking only if the bounds of all its
        steps are rejected. One reversed step refutes a ranking, so that p-value is corrected for
        the number of steps.
        """
        if self.claim.expect == "equal" and not self.supported:
            return p_at(self.shown, math.copysign(self.claim.margin, self.shown.mean))
        if self.supported:
            return max(p_at(tested, end) for tested in self.differences for end in self.bounds)
        (end,) = self.bounds
        reversed_steps = [
            tested
            for tested in self.differences
            if self.sign * tested.mean <= self.sign * self.bounds[0]
        ]
        return min(1.0, len(self.differences) * min(p_at(tested, end) for tested in reversed_steps))

    def p_level(self) -> float:
        """Compute the p-value of the hypothesis that the difference is at least the margin, whose
        rejection shows that the difference is level; 1 if the estimate is not within the margin.
        """
        if not self.margin or abs(self.shown.mean) >= self.margin:
            return 1.0
        return max(p_at(self.shown, end) for end in (-self.margin, self.margin))

    def p_effect(self) -> float:
        """Compute the p-value of the hypothesis that the effect is as large as the paper states, if
        the estimate is smaller; otherwise 1.
        """
        effect = self.claim.effect
        if effect is None or self.sign * (effect - self.shown.mean) <= 0:
            return 1.0
        return p_at(self.shown, effect)

    def seeds_needed(self, claims: int) -> int | None:
        """Compute the least number of seeds that would decide an undecided claim, at the strictest
        step of Holm's method. None if there are no runs, or if more than `statistics.MOST_SEEDS`
        seeds would be needed.

        Args:
            claims: number of the study's claims.
        """
        if not self.has_runs:
            return None
        ways: list[Sequence[float]] = [self.bounds]
        if not self.supported and self.claim.expect == "equal":
            ways = [[math.copysign(self.claim.margin, self.shown.mean)]]
        if self.p_level() < 1:
            ways.append((-self.margin, self.margin))
        if self.p_effect() < 1 and self.claim.effect is not None:
            ways.append((self.claim.effect,))
        steps = self.differences if self.supported else [self.shown]
        counts = []
        for way in ways:
            tested = steps if way is ways[0] else [self.shown]
            found = [seeds_to_reject(step, way, LEVEL / claims) for step in tested]
            counts += [max(n for n in found if n is not None)] if None not in found else []
        return min(counts, default=None)


@dataclass(frozen=True)
class Verdict:
    """The outcome of a claim.

    Attributes:
        outcome: the outcome.
        p_holm: p-value for the claim or its contrary, adjusted for the number of the study's
            claims.
    """

    outcome: Outcome
    p_holm: float


def decide(cases: Sequence[Case]) -> list[Verdict]:
    """Decide the outcomes of a study's claims.

    Each claim itself is tested first. If this test does not decide a claim of a direction, the
    claim may be level, or the paper's effect may be excluded.
    """
    own = _adjust(cases, Case.p)
    level = _adjust(cases, Case.p_level)
    effect = _adjust(cases, Case.p_effect)
    verdicts = []
    for index, case in enumerate(cases):
        outcome: Outcome = "not decided"
        if not case.complete:
            outcome = "seeds left out"
        elif own[index] < LEVEL:
            outcome = "reproduced" if case.supported else "refuted"
        elif level[index] < LEVEL:
            outcome = "level"
        elif effect[index] < LEVEL:
            outcome = "effect excluded"
        verdicts.append(Verdict(outcome, own[index]))
    return verdicts


def _adjust(cases: Sequence[Case], p: Callable[[Case], float]) -> list[float]:
    """Compute the p-values of a family, adjusted by Holm's method; 1 for claims without runs."""
    tested = [index for index, case in enumerate(cases) if case.has_runs]
    adjusted = dict(zip(tested, holm([p(cases[index]) for index in tested]), strict=True))
    return [adjusted.get(index, 1.0) for index in range(len(cases))]
