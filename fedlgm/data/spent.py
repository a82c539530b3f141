"""The privacy cost of releases that are made from a data set before a run trains on it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from fedlgm import privacy


@dataclass(frozen=True)
class Spent:
    """Charges that every run on a data set must add to its own charges.

    Attributes:
        events: pairs (event, number of releases with this event).
        protects: unit of privacy and neighbouring relation of all events, as in "example,
            add-remove".
        clients: number of clients in the data if the unit of privacy is a client; otherwise 0.
        division: `division_name` of these clients' rows.

    Example:
        >>> from fedlgm.privacy.events import gaussian_event
        >>> spent = Spent(((gaussian_event(4.0), 1),), "example, add-remove")
        >>> round(spent.epsilon(1e-5), 3)
        0.926
    """

    events: tuple[tuple[privacy.DpEvent, int], ...]
    protects: str
    clients: int = 0
    division: str = ""

    def epsilon(self, delta: float, accountant: str = "pld") -> float:
        """Compute the epsilon at `delta` of these events alone."""
        return privacy.accounting.composed_epsilon(self.events, delta, accountant)

    def charge(self, ledger: privacy.Ledger) -> None:
        """Charge the events to a run's ledger before the run's first round. A repeated call does
        nothing.

        Raises:
            LedgerError: the ledger has another unit of privacy, or cannot be written.
        """
        for i, (event, count) in enumerate(self.events):
            for n in range(count):
                ledger.charge(
                    event, round=0, key=f"before the run: {i}.{n}", protects=self.protects
                )


def division_name(parts: Iterable[np.ndarray]) -> str:
    """Compute a name of a division of rows among clients. Equal names show that a release and a run
    have the same clients.

    Args:
        parts: row numbers of each client. The order of the rows and the order of the clients do not
            matter.

    Example:
        >>> division_name([np.array([0, 2]), np.array([1])]) == division_name([np.array([1]), np.array([2, 0])])
        True
    """
    clients = (hashlib.sha256(np.sort(rows).astype("<i8").tobytes()).digest() for rows in parts)
    return hashlib.sha256(b"".join(sorted(clients))).hexdigest()
