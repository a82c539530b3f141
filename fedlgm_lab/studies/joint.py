"""The joint cost of several runs on the same clients' data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedlgm.privacy import accounting
from fedlgm.privacy.events import accountant_of, is_private
from fedlgm.privacy.guarantee import at_nodes
from fedlgm.privacy.ledger import Ledger
from fedlgm_lab.studies.jobs import Job
from fedlgm_lab.studies.study_rows import JointCost
from simulations.runs.folder import RunFolder
from simulations.runs.stopping import ended_early
from simulations.summaries.terminal import number


def together(done: Sequence[Job], out: Path) -> JointCost:
    """Compute the joint cost of all runs in a folder, by composition over all releases.

    Runs of earlier grids and searches in the folder are included. In each run, the participant with
    the largest cost stands for all participants, and the events of all runs are composed. There is
    no joint epsilon if the runs differ in the unit, the relation or the division of the data, or if
    a run was stopped early because of its results.
    """
    # a refused run has no folder and has released nothing
    runs = {out / job.folder: job.recipe for job in done if (out / job.folder).exists()}
    for path in sorted(file.parent for file in out.rglob("ledger.sqlite")):
        if path not in runs:
            runs[path] = RunFolder.open(path).recipe()
    events: list[tuple[Any, int]] = []
    protected_runs = 0
    protections, stopped = set(), False
    for path, recipe in runs.items():
        protection = f"{recipe.unit}, {recipe.relation}"
        protections.add(at_nodes(protection, recipe.federation.overlap or 1))
        with Ledger(path / "ledger.sqlite") as ledger:
            profile = ledger.worst_profile()
            stopped |= ended_early(recipe, ledger.rounds())
        if all(is_private(event) for event, _ in profile):
            protected_runs += 1
            events += profile
    delta = max((recipe.privacy.delta for recipe in runs.values()), default=0.0)
    why = None
    if len(protections) > 1:
        why = f"the runs protect different things ({'; '.join(sorted(protections))}), whose epsilons do not add up"
    elif len({recipe.protects.division(recipe) for recipe in runs.values()}) > 1:
        who = next((of for recipe in runs.values() if (of := recipe.protects.of)), "client")
        why = f"a {who} holds different data in each partition or data set, so epsilons of one {who} do not add up"
    elif stopped:
        why = (
            "a run was stopped early by its results (run.patience), and the cost of fewer rounds "
            "is not a bound at a fixed epsilon"
        )
    accountant = accountant_of(event for event, _ in events)
    protected = (
        None if why else accounting.composed_epsilon(events, delta, accountant) if events else 0.0
    )
    return {
        "epsilon": protected if protected_runs == len(runs) else float("inf"),
        "epsilon_protected": protected,
        "why": why,
        "runs": len(runs),
        "runs_protected": protected_runs,
        "delta": delta,
    }


def sentence(cost: JointCost) -> str:
    """State the cost of publishing all runs together, in a sentence."""
    if cost["epsilon_protected"] is None:
        return f"published together, the runs have no joint epsilon: {cost['why']}"
    said = f"published together, {cost['runs_protected']} runs cost epsilon {number(cost['epsilon_protected'])}"
    others = cost["runs"] - cost["runs_protected"]
    rest = f"; no bound covers the other {others}, which are not private" if others else ""
    return f"{said} at delta {cost['delta']:g} (composition over all runs in the folder){rest}"
