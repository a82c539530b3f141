"""Observers of a simulation's own sums, for `run.audit = true`."""

from __future__ import annotations

from typing import Protocol

from fedlgm.noise.keys import KeyRing
from fedlgm.noise.release import ReleaseObserver
from fedlgm.planning.plan import ReleasePlan
from simulations import tools
from simulations.config.assembly import Assembly
from simulations.runs.folder import RunFolder
from simulations.runs.rows import RunSummary


class Watch(Protocol):
    """An audit that takes place during a run."""

    def check(self, plan: ReleasePlan) -> None:
        """Refuse a run whose releases it cannot audit, given the first round's plan.

        Raises:
            ConfigError: the message gives the reason and an alternative.
        """

    def observer(
        self, assembly: Assembly, folder: RunFolder, keys: KeyRing, simulated: bool
    ) -> ReleaseObserver:
        """The observer of the remaining rounds.

        Args:
            assembly: the run's objects.
            folder: the run's folder.
            keys: the run's ring, from which the observer's own ring is derived.
            simulated: whether the clients are simulated.

        Raises:
            ConfigError: the run has real nodes, among which artificial contributions are not
                allowed.
        """

    def figures(self, assembly: Assembly, folder: RunFolder, result: RunSummary) -> RunSummary:
        """The audited figures of a finished run's summary."""


def watch_of(assembly: Assembly) -> Watch | None:
    """The run's audit by canaries, if its recipe has one."""
    if not assembly.recipe.run.audit:
        return None
    watch: Watch = tools.RunAudit()
    return watch
