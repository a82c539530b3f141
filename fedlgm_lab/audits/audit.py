"""The audit of a mechanism: one entry point for every method of auditing."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast, get_args

import torch

from fedlgm.aggregation import BoundedSum
from fedlgm.errors import ConfigError
from fedlgm.extension.loader import users_code
from fedlgm.extension.registration import registers
from fedlgm.extension.registry import Registry
from fedlgm.noise.keys import KeyRing
from fedlgm.noise.release import release
from fedlgm.noise.run_noise import RunNoise
from fedlgm.planning import charging
from fedlgm.planning.plan import ReleasePlan
from fedlgm_lab.audits.adversaries import by_adversary
from fedlgm_lab.audits.canaries import Canaries, check_auditable
from fedlgm_lab.audits.distinguisher import TRIALS, audit_mechanism_by_trials
from fedlgm_lab.audits.one_run import audit_record
from fedlgm_lab.audits.probe import ProbeReading, audit_by_probe, checks, probe
from fedlgm_lab.audits.record import CanaryRecord, Presence
from fedlgm_lab.audits.result import AuditResult, Method, Reported
from fedlgm_lab.audits.scores import CONFIDENCE, check_confidence
from fedlgm_lab.audits.subject import Subject

Progress = Callable[[int, int], None]
OBSERVATIONS = 16000
_ELEMENTS = 1 << 23  # largest number of values in the directions of all canaries together
# largest number of coordinates, counted over all rounds, up to which an audit draws the noise of
# every round if the rounds are one mechanism
_COORDINATES = 1 << 25


@dataclass(frozen=True)
class Audit:
    """Settings for the audit of a mechanism.

    Attributes:
        method: method of the audit. "auto" chooses "one-run-gaussian" for public plans with
            Gaussian noise under central trust, and "probe" for noise that the nodes add in shares,
            because exact samples of such noise are slow to draw. In all other cases "auto" chooses
            "distinguisher". "probe" is deterministic; "distinguisher" repeats one release many
            times; "one-run-gaussian" and "one-run" put canaries into one run. A user's method is
            registered (`register`) or named as "package.module:name".
        confidence: confidence of the whole audit: releases that are as reported pass with at least
            this probability; see `audits.level`.
        trials: number of releases of each of two neighbouring populations, for "distinguisher".
        canaries: number of canaries, for the one-run methods; None chooses enough for a tight
            bound.
        seed: seed of the audit, including its noise; None draws the seed from the operating system.

    Raises:
        ConfigError: the method is unknown, or the confidence is out of range.
    """

    method: str = "auto"
    confidence: float = CONFIDENCE
    trials: int = TRIALS
    canaries: int | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        _own(self.method)
        check_confidence(self.confidence)

    def mechanism(self, subject: Subject, progress: Progress | None = None) -> AuditResult:
        """Audit a mechanism on artificial updates.

        Whatever the method, the audit also checks the whitened sensitivity and that the plan does
        not depend on a client's data.

        Args:
            subject: mechanism to audit.
            progress: called with (steps done, all steps).

        Raises:
            ConfigError: there are too few trials or canaries, the mechanism releases nothing, a
                single-release method is used for a run whose rounds are one mechanism, or a one-run
                method is used for releases that cannot hold canaries.

        Example:
            >>> Audit(method="probe").mechanism(Subject.of("snr-consistent")).passed
            True
        """
        started, reading = time.perf_counter(), probe(subject)
        method = self._resolve_method(subject)
        if method == "probe":
            result = audit_by_probe(subject, reading)
        else:
            user_audit = _own(self.method)
            if (
                user_audit is None
                and method != "one-run-gaussian"
                and charging.of(subject.facts).run is not None
            ):
                raise ConfigError(
                    f"{method} audits separate releases, but the rounds of this run are one "
                    "mechanism (correlated noise, or restricted participation): use "
                    "'one-run-gaussian' or 'probe'"
                )
            if user_audit is not None:
                with users_code(f"audit {self.method!r}", user_audit):
                    result = user_audit(subject, self, progress)
                if not isinstance(result, AuditResult):
                    raise ConfigError(
                        f"audit {self.method!r} must return an AuditResult, got {result!r}"
                    )
            elif method == "distinguisher":
                result = audit_mechanism_by_trials(
                    subject,
                    trials=self.trials,
                    confidence=self.confidence,
                    seed=self.seed,
                    on_trial=progress,
                )
            else:
                result = self._one_run(subject, reading, method, progress)
            result = dataclasses.replace(result, checks=(*checks(reading), *result.checks))
        rows = tuple(by_adversary(subject, reading.plan, reading.ratio, self.confidence))
        if rows:  # the rows rest on measured noise, so their confidence is below 1
            result = dataclasses.replace(result, confidence=self.confidence)
        return dataclasses.replace(result, adversaries=rows, seconds=time.perf_counter() - started)

    def _resolve_method(self, subject: Subject) -> Method:
        if self.method != "auto":
            return cast(Method, self.method)
        if subject.alignable:
            return "one-run-gaussian"
        return "distinguisher" if subject.facts.noised_by.alone else "probe"

    def _one_run(
        self, subject: Subject, reading: ProbeReading, method: Method, progress: Progress | None
    ) -> AuditResult:
        if subject.private_plan:
            check_auditable(reading.plan)
            raise ConfigError(
                f"the plans of {subject.name} depend on private data: use method = 'distinguisher'"
            )
        presence: Presence = "release" if method == "one-run-gaussian" else "run"
        reported = reported_of(subject, reading.plan)
        record = watch(subject, self._count(subject, presence), presence, self.seed, progress)
        return audit_record(
            record, subject.layers, reported, method=method, confidence=self.confidence
        )

    def _count(self, subject: Subject, presence: Presence) -> int:
        if self.canaries is not None:
            return self.canaries
        if presence == "run":
            return min(1000, max(2, _ELEMENTS // subject.layers.size))
        separation = subject.facts.sampling.separation or 1
        return plenty(subject.layers.size, -(-watched_rounds(subject) // separation))


OwnAudit = Callable[[Subject, Audit, Progress | None], AuditResult]
"""A user's audit: (subject, settings, progress) -> result. `reported_of(...).audited` builds the
result.
"""
_METHODS: Registry[OwnAudit | None] = Registry("audit method", dict.fromkeys(get_args(Method)))
"""The registered audits by name; the value is None for the methods that are part of the library."""


@registers
def register(name: str, audit: OwnAudit) -> None:
    """Register an audit under a name, for `Audit(method=name)` and `fedlgm audit --method NAME`.

    As for every method, the library also checks the whitened sensitivity and that the plan does not
    depend on a client's data.

    Args:
        name: a name that no audit has yet.
        audit: (subject, settings, progress) -> `AuditResult`.

    Raises:
        ConfigError: the name is taken.

    Example:
        >>> def nothing_found(subject, settings, progress):
        ...     reported = reported_of(subject, subject.method.plan(subject.start))
        ...     return reported.audited(settings.method, 0.0, settings.confidence, {}, 0)
        >>> register("blind", nothing_found)
        >>> Audit(method="blind").mechanism(Subject.of("uniform")).epsilon_lower
        0.0
    """
    _METHODS.add(name, audit)


def _own(name: str) -> OwnAudit | None:
    """Find a user's audit by its registered name or by a reference; None for a method of the
    library.
    """
    if name in get_args(Method):
        return None
    form = "(subject, settings, progress) -> AuditResult"
    function: OwnAudit = _METHODS.find_function(name, form, None, None, None)
    return function


def reported_of(subject: Subject, plan: ReleasePlan) -> Reported:
    """Collect the reported figures of releases that follow a plan of the subject.

    Args:
        subject: the mechanism that is audited.
        plan: a round's plan.

    Example:
        >>> subject = Subject.of("snr-consistent", epsilon=1.0)
        >>> reported = reported_of(subject, subject.method.plan(subject.start))
        >>> round(reported.epsilon, 4), reported.multipliers.shape
        (1.0, (4,))
    """
    return Reported(
        subject.name,
        subject.reported_epsilon(plan),
        subject.delta,
        subject.multipliers(plan),
        subject.facts.sampling.rate,
        subject.facts.relation,
        plan.guarantee.sentence(noise_reproducible=False),
        charging.of(subject.facts).run,
    )


def plenty(size: int, rounds: int) -> int:
    """Choose a number of canaries that gives a tight bound, for audits that train nothing.

    Args:
        size: number of coordinates of a release.
        rounds: number of rounds in which a canary takes part.

    Example:
        >>> plenty(size=100, rounds=4)  # two per coordinate
        200
    """
    return max(2, min(OBSERVATIONS // rounds, _ELEMENTS // size, 2 * size))


def watched_rounds(subject: Subject) -> int:
    """Count the rounds that an audit of single releases runs: all rounds of a short run, the first
    20 rounds of a long run.

    If the rounds are one mechanism, the audit runs all rounds, unless drawing their noise would
    take too long.

    Example:
        >>> watched_rounds(Subject.of("snr-consistent", rounds=300))
        20
    """
    rounds = subject.facts.rounds
    if charging.of(subject.facts).run is not None and rounds * subject.layers.size <= _COORDINATES:
        return rounds
    return min(rounds, 20)


def watch(
    subject: Subject,
    count: int,
    presence: Presence,
    seed: int | None = None,
    progress: Progress | None = None,
    publish: Callable[..., torch.Tensor] = release,
) -> CanaryRecord:
    """Run a mechanism with canaries through the library's public functions: plan, bounded sum,
    noise and transcript.

    Args:
        subject: mechanism to run, on artificial client updates.
        count: number of canaries.
        presence: see `Canaries`.
        seed: seed of the canaries and of the noise, whose key rings are separate; None draws the
            seed from the operating system.
        progress: called with (round, number of rounds).
        publish: the release function. Pass a function with a defect to test whether an audit
            notices the defect.

    Example:
        >>> record = watch(Subject.of("snr-consistent", rounds=2), count=8, presence="release", seed=1)
        >>> record.layer_aligned.shape  # rounds, canaries, layers
        (2, 8, 3)
    """
    ring = KeyRing.from_seed(seed)
    keys = ring.derive(b"noise of an audit")
    canaries = Canaries(
        subject.layers,
        count,
        ring.derive(b"canaries"),
        presence=presence,
        rate=subject.facts.sampling.rate,
    )
    rounds = watched_rounds(subject) if presence == "release" else subject.facts.rounds
    transcript, generator, run_noise = (
        subject.start,
        torch.Generator().manual_seed(subject.seed),
        RunNoise(),
    )
    for round_ in range(1, rounds + 1):
        plan = subject.method.plan(transcript)
        check_auditable(plan)
        block = BoundedSum.empty(plan)
        subject.add(
            block, [torch.randn(subject.layers.size, generator=generator) for _ in range(2)]
        )
        total = block.total
        canaries.insert(round_, plan, total)
        total = publish(total, plan, keys, round_, run_noise=run_noise)
        canaries.observe(round_, plan, total)
        mean = (total / plan.denominator).float()
        transcript = transcript.extend(transcript.models[-1] + plan.expand(mean), mean, plan)
        if progress is not None:
            progress(round_, rounds)
    return canaries.record()


__all__ = ["Audit", "OwnAudit", "register", "reported_of", "watch", "watched_rounds"]
