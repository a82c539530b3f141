"""Whether what a finished run's summary says of its privacy is what recipe and ledger say.

A summary is a plain file: whoever can write to the run's folder can change it. Readers of its epsilon ask first.
"""

from __future__ import annotations

import math
from typing import Any

from fedlgm.errors import LedgerError
from fedlgm.privacy.ledger import Ledger
from simulations.config.recipe import Recipe
from simulations.runs.rows import RunSummary

_TOLERANCE = 1e-3
"""Relative: other versions of the accountant compute an epsilon slightly differently."""


def check_summary(result: RunSummary, recipe: Recipe, ledger: Ledger, where: str) -> None:
    """Refuse a summary whose epsilon, delta, unit, mechanism or seed are not those of the run.

    The words of the guarantee are not checked, nor test figures: they are not in the ledger.

    Args:
        result: as read.
        recipe: of the run.
        ledger: of the run, verified.
        where: name of the summary's file, for the message.

    Raises:
        LedgerError: with the first figure that differs, and what it should be.
    """
    privacy = recipe.privacy
    spent = privacy.delta, privacy.accountant
    true: dict[str, Any] = {
        "mechanism": recipe.mechanism.name,
        "variant": recipe.mechanism.variant,
        "unit": recipe.unit,
        "delta": privacy.delta,
        "noise_reproducible": recipe.run.seed is not None,
        "epsilon": ledger.epsilon(*spent),
        "claimed_epsilon": ledger.claimed_epsilon(*spent),
    }
    if math.isinf(true["epsilon"]):
        true["guarantee_status"] = "none"
    for name, value in true.items():
        if not _same(result.get(name), value):
            raise LedgerError(
                f"{where} says {name} = {_text(result.get(name))}, recipe and ledger of the run say {_text(value)}: it "
                "was changed; restore it from a backup, or delete it, and --resume writes it again"
            )


def _same(stated: object, true: object) -> bool:
    if isinstance(true, float):
        known = isinstance(stated, (int, float)) and not isinstance(stated, bool)
        return known and (stated == true or math.isclose(float(stated), true, rel_tol=_TOLERANCE))  # type: ignore[arg-type]
    return type(stated) is type(true) and stated == true


def _text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
