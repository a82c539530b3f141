"""The parties to a run, what each of them sees, and what its named sites contributed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fedlgm.privacy.guarantee import Trust


class Party(NamedTuple):
    """A party to a run.

    Attributes:
        name: the party.
        sees: data that reach the party.
    """

    name: str
    sees: str


_SERVER: dict[Trust, str] = {
    "central": (
        "every client's contribution, bounded but without noise; it adds the noise to their sum"
    ),
    "local": (
        "every client's contribution with the noise that the client has added, and nothing else of "
        "it"
    ),
    "distributed": (
        "the sum of the clients' contributions, with the noise that the clients have added; secure "
        "aggregation hides the single ones"
    ),
}


_SENT: dict[Trust, str] = {
    "central": "the sum of its rows' bounded gradients, without noise",
    "local": "its update, with the noise that it added itself",
    "distributed": "the sum of its rows' bounded gradients, with its share of the noise",
}

_OF_A_CLIENT = "its own data, and the released model of every round"


class Site(NamedTuple):
    """A site whose rows are protected one by one.

    Attributes:
        name: its name.
        contributed: public description of the data that the site sent.
        saw: data that reached the site.
    """

    name: str
    contributed: str
    saw: str


def list_sites(
    names: Sequence[str], trust: Trust, rounds: int, rate: float = 1.0, cap: int | None = None
) -> list[Site]:
    """List the named sites of a run whose unit of privacy is a row.

    Args:
        names: names of the sites.
        trust: the run's trust model.
        rounds: number of the run's rounds.
        rate: probability with which a site is drawn for a round.
        cap: largest number of rounds in which a site takes part.

    Example:
        >>> list_sites(["cleveland"], "central", 100)[0].contributed
        "in each of the 100 rounds, the sum of its rows' bounded gradients, without noise"
    """
    when = f"in each of the {rounds} rounds"
    if rate < 1 or cap is not None:
        when = f"drawn with probability {rate:g} {when}"
    if cap is not None:
        when += f", at most {cap} times"
    contributed = f"{when}, {_SENT[trust]}"
    return [Site(name, contributed, _OF_A_CLIENT) for name in names]


def list_parties(trust: Trust, simulated: bool) -> list[Party]:
    """List the parties to a run, and the data that reach each of them.

    Args:
        trust: the run's trust model.
        simulated: whether clients were simulated, so that one machine held all the data.

    Example:
        >>> for party in list_parties("local", simulated=False):
        ...     print(party.name)
        a client (a site)
        the server
        readers of the model, of this page and of the ledger
    """
    machine = Party(
        "this machine",
        "all the data: the clients were simulated here, and the rows below say what each party "
        "would see in a deployment",
    )
    return [
        *([machine] if simulated else []),
        Party("a client (a site)", _OF_A_CLIENT),
        Party("the server", _SERVER[trust]),
        Party(
            "readers of the model, of this page and of the ledger",
            "released figures only; what they reveal is stated in the guarantee above",
        ),
    ]
