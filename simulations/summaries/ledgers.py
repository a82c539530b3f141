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
    recipe = folder.recipe()
    with folder.checked_ledger() as ledger:
        report, rates = checked_ledger_report(folder, ledger), reported_rates(recipe, ledger)
    report["attack_rates"] = rates.figures()
    report["attack"] = rates.sentence(f"{recipe.unit}s")
    return report


def checked_ledger_report(folder: RunFolder, ledger: Ledger) -> LedgerReport:
    """See `ledger_report`; for a run whose ledger has been checked."""
    recipe = folder.recipe()
    privacy = recipe.privacy
    reproducible, spent = recipe.run.seed is not None, (privacy.delta, privacy.accountant)
    groups = event_groups(ledger, recipe.unit)
    guarantee = folder.guarantee_in(ledger) if groups else None
    return {
        "run": str(folder.path),
        "ledger_head": str(ledger.head()),
        "anchors": len(folder.anchors()),
        "guarantee": guarantee.sentence(noise_reproducible=reproducible) if guarantee else "",
        "noise_reproducible": reproducible,
        "events": groups,
        "notes": [*how_to_read(recipe, groups), *note_on_epsilon(recipe, ledger.rounds())],
        "epsilon": ledger.epsilon(*spent),
        "claimed_epsilon": ledger.claimed_epsilon(*spent),
        "delta": privacy.delta,
        "budget": privacy.epsilon,
        "accountant": privacy.accountant,
        "clients": client_rows(ledger, *spent),
    }
