"""Deterministic checks without noise, which measure how far one client moves the whitened sum and
whether the client's data change the plan.

The checks need no statistics and take milliseconds. They assume that the noise follows the plan,
which the other audits test.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedlgm import privacy
from fedlgm.planning import charging
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.guarantee import SENSITIVITY_FACTOR
from fedlgm_lab.audits.result import AuditResult, Check
from fedlgm_lab.audits.subject import Subject, World
from fedlgm_lab.audits.whole_run import run_epsilon

_ROUNDING = 1 + 1e-6


@dataclass(frozen=True)
class ProbeReading:
    """What the probe found over all pairs of neighbouring populations that it tried.

    Attributes:
        ratio: largest distance between two neighbouring sums, in units of the noise, divided by the
            distance that the accountant assumes.
        changed: which figures of a plan differed between neighbours, in words; empty if none did.
        plan: the first round's plan.

    Example:
        >>> reading: ProbeReading = probe(Subject.of("snr-consistent", variant="published"))
        >>> reading.pure, reading.changed
        (False, 'bounds and noise scales')
    """

    ratio: float
    changed: str
    plan: ReleasePlan

    @property
    def pure(self) -> bool:
        """Whether neighbours always had the same plan."""
        return not self.changed


def probe(subject: Subject) -> ProbeReading:
    """Try the subject on neighbouring populations, in its first round and in a later round.

    Example:
        >>> reading = probe(Subject.of("snr-consistent"))
        >>> round(reading.ratio, 3), reading.pure
        (1.0, True)
    """
    ratio, changed = 0.0, ""
    plan: ReleasePlan | None = None
    for transcript in _transcripts(subject):
        for world, neighbour in subject.neighbours(transcript):
            plan = plan or world.plan
            changed = _difference(world.plan, neighbour.plan) or changed
            ratio = max(ratio, distance(world, neighbour) * _inverse_distance(world.plan))
    assert plan is not None
    return ProbeReading(ratio, changed, plan)


def distance(one: World, other: World) -> float:
    """Compute the norm of the difference of two sums in units of the first plan's noise: the l2
    norm for Gaussian noise, the l1 norm for Laplace noise.

    Example:
        >>> subject = Subject.of("snr-consistent")
        >>> one, other = next(iter(subject.neighbours(subject.start)))
        >>> 0 < distance(one, other) * one.plan.effective_multiplier <= 1
        True
    """
    if one.plan.size != other.plan.size:
        return math.inf
    difference = (one.total - other.total).abs().double().numpy()
    with np.errstate(divide="ignore", invalid="ignore"):
        whitened = np.where(difference > 0, difference / one.plan.scales, 0.0)
    return float(np.linalg.norm(whitened, 2 if one.plan.family == "gaussian" else 1))


def checks(reading: ProbeReading) -> tuple[Check, ...]:
    """Turn the reading into two checks: whitened sensitivity and plan purity.

    Example:
        >>> [check.passed for check in checks(probe(Subject.of("snr-consistent", variant="published")))]
        [True, False]
    """
    claims = reading.plan.protected or reading.plan.claim is not None
    unit = reading.plan.guarantee.unit
    return (
        Check(
            "whitened sensitivity",
            reading.ratio <= _ROUNDING or not claims,
            f"one {unit} moves the sum by {reading.ratio:.6g} of what is accounted for"
            if claims
            else "nothing is claimed",
        ),
        Check(
            "plan purity",
            reading.pure,
            f"no {unit}'s data changes the plan"
            if reading.pure
            else f"one {unit}'s data changes {reading.changed}",
        ),
    )


def audit_by_probe(subject: Subject, reading: ProbeReading) -> AuditResult:
    """Compute the epsilon that the probe's reading implies, on the assumption that the noise is as
    planned.

    Example:
        >>> subject = Subject.of("snr-consistent", epsilon=1.0)
        >>> result = audit_by_probe(subject, probe(subject))
        >>> result.passed, 0.99 < result.epsilon_lower <= result.epsilon_reported
        (True, True)
    """
    return AuditResult(
        subject=subject.name,
        method="probe",
        epsilon_lower=_epsilon(subject, reading),
        epsilon_reported=subject.reported_epsilon(reading.plan),
        delta=subject.delta,
        confidence=1.0,
        guarantee=reading.plan.guarantee.sentence(noise_reproducible=False),
        checks=checks(reading),
    )


def _epsilon(subject: Subject, reading: ProbeReading) -> float:
    plan, ratio = reading.plan, reading.ratio
    if ratio <= _ROUNDING:
        ratio = min(ratio, 1.0)
    if ratio == 0:
        return 0.0
    if math.isinf(ratio) or plan.effective_multiplier == 0:
        return math.inf
    run, multipliers = charging.of(subject.facts).run, subject.charged_multipliers(plan)
    if run is not None:
        return run_epsilon(run, 1.0 / multipliers, ratio, subject.delta)
    events = charging.of(subject.facts).events(plan, multipliers / ratio)
    exact = [(privacy.events.as_gaussian(event), count) for event, count in events]
    return privacy.accounting.composed_epsilon(exact, subject.delta)


def _inverse_distance(plan: ReleasePlan) -> float:
    """Compute the inverse of the distance that the accountant assumes; 1 if neither the plan nor
    the facts have noise, because any distance is then too large.
    """
    factor = SENSITIVITY_FACTOR[plan.facts.relation]
    multiplier = plan.effective_multiplier
    if multiplier == 0 and not plan.protected:
        multiplier = plan.facts.noise_multiplier
    return multiplier / factor if multiplier > 0 else 1.0


def _difference(plan: ReleasePlan, other: ReleasePlan) -> str:
    """Name the figures in which two plans differ; empty if the plans are equal bit by bit."""
    if plan.to_json() == other.to_json() and plan.denominator == other.denominator:
        return ""
    names = {
        "the released layers": (plan.released, other.released),
        "bounds": (plan.clip, other.clip),
        "noise scales": (plan.sigma, other.sigma),
        "the denominator": (np.array(plan.denominator), np.array(other.denominator)),
    }
    differences = [
        name for name, (a, b) in names.items() if a.shape != b.shape or not np.array_equal(a, b)
    ]
    return " and ".join(differences) or "the plan"


def _transcripts(subject: Subject) -> list[Transcript]:
    return [subject.start] if subject.private_plan else [subject.start, subject.later()]
