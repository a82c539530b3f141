"""Neighbours on a ring: their numbers, and by exhaustion what a malicious server can learn on small
rings."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
from scipy.stats import hypergeom

from fedlgm.planning.distributed_trust import least_threshold
from fedlgm_nodes.secagg.neighbours import COMPLETE, Neighbours, Shape, shape_of
from tests.support.secagg import explicit

SETTINGS = [
    (300, 270, 30),
    (500, 450, 50),
    (1000, 900, 100),
    (1000, 800, 100),
    (1000, 700, 0),
    (1000, 980, 300),
]


@pytest.mark.parametrize(("nodes", "threshold", "colluders"), SETTINGS)
def test_numbers_of_neighbours(nodes, threshold, colluders):
    """The tails are those of SciPy; with fewer neighbours one of the conditions fails."""
    shape, crowd = shape_of(nodes, threshold, colluders), max(colluders, nodes // 10)
    near, drops = 2 * shape.reach, nodes - threshold
    assert 2 * shape.needed > near + 1 + shape.crowd
    assert (
        hypergeom.logsf(shape.crowd, nodes - 1, crowd, near)
        <= np.log(2.0**-128 / (2 * nodes)) + 1e-6
    )
    assert (
        hypergeom.logsf(shape.signers - 1, nodes, crowd, shape.reach)
        <= np.log(2.0**-128 / (2 * nodes)) + 1e-6
    )
    assert nodes * hypergeom.sf(near - shape.needed, nodes - 1, drops, near) <= 2.0**-21 * (
        1 + 1e-9
    )
    assert nodes * hypergeom.sf(
        shape.reach - shape.signers, nodes, drops, shape.reach
    ) <= 2.0**-21 * (1 + 1e-9)
    assert not Shape.ring(nodes, crowd, shape.reach - 1).survives(nodes, drops)


def test_everyone_is_a_neighbour_in_small_cohorts_and_where_many_may_drop_out():
    for nodes, threshold, colluders in (
        (COMPLETE, 190, 0), (7, 6, 1), (300, 200, 0), (1000, 667, 100), (500, 400, 300), (300, 301, 0),
    ):  # fmt: skip
        shape = shape_of(nodes, threshold, colluders)
        assert shape.complete(nodes)
        assert (shape.needed, shape.signers) == (threshold, 0)
        graph = Neighbours("a" * 64, range(nodes), shape)
        assert graph.holders(3) == set(range(nodes))
    assert not shape_of(COMPLETE + 1, 190, 0).complete(COMPLETE + 1)


def test_neighbours_are_mutual_and_follow_from_the_cohort():
    clients = range(5, 40)
    one, other = (Neighbours(digest * 64, clients, explicit(4, 1)) for digest in "ab")
    for client in clients:
        assert client in one.holders(client)
        assert len(one.holders(client)) == 9
        assert all(client in one.holders(near) for near in one.holders(client))
    assert [one.holders(c) for c in clients] == [
        Neighbours("a" * 64, clients, explicit(4, 1)).holders(c) for c in clients
    ]
    assert one.holders(5) != other.holders(5)


def test_where_clients_are_too_few():
    graph = Neighbours("a" * 64, range(20), replace(explicit(3, 0), signers=2))
    circle = graph._circle
    assert graph.problem(circle, dict.fromkeys(circle, "seed")) == ""
    assert graph.problem(set(circle) - set(circle[4:6])) == (
        f"1 are among the 3 members from client {circle[3]} on the circle; 2 are needed"
    )
    apart = {circle[4], circle[6], circle[8]}
    graph.shape = replace(graph.shape, signers=1, needed=6)
    assert graph.problem(set(circle) - apart, {circle[0]: "seed"}) == ""
    assert graph.problem(set(circle) - apart, dict.fromkeys(circle, "seed")) == (
        f"5 hold shares of the seed of client {circle[3]}; 6 are needed"
    )


# -- what a server can learn -------------------------------------------------------------------------------------------


@dataclass
class World:
    """A ring of nodes 0, 1, ... in this order; sets of nodes are bits of a number.

    Attributes:
        nodes: their number.
        colluders: which collude.
        threshold: signatures that a node requires.
        shape: shape of the ring.
        careless: whether nodes send vectors however few of their neighbours have shared.
    """

    nodes: int
    colluders: int
    threshold: int
    shape: Shape
    careless: bool = False

    def __post_init__(self) -> None:
        reach = self.shape.reach
        self.windows = [self.arc(first, reach) for first in range(self.nodes)]
        self.holders = [self.arc(first - reach, 2 * reach + 1) for first in range(self.nodes)]
        self.honest = (1 << self.nodes) - 1 & ~self.colluders
        self.least = self.threshold - self.colluders.bit_count()
        self.places = [place for place in range(self.nodes) if self.honest >> place & 1]

    def arc(self, first: int, length: int) -> int:
        return self.subset((first + i) % self.nodes for i in range(length))

    @staticmethod
    def subset(places: Iterator[int]) -> int:
        return sum(1 << place for place in places)

    def dense(self, clients: int) -> bool:
        return all((clients & window).bit_count() >= self.shape.signers for window in self.windows)

    def enough(self, signers: int, among: int) -> bool:
        """Whether a node gives shares if these honest nodes and all colluders among the survivors
        have signed."""
        signed = signers | self.colluders & among
        return signed.bit_count() >= self.threshold and self.dense(signed)

    def opened(self, givers: int, peers: int) -> int:
        """Those of the peers of whom these nodes and the colluders hold enough shares of one
        secret."""
        having = givers | self.colluders
        return self.subset(
            place
            for place in self.places
            if peers >> place & 1
            and (having & self.holders[place]).bit_count() >= self.shape.needed
        )

    def few(self, sharing: int, place: int) -> bool:
        """Whether a node sends no vector because too few of its neighbours have shared."""
        return not self.careless and (sharing & self.holders[place]).bit_count() < self.shape.needed

    def sent(self, honest: int, sharing: int) -> bool:
        """Whether these nodes send vectors that are masked for `sharing`."""
        near = not any(self.few(sharing, place) for place in self.places if honest >> place & 1)
        return near and sharing.bit_count() >= self.threshold and self.dense(sharing)

    def learnt(self, seeds: int, keys: int, sharing: int, others: int = 0) -> bool:
        """Whether a sum of too few vectors can be read.

        Args:
            seeds, keys: nodes whose seed or masking key is known.
            sharing: members for whom all but the `others` have masked their vectors. Each of those
                has masked it for the members that suit the server best.
        """

        def closed(some: int) -> bool:
            """Whether some vectors are part of a sum of too few."""
            if some & ~seeds or some.bit_count() >= self.least:
                return False
            for place in self.places:
                if not some >> place & 1:
                    continue
                near, known = self.holders[place] & self.honest, some | keys
                if not others >> place & 1:
                    if missing := near & sharing & ~known:
                        return closed(some | missing)
                elif self.few(known | self.colluders, place):
                    return any(
                        closed(some | 1 << more)
                        for more in self.places
                        if near & ~known & 1 << more
                    )
            return True

        return any(closed(1 << place) for place in self.places)

    def splits(self, kinds: int) -> Iterator[list[int]]:
        """Sets of honest signers, for whom nodes give shares, and all divisions of the other honest
        nodes."""
        for count in range(len(self.places) - self.least + 1):
            for rest in itertools.combinations(self.places, count):
                signed = self.honest & ~self.subset(rest)
                if not self.enough(signed, self.colluders):
                    continue
                for kind in itertools.product(range(kinds), repeat=count):
                    yield [
                        signed,
                        *(
                            self.subset(p for p, k in zip(rest, kind, strict=True) if k == i)
                            for i in range(kinds)
                        ),
                    ]

    def sums(self) -> Iterator[str]:
        """What a server learns too much, over all sets of survivors, and all vectors masked for
        other members."""
        for signed, out, dropped, other in self.splits(3):
            sharing = (1 << self.nodes) - 1 & ~out
            if self.sent(signed, sharing):
                seeds, keys = self.opened(signed, signed | other), self.opened(signed, dropped)
                if self.learnt(seeds, keys, sharing, other):
                    yield "a part"

    def mixed(self) -> Iterator[str]:
        """The same where some nodes unmask at once, because all have sent, and others sign a
        smaller set."""
        for signed, out, at_once, gone, gone_at_once in self.splits(4):
            sharing, every = (1 << self.nodes) - 1 & ~out, at_once | gone_at_once
            if not self.sent(self.honest & ~out, sharing):
                continue
            keys = self.opened(signed, gone | gone_at_once)
            seeds = self.opened(signed | every, signed | at_once) | self.opened(
                every, gone | gone_at_once
            )
            if seeds & keys:
                yield "both secrets"
            if self.learnt(seeds, keys, sharing):
                yield "a part"


def worlds(nodes: int, reach: int, colluders: int) -> Iterator[World]:
    """Rings with these colluders, the first of which is node 0, and the smallest numbers that are
    safe for them."""
    for others in itertools.combinations(range(1, nodes), max(colluders - 1, 0)):
        bad = World.subset((0, *others)) if colluders else 0
        bare = World(nodes, bad, least_threshold(nodes, colluders), Shape(reach, 1, 0, 0))
        crowd = max((bad & bare.holders[place]).bit_count() for place in bare.places)
        most = max((bad & window).bit_count() for window in bare.windows)
        if most < reach:
            yield replace(bare, shape=explicit(reach, crowd, most + 1))


SMALL = [(6, 1, 0), (9, 2, 0), (8, 2, 1), (9, 3, 1), (9, 3, 2)]


@pytest.mark.parametrize(("nodes", "reach", "colluders"), SMALL)
def test_no_server_reads_less_than_a_sum_of_all_on_a_small_ring(nodes, reach, colluders):
    seen = 0
    for world in worlds(nodes, reach, colluders):
        seen += 1
        assert next(world.sums(), None) is None
        assert next(world.mixed(), None) is None
    assert seen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "reach", "colluders"), [(12, 2, 0), (11, 3, 0), (11, 3, 1), (11, 3, 2), (12, 4, 2)]
)
def test_no_server_reads_less_than_a_sum_of_all_on_a_larger_ring(nodes, reach, colluders):
    test_no_server_reads_less_than_a_sum_of_all_on_a_small_ring(nodes, reach, colluders)


def test_the_search_finds_what_is_missing():
    """Signers may leave gaps; one share less opens a secret; or nodes do not ask how many
    neighbours have shared."""
    (world,) = worlds(11, 2, 0)
    gaps = replace(world, shape=replace(world.shape, signers=0))
    assert "a part" in gaps.sums()
    (world,) = worlds(9, 3, 1)
    few = replace(world, shape=replace(world.shape, needed=world.shape.needed - 1))
    assert "both secrets" in few.mixed()
    assert "a part" in few.sums()
    assert "a part" in replace(world, careless=True).sums()


def test_no_server_reads_less_than_a_sum_of_all_on_random_larger_rings():
    """Drop-outs in arcs, which is the best that a server can do, and others at random."""
    rng, accepted = np.random.default_rng(1), 0
    for _ in range(1500):
        nodes, reach = int(rng.integers(24, 60)), int(rng.integers(3, 8))
        bad = World.subset(int(place) for place in rng.permutation(nodes)[: rng.integers(0, 3)])
        bare = World(nodes, bad, least_threshold(nodes, bad.bit_count()), Shape(reach, 1, 0, 0))
        crowd = max((bad & bare.holders[place]).bit_count() for place in bare.places)
        most = max((bad & window).bit_count() for window in bare.windows)
        if most >= reach:
            continue
        world, gone = replace(bare, shape=explicit(reach, crowd, most + 1)), 0
        for length in rng.integers(1, reach + 2, size=int(rng.integers(1, 6))):
            gone |= world.arc(int(rng.integers(nodes)), int(length)) & world.honest
        out = (
            gone & int(rng.integers(2**62)) & int(rng.integers(2**62)) if rng.random() < 0.5 else 0
        )
        signed, sharing = world.honest & ~gone, (1 << nodes) - 1 & ~out
        if not world.enough(signed, bad) or not world.sent(signed, sharing):
            continue
        accepted += 1
        keys = world.opened(signed, gone & ~out)
        assert not world.learnt(world.opened(signed, signed), keys, sharing)
    assert accepted > 200
