"""Explanation of a ledger's charges, in words."""

from __future__ import annotations

from collections.abc import Sequence

from fedlgm.privacy.attackers import AttackRates
from fedlgm.privacy.charge import Charge
from fedlgm.privacy.cost import Cost, multiplier_explained
from fedlgm.privacy.guarantee import Accountant
from fedlgm.privacy.ledger import SERVER, Ledger
from simulations.config.recipe import Recipe
from simulations.summaries.report_types import ClientRow, EventGroup, LedgerTotals


def ledger_totals(
    ledger: Ledger,
    unit: str,
    units: str,
    delta: float,
    accountant: Accountant,
    rates: AttackRates,
) -> LedgerTotals:
    """Charges of a ledger and their totals.

    Args:
        ledger: the ledger, which has been checked.
        unit: unit of protection.
        units: the units that an attack looks for, in the plural.
        delta: delta of both epsilons.
        accountant: accountant of both epsilons.
        rates: bounds on attacks on one unit.
    """
    return {
        "ledger_head": str(ledger.head()),
        "events": event_groups(ledger, unit),
        "epsilon": ledger.epsilon(delta, accountant),
        "claimed_epsilon": ledger.claimed_epsilon(delta, accountant),
        "delta": delta,
        "accountant": accountant,
        "clients": client_rows(ledger, delta, accountant),
        "attack_rates": rates.figures(),
        "attack": rates.sentence(units),
    }


def event_groups(ledger: Ledger, unit: str) -> list[EventGroup]:
    """All charges of a ledger, grouped by event.

    Args:
        ledger: the ledger.
        unit: unit of protection.
    """
    charges: dict[str, list[Charge]] = {}
    for charge in ledger.charges():
        charges.setdefault(str(charge.event), []).append(charge)
    return [event_group(unit, group) for group in charges.values()]


def event_group(unit: str, charges: Sequence[Charge]) -> EventGroup:
    """Charges of one event, in words.

    Args:
        unit: unit of protection.
        charges: all charges with the same event, by round.
    """
    cost = Cost.of(charges[0].event)
    rounds = sorted({charge.round for charge in charges})
    local, steps = charges[0].client != SERVER, f", {cost.steps} steps" if cost.steps > 1 else ""
    return {
        "first": rounds[0],
        "count": len(charges),
        "event": str(charges[0].event),
        "last": rounds[-1],
        "rounds": spans(rounds),
        "clients": len({charge.client for charge in charges}) if local else 0,
        "released": f"a client's update{steps}" if local else f"sum over {unit}s",
        "noise": cost.noise,
        "sampling": cost.sampling,
        "noise_multiplier": cost.figure if cost.law == "gaussian" else None,
        "sampling_rate": cost.rate,
        "steps": cost.steps,
    }


def spans(rounds: Sequence[int]) -> str:
    """Rounds as text, with consecutive rounds as a span.

    Args:
        rounds: ascending numbers.

    >>> spans([1, 2, 3, 7]), spans([1, 11, 21, 31, 41, 51])
    ('1-3, 7', '1, 11, 21, ..., 51')
    """
    pieces: list[list[int]] = []
    for round in rounds:
        if pieces and round == pieces[-1][-1] + 1:
            pieces[-1][1:] = [round]
        else:
            pieces.append([round])
    texts = ["-".join(map(str, piece)) for piece in pieces]
    return ", ".join(texts if len(texts) <= 4 else [*texts[:3], "...", texts[-1]])


def how_to_read(recipe: Recipe, groups: Sequence[EventGroup]) -> list[str]:
    """Explanation of what the multipliers refer to."""
    if all(group["noise_multiplier"] is None for group in groups):
        return []
    if recipe.federation.sampling in ("poisson", "fixed"):
        return [multiplier_explained(recipe.unit, recipe.relation)]
    return [
        (
            "the run is accounted for as one mechanism: a multiplier states what its rounds add "
            "to the cost of the rounds before them, not the noise that they had"
        )
    ]


def client_rows(ledger: Ledger, delta: float, accountant: str) -> list[ClientRow]:
    """Each client's spending, largest first; empty under central trust, where the server
    releases.
    """
    releases = ledger.participations()
    rows: list[ClientRow] = [
        {"client": client, "releases": releases[client], "epsilon": epsilon}
        for client, epsilon in ledger.client_epsilons(delta, accountant).items()
    ]
    return sorted(rows, key=lambda row: (-row["epsilon"], row["client"]))
