"""Types for the rows of the privacy ledger and for the head of its chain."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple, get_args

from fedlgm import privacy
from fedlgm.checks import check_count
from fedlgm.errors import ConfigError, LedgerError
from fedlgm.privacy.guarantee import Claim, Guarantee, Relation, Unit


@dataclass(frozen=True)
class Charge:
    """A row of the ledger, which charges one release of one participant.

    Attributes:
        round: number of the round, from 1; 0 for a release before the run.
        client: the releasing client under local trust, `SERVER` under central trust.
        event: the proven cost of the release.
        claim: the charge that the method's authors would state, if it differs from the proven cost;
            otherwise empty.
        protects: unit and neighbouring relation of the event, as in "client, add-remove" or
            "client, replace-one at 2 nodes"; "" if not stated.

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
    event: privacy.DpEvent
    claim: Claim
    protects: str = ""


_KNOWN = (
    "",
    *(f"{unit}, {relation}" for unit, relation in product(get_args(Unit), get_args(Relation))),
)


class Draft(NamedTuple):
    """Checked fields of rows that are about to be charged, as the database stores them.

    Attributes:
        round: see `Charge`.
        keys: fingerprint of the noise key of each client.
        event: JSON text of the event.
        claim: JSON text of the claim.
        protects: see `Charge`.
        guarantee: JSON text of the guarantee; "" if not stated.

    Example:
        >>> from dp_accounting import GaussianDpEvent
        >>> Draft.of(GaussianDpEvent(1.5), 1, {-1: "a"}, None, "client, add-remove", None).round
        1
    """

    round: int
    keys: dict[int, str]
    event: str
    claim: str
    protects: str
    guarantee: str

    @classmethod
    def of(
        cls,
        event: privacy.DpEvent,
        round: object,
        keys: Mapping[Any, object],
        claim: Claim | None,
        protects: Any,
        guarantee: Guarantee | None,
    ) -> Draft:
        """Check the values that a caller charges, because SQLite would store any value, and a row
        can never be corrected.

        Raises:
            ConfigError: a number, name, claim or protection is impossible, or the library does not
                use events of this type.
            ValueError: the claim's event is not the record of an event.
        """
        names: dict[int, str] = {}
        for client, key in keys.items():
            if not (isinstance(key, str) and key):
                raise ConfigError(f"the key of a charge must be a name of its noise, got {key!r}")
            names[check_count("the client of a charge", client, least=-1)] = str(key)
        if str(protects).partition(" at ")[0] not in _KNOWN:
            raise ConfigError(
                "a charge protects a unit under a relation, such as 'client, add-remove', or "
                f"states neither, got {protects!r}"
            )
        number = check_count("the round of a charge", round, least=0)
        words = "" if guarantee is None else json.dumps(guarantee.to_dict())
        return cls(
            number,
            names,
            json.dumps(privacy.events.encode(event)),
            _claim(claim or {}),
            protects,
            words,
        )


def _claim(claim: Any) -> str:
    match claim:
        case {"epsilon": float() | int() as epsilon} if (
            len(claim) == 1 and epsilon >= 0 and epsilon is not True
        ):
            return json.dumps(claim)
        case {"event": dict() as event} if len(claim) == 1:
            privacy.events.decode(event)
            return json.dumps(claim)
        case {} if not claim:
            return "{}"
    raise ConfigError(
        f"a claim is {{'epsilon': number of at least 0}} or {{'event': record of an event}}, got "
        f"{claim!r}"
    )


class Head(NamedTuple):
    """A position in a ledger, with a hash of the rows up to it. Anyone who has stored a head can
    check later whether these rows were changed.

    Attributes:
        rows: number of rows.
        value: hash over all of these rows, in hexadecimal.

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
            LedgerError: the text is not a head.
        """
        count, colon, value = text.partition(":")
        if not (colon and count.isdecimal()):
            raise LedgerError(
                f"{text!r} is not the head of a ledger, which has the form COUNT:HASH"
            )
        return cls(int(count), value)
