"""Composition of charged events, and what it allows an attacker."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from dp_accounting import dp_event

from fedlgm.errors import FedlgmError
from fedlgm.privacy import accounting, events
from fedlgm.privacy.attackers import AttackRates, attack_rates
from fedlgm_lab.certificate.verifier.envelope import Refused, parse

Charges = list[tuple[Any, int]]
"""Events and their numbers."""


def read_charges(counts: Iterable[tuple[str, int]], texts: Mapping[str, str]) -> Charges:
    """Events of the charges.

    Args:
        counts: (SHA-256 of an event's text, number of charges).
        texts: text by SHA-256.

    Raises:
        Refused: a text is no event.
    """
    try:
        return [
            (events.decode(parse(texts[name].encode(), 11, "an event")), count)
            for name, count in counts
        ]
    except (FedlgmError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refused(11, f"the charges cannot be composed ({error})") from None


def epsilon_of(charges: Charges, delta: float, accountant: str | None = None) -> float:
    """Epsilon of all charges.

    Args:
        charges: events and their numbers.
        delta: delta of the epsilon.
        accountant: name of the accountant; None chooses one that takes all of them.

    Raises:
        Refused: the accountant cannot compose them.
    """
    try:
        name = accountant or events.accountant_of([event for event, _ in charges])
        return accounting.composed_epsilon(charges, delta, name) if charges else 0.0
    except (FedlgmError, ValueError, TypeError, AttributeError) as error:
        raise Refused(11, f"the charges cannot be composed ({error})") from None


def rates_of(charges: Charges) -> AttackRates:
    """Bounds on all attacks on one unit."""
    return attack_rates(
        dp_event.ComposedDpEvent(
            [dp_event.SelfComposedDpEvent(event, count) for event, count in charges]
        )
    )
