"""A row of the privacy ledger, and the head of its chain, as others see them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from fedlgm.errors import LedgerError
from fedlgm.privacy.guarantee import Claim

if TYPE_CHECKING:
    from dp_accounting import dp_event


@dataclass(frozen=True)
class Charge:
    """One row: the charge for a round and participant.

    Attributes:
        round: its number, from 1.
        client: the releasing client under local trust, `SERVER` under central trust.
        event: the proven cost of the release.
        claim: the charge that the method's authors would state, if it differs; otherwise empty.
        protects: unit and neighbouring relation of the event, as in "client, add-remove"; "" if not stated.

    Example:
        >>> import tempfile
        >>> from fedlgm.privacy.events import gaussian_event
        >>> from fedlgm.privacy.ledger import Ledger
        >>> with Ledger(tempfile.mkdtemp() + "/ledger.sqlite", owner="a run") as ledger:
        ...     ledger.charge(gaussian_event(2.0), round=3, key="noise 3")
        ...     next(ledger.charges())
        Charge(round=3, client=-1, event=GaussianDpEvent(noise_multiplier=2.0), claim={}, protects='')
    """

    round: int
    client: int
    event: dp_event.DpEvent
    claim: Claim
    protects: str = ""


class Head(NamedTuple):
    """A position in a ledger: anyone who keeps it can check later whether rows up to it were changed.

    Attributes:
        rows: number of rows.
        value: hash over all of them, in hexadecimal.

    Example:
        >>> head = Head.parse("2:3f9a")
        >>> head.rows, str(head)
        (2, '2:3f9a')
    """

    rows: int
    value: str

    def __str__(self) -> str:
        return f"{self.rows}:{self.value}"

    @classmethod
    def parse(cls, text: str) -> Head:
        """Inverse of `str`.

        Raises:
            LedgerError: not a head.
        """
        count, colon, value = text.partition(":")
        if not (colon and count.isdigit()):
            raise LedgerError(f"{text!r} is not the head of a ledger: it reads COUNT:HASH")
        return cls(int(count), value)
