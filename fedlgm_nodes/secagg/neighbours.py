"""A node's neighbours, which are the members of a cohort with which it shares secrets and masks.

In a cohort of up to 200 nodes, any two nodes are neighbours. In most larger cohorts the members are
arranged on a ring, in an order that follows from the cohort's digest, and a node's neighbours are
the nearest members on either side. Every member computes the neighbours itself, so no message
contains them. The page `docs/proofs/secure-sums.md` proves that a malicious server with colluders
learns nothing but one sum of at least t - m honest nodes' vectors.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from types import MappingProxyType

from fedlgm.planning.distributed_trust import least_threshold
from fedlgm_nodes.protocol.messages import sha256

COMPLETE = 200
"""Size of the largest cohort in which any two nodes are neighbours, whatever the threshold."""
_UNSAFE = 128
"""The probability that colluders lie too close together on the ring of one cohort is at most 2 to
the power of minus this number. If a server tries 2^88 cohorts, it is still at most 2^-40.
"""
_VOID = 20
"""The probability that too few neighbours of some node answer, if n - t nodes drop out at random,
is at most about 2 to the power of minus this number.
"""


@dataclass(frozen=True)
class Shape:
    """The shape of the graph of neighbours, with the numbers of shares and signers that it needs.

    Attributes:
        reach: neighbours on either side of a node.
        needed: number of shares that open a secret (u). A node's neighbours and the node itself
            hold one share each of its secrets.
        signers: least number of members that must sign a set of survivors among any `reach`
            consecutive members, so that at least one of them is honest.
        crowd: largest number of colluders among a node's neighbours.
    """

    reach: int
    needed: int
    signers: int
    crowd: int

    @classmethod
    def ring(cls, nodes: int, colluders: int, reach: int) -> Shape:
        """The ring with `reach` neighbours on either side, and the smallest safe numbers of shares
        and signers.
        """
        crowd = _most(nodes - 1, colluders, 2 * reach, _UNSAFE, 2 * nodes)
        return cls(
            reach,
            needed=(2 * reach + 1 + crowd) // 2
            + 1,  # any two sets of shares of one secret have an honest node in common
            signers=_most(nodes, colluders, reach, _UNSAFE, 2 * nodes) + 1,
            crowd=crowd,
        )

    def complete(self, nodes: int) -> bool:
        """Whether any two members are neighbours."""
        return 2 * self.reach + 1 >= nodes

    def survives(self, nodes: int, drops: int) -> bool:
        """Whether enough neighbours and signers are left around every node after this number of
        random drop-outs, except with a small probability.
        """
        near = 2 * self.reach - _most(nodes - 1, drops, 2 * self.reach, _VOID, 2 * nodes)
        return (
            near >= self.needed
            and self.reach - _most(nodes, drops, self.reach, _VOID, 2 * nodes) >= self.signers
        )


@lru_cache(maxsize=64)
def shape_of(nodes: int, threshold: int, colluders: int) -> Shape:
    """The suitable ring with the fewest neighbours, or the complete graph if it has at most about
    twice as many neighbours or no ring is suitable.

    The ring hides single vectors from up to a tenth of the members, even if the noise suffices only
    against fewer colluders. The complete graph, too, hides single vectors from more colluders than
    the noise allows for.

    Example:
        >>> shape_of(200, 180, 20)
        Shape(reach=100, needed=180, signers=0, crowd=20)
        >>> shape_of(1000, 900, 100)
        Shape(reach=83, needed=121, signers=56, crowd=73)
    """
    complete = Shape(nodes // 2, threshold, 0, colluders)  # masks connect any two members
    crowd = max(colluders, nodes // 10)
    if nodes <= COMPLETE or not least_threshold(nodes, crowd) <= threshold <= nodes:
        return complete
    reaches = range(1, nodes // 4 + 1)

    def suffices(reach: int) -> bool:
        return Shape.ring(nodes, crowd, reach).survives(nodes, nodes - threshold)

    place = bisect_left(reaches, True, key=suffices)
    return Shape.ring(nodes, crowd, reaches[place]) if place < len(reaches) else complete


class Neighbours:
    """The neighbours of every member of a cohort.

    Args:
        cohort: digest of the cohort.
        clients: members of the cohort.
        shape: shape of the graph.
    """

    def __init__(self, cohort: str, clients: Iterable[int], shape: Shape) -> None:
        self.shape = shape
        self._circle = sorted(
            clients, key=lambda client: sha256(f"fedlgm secagg circle {cohort} {client}".encode())
        )
        self._place = {client: place for place, client in enumerate(self._circle)}

    def holders(self, client: int) -> set[int]:
        """The members that hold shares of the client's secrets, which are the client's neighbours
        and the client itself.
        """
        place, reach = self._place[client], self.shape.reach
        return {
            self._circle[other % len(self._circle)]
            for other in range(place - reach, place + reach + 1)
        }

    def problem(
        self, clients: Collection[int], peers: Mapping[int, str] = MappingProxyType({})
    ) -> str:
        """A description of a part of the circle in which there are too few of these clients; empty
        if there are enough everywhere.

        Args:
            clients: members that have completed a step.
            peers: member -> the secret of this member that the clients must be able to open, in
                words.
        """
        reach, shape = self.shape.reach, self.shape
        close = self._counts(clients, reach)
        if (least := min(close)) < shape.signers:
            first = self._circle[close.index(least)]
            return (
                f"{least} are among the {reach} members from client {first} on the circle; "
                f"{shape.signers} are needed"
            )
        around = self._counts(clients, 2 * reach + 1)
        for peer, secret in peers.items():
            if (count := around[self._place[peer] - reach]) < shape.needed:
                return f"{count} hold shares of the {secret} of client {peer}; {shape.needed} are needed"
        return ""

    def _counts(self, clients: Collection[int], width: int) -> list[int]:
        """For each position on the circle, the number of `clients` among the `width` members from
        this position on.
        """
        size, there = len(self._circle), set(clients)
        width = min(width, size)
        ahead = (self._circle[place % size] in there for place in range(size + width))
        sums = list(accumulate(ahead, initial=0))
        return [sums[place + width] - sums[place] for place in range(size)]


def _most(population: int, marked: int, drawn: int, bits: int, places: int) -> int:
    """Smallest number that the count of marked members among `drawn` random members exceeds with
    probability at most 2^-bits / places.
    """
    tail, total = 0, math.comb(population, drawn)
    for count in range(min(marked, drawn), -1, -1):
        tail += math.comb(marked, count) * math.comb(population - marked, drawn - count)
        if tail * places << bits > total:
            return count
    raise AssertionError("a probability of all cases is one")
