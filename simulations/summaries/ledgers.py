"""What a run's ledger holds, release by release."""

from __future__ import annotations

from pathlib import Path

from fedlgm.privacy.ledger import Ledger
from simulations.runs.folder import RunFolder
from simulations.runs.stopping import note_on_epsilon, reported_rates
from simulations.summaries.charges import client_rows, event_groups, how_to_read
from simulations.summaries.report_types import LedgerReport


def ledger_report(run: Path) -> LedgerReport:
    """Charges of a run, grouped by event, with the accountant's and the claimed totals, after
    checking the ledger.

    Raises:
        LedgerError: the ledger does not fit the recipe, the checkpoints, the result or its own
            hashes.
    """
    folder = RunFolder.open(run)
    folder.verify()
    report = checked_ledger_report(folder)
    recipe = folder.recipe()
    with Ledger(folder.ledger_file) as ledger:
        rates = reported_rates(recipe, ledger)
    report["attack_rates"] = rates.figures()
    report["attack"] = rates.sentence(f"{recipe.unit}s")
    return report


def checked_ledger_report(folder: RunFolder) -> LedgerReport:
    """See `ledger_report`; for a run whose ledger has been checked."""
    recipe = folder.recipe()
    privacy = recipe.privacy
    with Ledger(folder.ledger_file) as ledger:
        head = ledger.head()
        groups = event_groups(ledger, recipe.unit)
        return {
            "run": str(folder.path),
            "ledger_head": str(head),
            "anchors": len(folder.anchors()),
            "guarantee": folder.guarantee() if groups else "",
            "noise_reproducible": recipe.run.seed is not None,
            "events": groups,
            "notes": [*how_to_read(recipe, groups), *note_on_epsilon(recipe, ledger.rounds())],
            "epsilon": ledger.epsilon(privacy.delta, privacy.accountant),
            "claimed_epsilon": ledger.claimed_epsilon(privacy.delta, privacy.accountant),
            "delta": privacy.delta,
            "budget": privacy.epsilon,
            "accountant": privacy.accountant,
            "clients": client_rows(ledger, privacy.delta, privacy.accountant),
        }
