"""Canaries in a simulated run: the server inserts them into its sums, observes them in its
releases, and stores the observations in the run's folder.
"""

from __future__ import annotations

import base64
import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from fedlgm.errors import ConfigError, RunError
from fedlgm.noise.keys import KeyRing
from fedlgm.planning import charging
from fedlgm.planning.plan import ReleasePlan
from fedlgm_lab.audits import (
    CONFIDENCE,
    AuditResult,
    Canaries,
    CanaryRecord,
    Reported,
    Subject,
    audit_record,
)
from fedlgm_lab.audits.canaries import canary_count, check_auditable
from fedlgm_lab.audits.probe import checks, probe
from simulations.config.assembly import Assembly
from simulations.runs.folder import RunFolder
from simulations.runs.rows import RunSummary

_WATCHED = 32  # largest number of rounds in which canaries take part


class LoggedCanaries:
    """Canaries whose observations are written to the run's folder, round by round.

    Args:
        canaries: the canaries.
        folder: the run's folder.
        every: number k such that canaries take part in every k-th round, beginning with the first.
    """

    def __init__(self, canaries: Canaries, folder: RunFolder, every: int = 1) -> None:
        self._canaries, self._folder, self._every = canaries, folder, every

    def _watches(self, round: int) -> bool:
        return (round - 1) % self._every == 0

    def insert(self, round: int, plan: ReleasePlan, total: Tensor) -> None:
        """See `ReleaseObserver.insert`."""
        if self._watches(round):
            self._canaries.insert(round, plan, total)

    def observe(self, round: int, plan: ReleasePlan, noisy: Tensor) -> None:
        """See `ReleaseObserver.observe`."""
        if self._watches(round):
            self._canaries.observe(round, plan, noisy)
            self._folder.canaries.append(_encode(self._canaries.rows.pop()))


class RunAudit:
    """The audit of a run by canaries; see `simulations.runs.watching.Watch`."""

    def check(self, plan: ReleasePlan) -> None:
        """See `Watch.check`."""
        check_auditable(plan)

    def observer(
        self, assembly: Assembly, folder: RunFolder, keys: KeyRing, simulated: bool
    ) -> LoggedCanaries:
        """See `Watch.observer`.

        Raises:
            ConfigError: the run has real nodes.
        """
        if not simulated:
            raise ConfigError(
                "run.audit: canaries are for simulations, but this run has real nodes: set "
                "run.audit = false"
            )
        rounds, facts = assembly.recipe.federation.rounds, assembly.privacy.facts
        if charging.of(facts).run is None:
            # much of the cost of canaries in a round does not depend on their number
            every = -(-rounds // _WATCHED)
            count = canary_count(assembly.model.layers.size, -(-rounds // every))
        else:  # a round's noise depends on all earlier rounds, so canaries take part in every round
            every, groups = 1, facts.sampling.separation or 1
            count = canary_count(assembly.model.layers.size, -(-rounds // groups), groups)
        return LoggedCanaries(
            Canaries(assembly.model.layers, count, keys.derive(b"canaries")), folder, every
        )

    def figures(self, assembly: Assembly, folder: RunFolder, result: RunSummary) -> RunSummary:
        """See `Watch.figures`."""
        audit = audit_stored(assembly, folder, result, per_layer=False)
        # the fault may lie in the plan, which an audit by canaries takes as given
        if math.isinf(float(result["epsilon"])):
            audit = dataclasses.replace(
                audit,
                checks=(*audit.checks, *checks(probe(Subject("run", assembly.privacy.method)))),
            )
        return {
            "audited_epsilon": audit.epsilon_lower,
            "audit_method": audit.method,
            "audit_confidence": audit.confidence,
            "audit_passed": audit.passed,
        }


def audit_stored(
    assembly: Assembly,
    folder: RunFolder,
    result: RunSummary,
    *,
    confidence: float = CONFIDENCE,
    per_layer: bool = True,
) -> AuditResult:
    """Audit a run from the canaries' observations that its folder holds.

    Raises:
        RunError: the run had no canaries, or their file is damaged.
    """
    rows = list(folder.canaries)
    if not rows:
        raise RunError(
            f"{folder.canaries.path} holds nothing: the run had no canaries; run it with run.audit "
            "= true"
        )
    try:
        record = CanaryRecord.of([_decode(row) for row in rows], np.zeros(0, dtype=bool))
    except ConfigError as error:
        raise RunError(f"{folder.canaries.path}: {error}") from error
    reported = run_reported(assembly, f"run {folder.path}", result)
    return audit_record(
        record, assembly.model.layers, reported, confidence=confidence, per_layer=per_layer
    )


def run_reported(assembly: Assembly, subject: str, result: RunSummary) -> Reported:
    """Collect the reported figures of a finished run; the epsilon is the proven one, or the claimed
    one if none is proven.
    """
    epsilon = float(result["epsilon"])
    if math.isinf(epsilon):
        epsilon = float(result["claimed_epsilon"])
    return Reported(
        subject,
        epsilon,
        float(result["delta"]),
        assembly.privacy.facts.noise_multiplier
        / np.sqrt(assembly.model.mechanism.costs(assembly.model.layers, int(result["rounds"]))),
        assembly.privacy.facts.sampling.rate,
        assembly.privacy.facts.relation,
        str(result["guarantee"]),
        charging.of(assembly.privacy.facts).run,
    )


def _encode(row: Mapping[str, Any]) -> dict[str, Any]:
    """Encode a round's observations for JSON: arrays as float32 in base64, because decimal numbers
    would be slow to write and read.
    """
    packed: dict[str, Any] = {"round": int(row["round"])}
    for name in (key for key in row if key != "round"):
        array = np.asarray(row[name], dtype=np.float32)
        packed[name] = [list(array.shape), base64.b64encode(array.tobytes()).decode("ascii")]
    return packed


def _decode(row: Mapping[str, Any]) -> dict[str, Any]:
    """Decode a row that `_encode` made.

    Raises:
        ConfigError: the row is damaged.
    """
    try:
        return {"round": row["round"]} | {
            name: np.frombuffer(base64.b64decode(row[name][1]), dtype=np.float32).reshape(
                row[name][0]
            )
            for name in row
            if name != "round"
        }
    except (TypeError, ValueError, IndexError) as error:
        raise ConfigError(f"a damaged row of round {row.get('round')}: {error}") from error
