"""What a run's ledger holds, release by release."""

from __future__ import annotations

from pathlib import Path

from fedlgm.privacy.attackers import AttackRates
from fedlgm.privacy.ledger import Ledger
from simulations.runs.folder import RunFolder
from simulations.runs.stopping import note_on_epsilon, reported_rates
from simulations.summaries.charges import how_to_read, ledger_totals
from simulations.summaries.report_types import LedgerReport


def ledger_report(run: Path) -> LedgerReport:
    """Charges of a run, grouped by event, with the accountant's and the claimed totals, after
    checking the ledger.

    Raises:
        LedgerError: the ledger does not fit the recipe, the checkpoints, the result or its own
            hashes.
    """
    folder = RunFolder.open(run)
    with folder.checked_ledger() as ledger:
        return checked_ledger_report(folder, ledger, reported_rates(folder.recipe(), ledger))


def checked_ledger_report(folder: RunFolder, ledger: Ledger, rates: AttackRates) -> LedgerReport:
    """As `ledger_report`, if the ledger has been checked and the attack rates are known."""
    recipe = folder.recipe()
    privacy = recipe.privacy
    totals = ledger_totals(
        ledger, recipe.unit, recipe.units, privacy.delta, privacy.accountant, rates
    )
    reproducible, groups = recipe.run.seed is not None, totals["events"]
    guarantee = folder.guarantee_in(ledger) if groups else None
    return {  # type: ignore[typeddict-item]
        **totals,
        "run": str(folder.path),
        "anchors": len(folder.anchors()),
        "guarantee": guarantee.sentence(noise_reproducible=reproducible) if guarantee else "",
        "noise_reproducible": reproducible,
        "notes": [*how_to_read(recipe, groups), *note_on_epsilon(recipe, ledger.rounds())],
        "budget": privacy.epsilon,
    }
