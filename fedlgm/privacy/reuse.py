"""Refuses an unintended second run on the same ledger, because its cost would add to the cost of
the first run.
"""

from __future__ import annotations

from fedlgm import privacy
from fedlgm.errors import LedgerError


def require_rounds(
    ledger: privacy.Ledger,
    done: int,
    events: list[tuple[privacy.DpEvent, int]],
    *,
    epsilon: float | None,
    delta: float | None,
    accountant: str = "pld",
) -> None:
    """Refuse a ledger that holds rounds which this run has not done.

    Charges of round 0, such as those of private statistics, precede a run and are accepted.

    Args:
        ledger: the ledger that the run would charge.
        done: number of rounds that the run has done.
        events: events that the rest of the run would charge to a participant, with counts.
        epsilon: budget of the run; None if the run has no budget.
        delta: delta of the budget.
        accountant: accountant of the run.

    Raises:
        LedgerError: the ledger holds other rounds; the message states their cost and the cost with
            this run.

    Example:
        >>> import tempfile
        >>> from fedlgm.privacy.events import gaussian_event
        >>> from fedlgm.privacy.ledger import Ledger
        >>> with Ledger(tempfile.mkdtemp() + "/ledger.sqlite", owner="a run") as ledger:
        ...     require_rounds(ledger, 0, [(gaussian_event(2.0), 1)], epsilon=2.0, delta=1e-5)
        ...     ledger.charge(gaussian_event(2.0), round=1, key="noise 1")
        ...     require_rounds(ledger, 1, [(gaussian_event(2.0), 1)], epsilon=2.0, delta=1e-5)
    """
    if ledger.rounds() <= done:
        return
    most, whose = max(ledger.participations().values(), default=0), " of a client"
    if not most:
        most, whose = sum(charge.round > 0 for charge in ledger.charges()), ""
    held = cost = ""
    if delta is not None:
        after = privacy.composed_epsilon([*ledger.worst_profile(), *events], delta, accountant)
        held = f" (epsilon {ledger.epsilon(delta, accountant):.4g})"
        above = f", above {epsilon:g}" if epsilon is not None and after > epsilon else ""
        cost = f"; this run would bring it to {after:.4g}{above}"
    raise LedgerError(
        f"{ledger.path} already holds {most} round{'s' * (most > 1)}{whose}{held}{cost}: name a "
        "new file, or pass continue_ledger=True if the costs should add up"
    )
