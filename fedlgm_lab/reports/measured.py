"""Measured attacks and audits of a run, which reports compare with the bounds on all attacks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedlgm.privacy import AttackRates
from fedlgm_lab.attacks.runs import results_file
from simulations.runs.folder import RunFolder


@dataclass(frozen=True)
class MeasuredRate:
    """Result of one attack at one rate of false alarms.

    Attributes:
        attack: its name.
        fpr: rate of false alarms.
        tpr: share of the members that it found.
        low: lower end of the interval of `tpr`.
        high: upper end.
        fpr_high: upper end of the interval of the rate of false alarms.
    """

    attack: str
    fpr: float
    tpr: float
    low: float
    high: float
    fpr_high: float


@dataclass(frozen=True)
class Measurements:
    """Attacks and audits that were measured on a run, with their unit.

    Attributes:
        unit: the run's unit.
        rates: rates of attacks on this unit.
        others: names of attacks on another unit; the bounds do not apply to these attacks.
        audited: lower bound on epsilon of an audit, and its delta; None without an audit.
    """

    unit: str
    rates: tuple[MeasuredRate, ...] = ()
    others: tuple[str, ...] = ()
    audited: tuple[float, float] | None = None

    @classmethod
    def of_run(cls, folder: RunFolder) -> Measurements:
        """Read the measurements in a run's folder.

        Raises:
            RunError: a file of results is damaged.
        """
        unit, attacks, audit = (
            folder.recipe().unit,
            results_file.read(folder),
            folder.audit_summary(),
        )
        rates = [
            MeasuredRate(name, **rate)
            for name, attack in attacks.items()
            if attack["unit"] == unit
            for rate in attack["rates"]
        ]
        others = tuple(name for name, attack in attacks.items() if attack["unit"] != unit)
        audited = (
            (float(audit["audited_epsilon"]), float(folder.verified_result()["delta"]))
            if "audited_epsilon" in audit
            else None
        )
        return cls(unit, tuple(rates), others, audited)

    def excesses(self, bounds: AttackRates) -> list[MeasuredRate]:
        """List the rates that contradict the bounds, because the lower end of their interval lies
        above the bound at the upper end of the interval of their false alarms.

        Example:
            >>> strong = MeasuredRate("an attack", 0.01, 0.9, 0.8, 0.95, 0.02)
            >>> len(Measurements("client", (strong,)).excesses(AttackRates.of_budget(1.0, 1e-5)))
            1
        """
        return [rate for rate in self.rates if rate.low > bounds.tpr(min(1.0, rate.fpr_high))]

    def line(self, alarms: np.ndarray) -> np.ndarray | None:
        """Compute the line delta + e^epsilon a for rates a of false alarms, where epsilon is the
        audited epsilon; None without an audit.

        An attack above the line exists if the audit's bound is right: if epsilon were smaller, no
        attack could lie above it.
        """
        if self.audited is None:
            return None
        epsilon, delta = self.audited
        return np.minimum(1.0, delta + np.exp(epsilon) * alarms)
