"""The row of a release in a node's ledger, and the names of what a budget protects."""

from __future__ import annotations

from dataclasses import dataclass

from fedlgm.privacy.chain import digest
from fedlgm.privacy.guarantee import CLIENT_DATA as CLIENT
from fedlgm.privacy.guarantee import ONE_EXAMPLE as EXAMPLE
from fedlgm.privacy.guarantee import at_nodes
from fedlgm_nodes.policy import Privacy

_PROTECTED: dict[str, str] = {"client": CLIENT, "example": EXAMPLE}


def protected(privacy: Privacy) -> str:
    """The unit and the neighbouring relation of a policy's budget, with the number of nodes at
    which a person may have rows.
    """
    return at_nodes(_PROTECTED[privacy.unit], privacy.nodes)


@dataclass(frozen=True)
class Row:
    """One release in a node's ledger.

    Attributes:
        seq: number, from 1.
        request: name of the release, a digest of all its inputs.
        event: cost of the release, JSON of `fedlgm.privacy.events.encode`.
        trust: trust model of the release.
        run: label of the first run that requested the release.
        round: round of this run.
        data: digest of the data.
        charged_at: time of the charge, UTC.
        head: head of the hash chain after this row.
        protects: unit and neighbouring relation of the event, `CLIENT` or `EXAMPLE`.
    """

    seq: int
    request: str
    event: str
    trust: str
    run: str
    round: int
    data: str
    charged_at: str
    head: str
    protects: str

    def head_after(self, before: str) -> str:
        """The head after this row, computed from the head before it and the row's columns."""
        columns = (
            self.seq,
            self.request,
            self.event,
            self.trust,
            self.run,
            self.round,
            self.data,
            self.charged_at,
        )
        return digest(before, *map(str, columns), str(self.protects))
