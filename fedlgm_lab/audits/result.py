"""The result of an audit: its figures, its checks and a row per layer, in one frozen object.

>>> reported = Reported("a release", epsilon=1.0, delta=1e-5, multipliers=np.array([4.0]))
>>> row = LayerRow("last", 100, epsilon_lower=1.2, epsilon_planned=0.7)
>>> check = Check("plan purity", True, "no client's data changes the plan")
>>> result: AuditResult = reported.audited("one-run-gaussian", 0.8, 0.999, {}, 200, layers=[row], checks=(check,))
>>> result.epsilon_lower, result.exceeded, result.passed
(1.2, True, False)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from fedlgm.privacy.guarantee import Relation
from fedlgm.privacy.whole_run import WholeRun

Method = Literal["auto", "probe", "distinguisher", "one-run-gaussian", "one-run"]


@dataclass(frozen=True)
class Reported:
    """Figures that were reported for the audited releases.

    Attributes:
        subject: description of the audited releases.
        epsilon: the proven epsilon, or the claimed epsilon if none is proven; `inf` if none is
            claimed either.
        delta: delta at which the epsilon is stated.
        multipliers: planned effective noise multiplier of every release, [T]; watched releases come
            first.
        rate: sampling rate q of each release.
        relation: neighbouring relation.
        guarantee: the guarantee in one line.
        run: the run as one mechanism; None if its rounds are charged one by one.
    """

    subject: str
    epsilon: float
    delta: float
    multipliers: np.ndarray
    rate: float = 1.0
    relation: Relation = "add-remove"
    guarantee: str = ""
    run: WholeRun | None = None

    def audited(
        self,
        method: str,
        lower: float,
        confidence: float,
        scores: dict[str, np.ndarray],
        observations: int,
        *,
        layers: Sequence[LayerRow] = (),
        checks: tuple[Check, ...] = (),
    ) -> AuditResult:
        """Build the result of an audit of these releases; the arguments are attributes of
        `AuditResult`.

        A bound from a single layer also holds for the complete release, so the audit reports the
        largest bound.
        """
        return AuditResult(
            subject=self.subject,
            method=method,
            epsilon_lower=max([lower, *(row.epsilon_lower for row in layers)]),
            epsilon_reported=self.epsilon,
            delta=self.delta,
            confidence=confidence,
            guarantee=self.guarantee,
            observations=observations,
            layers=tuple(layers),
            checks=checks,
            scores=scores,
        )


@dataclass(frozen=True)
class Check:
    """One condition that must hold independently of the scores.

    Attributes:
        name: name of the condition.
        passed: whether the condition holds.
        detail: the figure that supports this finding, in words.
    """

    name: str
    passed: bool
    detail: str


@dataclass(frozen=True)
class LayerRow:
    """Lower bound on epsilon from a single layer of the releases.

    Attributes:
        layer: name of the layer.
        size: number d_j of the layer's coordinates.
        epsilon_lower: lower bound from this layer alone, which also bounds the whole release.
        epsilon_planned: epsilon of the plan's noise if only this layer were released.
    """

    layer: str
    size: int
    epsilon_lower: float
    epsilon_planned: float


@dataclass(frozen=True)
class AdversaryRow:
    """Lower bound on the epsilon against one of several adversaries.

    The bound follows from the noise of the nodes whose shares this adversary does not know.

    Example:
        >>> AdversaryRow("readers", nodes=20, epsilon_lower=6.7, epsilon_reported=7.3).nodes
        20

    Attributes:
        adversary: name of the adversary.
        nodes: number of nodes whose shares of the noise the adversary does not know.
        epsilon_lower: lower bound on the epsilon against the adversary.
        epsilon_reported: the reported epsilon against the adversary.
    """

    adversary: str
    nodes: int
    epsilon_lower: float
    epsilon_reported: float


@dataclass(frozen=True)
class AuditResult:
    """Outcome of one audit.

    Attributes:
        subject: what was audited.
        method: the audit's method.
        epsilon_lower: lower bound on the epsilon of the releases.
        epsilon_reported: the proven epsilon, or the claimed epsilon if none is proven; `inf` if
            none is claimed either.
        delta: delta of both epsilons.
        confidence: lower bound on the probability that releases that are as reported pass the audit
            and that `epsilon_lower` does not exceed the true epsilon; 1 for methods without
            statistics.
        guarantee: the releases' guarantee, in one line.
        observations: number of scores from which the bound is computed.
        layers: one row per layer, if the method examines layers.
        checks: further conditions that must hold.
        scores: scores of canaries or trials that were included ("inside") and left out ("outside"),
            for pictures.
        adversaries: one row per adversary, if the guarantee states several epsilons.
        seconds: wall-clock time of the audit.
    """

    subject: str
    method: str
    epsilon_lower: float
    epsilon_reported: float
    delta: float
    confidence: float
    guarantee: str = ""
    observations: int = 0
    layers: tuple[LayerRow, ...] = ()
    checks: tuple[Check, ...] = ()
    scores: dict[str, np.ndarray] = field(default_factory=dict, repr=False, compare=False)
    adversaries: tuple[AdversaryRow, ...] = ()
    seconds: float = 0.0

    @property
    def exceeded(self) -> bool:
        """Whether a bound exceeds the epsilon that was reported for it."""
        pairs = [(self.epsilon_lower, self.epsilon_reported)]
        pairs += [(row.epsilon_lower, row.epsilon_reported) for row in self.adversaries]
        return any(lower > reported * (1 + 1e-9) for lower, reported in pairs)

    @property
    def passed(self) -> bool:
        """Whether nothing contradicts the reported figures."""
        return not self.exceeded and all(check.passed for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Convert the result to values that JSON can hold, without the scores."""
        return {
            "subject": self.subject,
            "method": self.method,
            "epsilon_lower": float(self.epsilon_lower),
            "epsilon_reported": float(self.epsilon_reported),
            "delta": self.delta,
            "confidence": self.confidence,
            "passed": self.passed,
            "guarantee": self.guarantee,
            "observations": self.observations,
            "layers": [vars(row) for row in self.layers],
            "checks": [vars(check) for check in self.checks],
            "adversaries": [vars(row) for row in self.adversaries],
            "seconds": self.seconds,
        }
