"""The cost of a ledger without a run folder, such as the ledger of a Flower app."""

from __future__ import annotations

from pathlib import Path

from rich.console import Group
from rich.markup import escape

from fedlgm.checks import check_share
from fedlgm.errors import ConfigError
from fedlgm.privacy.attackers import attack_rates
from fedlgm.privacy.ledger import Ledger
from simulations.runs.folder import RunFolder
from simulations.summaries.charges import ledger_totals
from simulations.summaries.report_types import BareLedgerReport
from simulations.summaries.terminal import charges_table, number, worst_off


def bare_ledger_report(file: Path, delta: float | None) -> BareLedgerReport:
    """Charges of a ledger file, after checking it against its own hashes.

    Args:
        file: SQLite file of a ledger.
        delta: delta at which epsilon is stated.

    Raises:
        ConfigError: no delta is given, it lies outside (0, 1), or the file belongs to a run folder.
        LedgerError: the file is not a ledger, or was changed.

    Example:
        >>> import tempfile
        >>> from fedlgm.privacy.events import gaussian_event
        >>> file = Path(tempfile.mkdtemp()) / "ledger.sqlite"
        >>> with Ledger(file, owner="a run") as ledger:
        ...     ledger.charge(gaussian_event(2.0), round=1, key="noise 1")
        >>> round(bare_ledger_report(file, 1e-5)["epsilon"], 3)
        1.993
    """
    if RunFolder(
        file.absolute().parent
    ).recipe_file.is_file():  # the recipe states delta, seed and guarantee
        raise ConfigError(
            f"{file} is the ledger of a run: name the run's folder, {file.absolute().parent}"
        )
    if delta is None:
        raise ConfigError(
            f"{file} is a ledger without a run folder, which states no delta: add --delta, such as "
            "1e-5"
        )
    check_share(delta=delta)
    with Ledger(file) as ledger:
        ledger.verify()
        protects, stated = ledger.protects(), ledger.guarantee()
        unit = protects.partition(",")[0] or "unit"
        return {  # type: ignore[typeddict-item]
            **ledger_totals(ledger, unit, f"{unit}s", delta, "pld", attack_rates(ledger)),
            "ledger": str(file),
            "protects": protects,
            "guarantee": "" if stated is None else stated.sentence(noise_reproducible=False),
        }


def bare_ledger_table(report: BareLedgerReport) -> Group:
    """Charges, then totals."""
    totals = (
        f"epsilon charged {number(report['epsilon'])}, claimed {number(report['claimed_epsilon'])} "
        f"at delta {report['delta']:g} ({report['accountant']} accountant); protects "
        f"{report['protects'] or 'a unit and relation that the ledger does not state'}\n"
        f"{report['attack']}\n"
        "verified: rows follow from each other\nledger head "
        f"{report['ledger_head']}{worst_off(report['clients'])}\n"
        + (
            escape(report["guarantee"])
            or "the ledger does not state the guarantee: the result of the training does"
        )
    )
    return Group(charges_table(report["ledger"], report["events"]), totals)
