"""Checks that a finished run's summary states the privacy of its recipe and ledger.

A summary is a plain file, and anyone who can write to the run's folder can change it. Code that
reads its epsilon first makes this check, and takes the guarantee's sentence from the recipe
(`protection`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from fedlgm.errors import LedgerError
from fedlgm.privacy.guarantee import Guarantee
from fedlgm.privacy.ledger import Ledger
from simulations.config.facts import facts_of
from simulations.config.recipe import Recipe
from simulations.runs.rows import RunSummary
from simulations.runs.stopping import privacy_figures, reported_epsilon

_TOLERANCE = 1e-3
"""Relative tolerance, since other versions of the accountant compute an epsilon slightly
differently."""

_SHOWN = ("run", "engine", "model_sha256", "ledger_head", "metrics", "headline")
_PLANNED = ("clip", "sigma", "snr", "share", "layer_noise")
_PER_LAYER = (*_PLANNED, "released_norm")


def check_summary(
    result: RunSummary,
    recipe: Recipe,
    ledger: Ledger,
    guarantee: Guarantee,
    multiplier: float | None,
    recorded: int,
    where: str,
) -> None:
    """Refuse a summary whose epsilon, delta, unit, mechanism, seed or kind of guarantee are not
    those of the run.

    Test figures are not checked, because neither recipe nor ledger has them.

    Args:
        result: the summary as read.
        recipe: recipe of the run.
        ledger: verified ledger of the run.
        guarantee: guarantee of the run.
        multiplier: noise multiplier of the run's last plan; None if no plan is kept.
        recorded: last round of the rows of metrics; a round in which nobody took part may have no
            charge.
        where: name of the summary's file, for the message.

    Raises:
        LedgerError: the message names the first figure that differs, and its right value.
    """
    figures = privacy_figures(recipe, ledger, guarantee)
    true: dict[str, Any] = {
        **figures,
        "recipe": recipe.name,
        "rounds": recipe.federation.rounds
        if recipe.run.patience is None
        else max(ledger.rounds(), recorded),
        "mechanism": recipe.mechanism.name,
        "variant": recipe.mechanism.variant,
        "unit": recipe.unit,
        "guarantee_status": "none" if math.isinf(figures["epsilon"]) else guarantee.status,
    }
    del true["guarantee"]  # the words of the guarantee are derived again and not read
    # these figures were added after the first release of fedlgm
    if "attack_rates" not in result and "attack" not in result:
        del true["attack_rates"], true["attack"]
    if multiplier is not None:
        true["noise_multiplier"] = multiplier
        if "readers_epsilon" in result:
            facts = facts_of(recipe).with_multiplier(multiplier)
            true["readers_epsilon"] = facts.noised_by.readers_epsilon(facts, facts.rounds)
    missing = [name for name in _SHOWN if name not in result]
    if missing:
        raise LedgerError(
            f"{where} has no {missing[0]}: it was changed; restore it from a backup, or delete it, "
            "and --resume writes it again"
        )
    for name, value in true.items():
        if not _same(result.get(name), value):
            raise LedgerError(
                f"{where} says {name} = {_text(result.get(name))}, but recipe and ledger of the "
                f"run say {_text(value)}: it was changed; restore it from a backup, or delete it, "
                "and --resume writes it again"
            )


def check_rows(
    rows: Iterable[Mapping[str, Any]], recipe: Recipe, ledger: Ledger, where: str
) -> None:
    """Refuse rows whose epsilon is below the epsilon of their round, or below the epsilon of an
    earlier row. Also refuse rows that lack figures or have another number of layers than the run.

    Only the first and the last epsilon are composed from the ledger. Between them, no row's epsilon
    may be below the epsilon of the previous row.

    Args:
        rows: public rows of the run.
        recipe: recipe of the run.
        ledger: verified ledger of the run.
        where: name of the rows' file, for the message.

    Raises:
        LedgerError: the message names the round.
    """
    stated, layers = [], set()
    for row in rows:
        missing = [name for name in _PLANNED if name not in row]
        if missing:
            raise LedgerError(
                f"{where} has no {missing[0]} in round {row['round']}: restore it from a backup"
            )
        stated += [(row["round"], float(row["epsilon"]))] if "epsilon" in row else []
        layers |= {len(row[name]) for name in _PER_LAYER if name in row}
        if len(layers) > 1:
            raise LedgerError(
                f"{where} has another number of layers in round {row['round']}: restore it from a "
                "backup"
            )
    least = 0.0
    for place, (round_, epsilon) in enumerate(stated):
        if place in (0, len(stated) - 1):
            charged = ledger.epsilon(
                recipe.privacy.delta, recipe.privacy.accountant, through=round_
            )
            least = max(least, reported_epsilon(recipe, charged))
        if not epsilon >= least * (1 - _TOLERANCE):
            raise LedgerError(
                f"{where} says epsilon = {_text(epsilon)} in round {round_}, but by the ledger it "
                f"is at least {_text(least)}: it was changed; restore it from a backup"
            )
        least = max(least, epsilon)


def _same(stated: object, true: object) -> bool:
    if isinstance(true, float):
        number = isinstance(stated, (int, float)) and not isinstance(stated, bool)
        return number and (stated == true or math.isclose(float(stated), true, rel_tol=_TOLERANCE))  # type: ignore[arg-type]
    if isinstance(true, Mapping):
        return (
            isinstance(stated, Mapping)
            and stated.keys() == true.keys()
            and all(_same(stated[name], value) for name, value in true.items())
        )
    return type(stated) is type(true) and stated == true


def _text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
