"""The parties to a run, and what each of them sees."""

from __future__ import annotations

from typing import NamedTuple

from fedlgm.privacy.guarantee import Trust


class Party(NamedTuple):
    """A party to a run.

    Attributes:
        name: the party.
        sees: what reaches it.
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


def list_parties(trust: Trust, simulated: bool) -> list[Party]:
    """The parties to a run, and what reaches each of them.

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
        Party("a client (a site)", "its own data, and the released model of every round"),
        Party("the server", _SERVER[trust]),
        Party(
            "readers of the model, of this page and of the ledger",
            "released figures only; what they reveal is stated in the guarantee above",
        ),
    ]
