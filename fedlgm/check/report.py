"""The report on a run, with verdicts, the stated and the proven epsilon, and attack rates."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from fedlgm import privacy
from fedlgm.check import claims  # noqa: F401  (registers its rules)
from fedlgm.check.proof import prove
from fedlgm.check.rules import RULES as RULES
from fedlgm.check.settings import Settings
from fedlgm.check.verdict import STATUSES, Status, Verdict
from fedlgm.privacy.guarantee import Relation

_TOLERANCE = 0.01  # relative or absolute error allowed in a stated epsilon, such as its rounding


@dataclass(frozen=True)
class Report:
    """A second opinion on one run.

    Attributes:
        settings: the settings of the run.
        verdicts: one verdict for each assumption that concerns the run.
        epsilon: epsilon that is proven for the described run at the stated delta; None if nothing
            is proven.
        relation: neighbouring relation of the proven figures.
        rates: upper bounds on the success of attacks; None if nothing is proven.

    Example:
        >>> report = check(Settings(
        ...     noise_multiplier=1.0, clipping="unit", sampler="shuffle", epochs=10, steps=6000,
        ...     batch_size=100, population=60_000, denominator="expected", delta=1e-5,
        ...     accounted_as="poisson", epsilon=1.1,
        ... ))
        >>> report.status, round(report.epsilon, 2), report.relation
        ('broken', 17.86, 'zero-out')
        >>> [verdict.rule for verdict in report.verdicts if verdict.status == "broken"]
        ['sampling', 'stated epsilon']
    """

    settings: Settings
    verdicts: tuple[Verdict, ...]
    epsilon: float | None
    relation: Relation
    rates: privacy.AttackRates | None

    @property
    def status(self) -> Status:
        """The status of the worst verdict."""
        return max((verdict.status for verdict in self.verdicts), key=STATUSES.index)

    @property
    def missing(self) -> tuple[str, ...]:
        """Names of the settings without which an assumption cannot be judged."""
        names = (name for verdict in self.verdicts for name in verdict.missing)
        return tuple(dict.fromkeys(names))

    def sentence(self) -> str:
        """Write a line with the stated epsilon, the proven epsilon, and what the proven epsilon
        means for attacks.
        """
        settings = self.settings
        at = "" if settings.delta is None else f" at delta {settings.delta:g}"
        stated = "none" if settings.epsilon is None else f"{settings.epsilon:.4g}{at}"
        if self.rates is None:
            return f"epsilon stated: {stated}; proven: none"
        who = "people" if settings.units_per_person > 1 else f"{settings.unit}s"
        proven = "none" if self.epsilon is None else f"{self.epsilon:.4g}{at}, {self.relation}"
        return f"epsilon stated: {stated}; proven: {proven}; {self.rates.sentence(who)}"

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a mapping of JSON values."""
        stated = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in asdict(self.settings).items()
            if value is not None
        }
        return {
            "schema": 1,
            "status": self.status,
            "verdicts": [
                {key: getattr(verdict, key) for key in ("rule", "status", "why")}
                for verdict in self.verdicts
            ],
            "missing": list(self.missing),
            "epsilon_stated": self.settings.epsilon,
            "epsilon_proven": self.epsilon,
            "delta": self.settings.delta,
            "unit": self.settings.unit,
            "relation": self.relation,
            "attack_rates": None if self.rates is None else self.rates.figures(),
            "settings": stated,
        }

    def __str__(self) -> str:
        lines = [f"{verdict.status:12}{verdict.rule}: {verdict.why}" for verdict in self.verdicts]
        return "\n".join([*lines, self.sentence()])


def check(settings: Settings, *reading: Verdict) -> Report:
    """Judge every assumption behind a run's stated epsilon, and compute an epsilon that is proven
    for the run as described.

    Args:
        settings: what the run does and what its authors state.
        reading: further verdicts, for example on what could not be read.

    Returns:
        The report. Its figures are upper bounds for the described mechanism. They cover this run
        alone, unless the setting `runs` is above 1.

    Raises:
        ConfigError: there are too many releases to account for.

    Example:
        >>> check(Settings(mechanism="ladp:published")).epsilon is None
        True
    """
    judged = ((name, rule(settings)) for name, rule in RULES.items())
    verdicts = [replace(verdict, rule=name) for name, verdict in judged if verdict is not None]
    verdicts += [replace(verdict, rule="reading") for verdict in reading]
    proof = prove(settings, verdicts)
    if proof.epsilon == math.inf:
        why = "There is too little noise for any useful figure."
        verdicts.append(Verdict("broken", why, rule="amount of noise"))
        proof = replace(proof, epsilon=None)
    verdicts += filter(None, [judge_statement(settings, proof.epsilon)])
    return Report(settings, tuple(verdicts), proof.epsilon, proof.relation, proof.rates)


def judge_statement(settings: Settings, proven: float | None) -> Verdict | None:
    """Judge whether the stated epsilon is at least the proven epsilon. Return None if either is
    missing.

    Example:
        >>> judge_statement(Settings(epsilon=1.0), 2.0).why
        'The stated epsilon 1 is below the proven epsilon 2.'
    """
    stated = settings.epsilon
    if stated is None or proven is None:
        return None
    if stated >= proven - max(_TOLERANCE, _TOLERANCE * proven):
        return Verdict("holds", "The stated epsilon is not below the proven one.", rule=_STATED)
    why = f"The stated epsilon {stated:.4g} is below the proven epsilon {proven:.4g}."
    return Verdict("broken", why, rule=_STATED)


_STATED = "stated epsilon"
