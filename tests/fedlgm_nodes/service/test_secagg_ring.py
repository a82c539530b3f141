"""Secure sums among neighbours on a ring: exact or void, refusals, and a malicious server."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from fedlgm_nodes.policy import Refusal
from fedlgm_nodes.secagg import cohort as cohorts
from fedlgm_nodes.secagg.cohort import Cohort, Survivors
from fedlgm_nodes.secagg.keys import apply_mask, pair_mask_key, self_mask_key
from fedlgm_nodes.secagg.neighbours import Neighbours, Shape
from fedlgm_nodes.secagg.shamir import SHARE_BYTES, Weights
from fedlgm_nodes.server.secagg import SecureSum, VoidRound
from fedlgm_nodes.service.secagg import Participant, participant
from tests.support.secagg import STEPS, Federation, aggregate, explicit, federation, terms, use_ring
from tests.support.secagg_attacks import attacked


def random_rounds(monkeypatch, count: int, seed: int) -> tuple[int, int]:
    """(exact, void) of that many rounds with random nodes, neighbours, thresholds, drops and
    sizes."""
    rng, made, exact, void = np.random.default_rng(seed), dict[tuple[int, int], Federation](), 0, 0
    for number in range(count):
        reach, colluders = int(rng.integers(1, 4)), int(rng.integers(0, 2))
        nodes = int(rng.integers(2 * reach + 2, 2 * reach + 9))
        use_ring(monkeypatch, explicit(reach, min(colluders, reach - 1)))
        threshold = int(rng.integers((nodes + colluders) // 2 + 1, nodes + 1))
        if (nodes, colluders) not in made:
            made[nodes, colluders] = federation(nodes, colluders, seed=number)
        found = made[nodes, colluders]
        size = int(rng.choice([1, 2, 7, 64]))
        for member in found.members:
            member.size = size
        drops = {step: {c for c in range(nodes) if rng.random() < 0.04} for step in STEPS}
        agreed = terms(threshold, colluders, size, number)
        try:
            total, expected = aggregate(found, agreed, drops)
        except VoidRound:
            void += any(drops.values())
        else:
            np.testing.assert_array_equal(total, expected)
            exact += 1
    assert exact + void == count  # no round is void without a drop-out
    return exact, void


def test_the_sum_is_exact_or_the_round_is_void(monkeypatch):
    exact, void = random_rounds(monkeypatch, 40, seed=1)
    assert exact > 10
    assert void > 6


@pytest.mark.slow
def test_the_sum_is_exact_or_the_round_is_void_in_many_rounds(monkeypatch):
    exact, void = random_rounds(monkeypatch, 150, seed=2)
    assert exact > 45
    assert void > 30


@pytest.mark.slow
def test_a_ring_of_more_than_two_hundred_nodes():
    nodes, agreed = federation(210, 21), terms(189, 21)
    drops = {"share": {0, 1}, "mask": set(range(5, 15)), "agree": {40}, "unmask": {41, 42}}
    total, expected = aggregate(nodes, agreed, drops)
    np.testing.assert_array_equal(total, expected)
    session = nodes.members[60].participant._store.session(agreed.digest)
    assert len(session.outgoing) == 2 * cohorts.shape_of(210, 189, 21).reach < 100
    assert len(session.sharing) == 208


def test_every_step_is_the_same_after_a_restart(monkeypatch):
    """A node keeps nothing but its store, and answers every step as before."""
    use_ring(monkeypatch, explicit(2, 0))
    nodes, agreed = federation(8), terms(6)
    for client, member in enumerate(nodes.members):
        for step in ("advertise", "share", "mask", "sent", "agree", "unmask"):

            def twice(*given, client=client, step=step, store=member.participant._store):
                parts = client, nodes.signers[client], nodes.policy, store
                first, again = (getattr(Participant(*parts), step)(*given) for _ in range(2))
                assert np.array_equal(first, again) if step == "mask" else first == again
                return again

            setattr(member.participant, step, twice)
    np.testing.assert_array_equal(*aggregate(nodes, agreed, {"mask": {3}}))


# -- what a node refuses -----------------------------------------------------------------------------------------------

NODES, AGREED = 12, terms(8)


@pytest.fixture
def ring(monkeypatch):
    """Twelve nodes with three neighbours on either side, and a server, after the step "share"."""
    use_ring(monkeypatch, explicit(3, 0, signers=1))
    return Ring()


class Ring:
    """A round as far as the shares."""

    def __init__(self, threshold: int = 8) -> None:
        self.nodes, self.agreed = federation(NODES), terms(threshold)
        agreed, self.server = self.agreed, SecureSum(self.agreed, self.nodes.services)
        everyone = [member.participant for member in self.nodes.members]
        self.adverts = self.server.advertised(
            {c: one.advertise(agreed).values() for c, one in enumerate(everyone)}
        )
        shares = {c: one.share(agreed.digest, self.adverts) for c, one in enumerate(everyone)}
        self.given = self.server.shared(
            {c: (one.sealed, one.commitment) for c, one in shares.items()}
        )
        self.graph = self.server._cohort.neighbours
        self.circle = self.graph._circle

    def mask(self, client, gone=(), sharing=None):
        """The client's vector where some members have not shared; `sharing` is what the server says
        instead."""
        sealed = {by: text for by, text in self.given[client].items() if by not in gone}
        member, truth = self.nodes.members[client], sorted(set(range(NODES)) - set(gone))
        given = sealed, member.charge, member.make, truth if sharing is None else sharing
        return member.participant.mask(self.agreed.digest, *given)


def test_members_that_shared(ring):
    first, near, far = ring.circle[0], ring.circle[1], ring.circle[6]
    others = [client for client in range(NODES) if client != near]
    for gone, sharing, why in (
        ((), others, "not those of this node's neighbours"),
        ((near,), list(range(NODES)), "not those of this node's neighbours"),
        ((), [*range(NODES), NODES], "not a member"),
        ((), sorted(ring.graph.holders(first)), "7 members shared secrets; 8 are needed"),
        ((), "all", "list of whole numbers"),
        ((), list(range(NODES))[::-1], "ascending"),
        (ring.circle[3:6], None, (f"0 are among the 3 members from client {ring.circle[3]} on the "
                                 "circle; 1 are needed")),
        (
            [ring.circle[place] for place in (1, 2, 10, 11)], None,
            f"3 hold shares of the secrets of client {first}; 4 are needed",
        ),
    ):  # fmt: skip
        with pytest.raises(Refusal, match=why):
            ring.mask(first, gone, sharing)
    member = ring.nodes.members[first]
    with pytest.raises(
        Refusal, match="7 members shared secrets; 8 are needed"
    ):  # all that a node without a list knows
        member.participant.mask(AGREED.digest, ring.given[first], member.charge, member.make)
    assert member.charges == []
    ring.mask(first, (far,))
    with pytest.raises(Refusal, match="masked for another set of members"):
        ring.mask(first)


def test_shares_are_given_only_if_the_signers_leave_no_gap(ring):
    for client in range(NODES):
        ring.mask(client)
    parts = [member.participant for member in ring.nodes.members]
    survivors = list(range(NODES))
    signed = {client: parts[client].agree(AGREED.digest, survivors) for client in survivors}
    gap = {client: text for client, text in signed.items() if client not in ring.circle[4:7]}
    with pytest.raises(
        Refusal, match=rf"0 are among the 3 members from client {ring.circle[4]} on the circle"
    ):
        parts[0].unmask(AGREED.digest, gap)
    assert len(parts[0].unmask(AGREED.digest, signed)) == 7


def test_a_cohort_of_another_shape_is_another_cohort(ring, monkeypatch):
    cohort = ring.server._cohort
    digests = {cohort.digest}
    for shape in (explicit(3, 0, signers=2), explicit(4, 0), Shape(NODES // 2, 8, 0, 0)):
        monkeypatch.setattr(cohorts, "shape_of", lambda *_, shape=shape: shape)
        digests.add(Cohort(AGREED, cohort.adverts.values(), ring.nodes.services).digest)
    assert len(digests) == 4
    parts = [member.participant for member in ring.nodes.members]
    with pytest.raises(
        Refusal, match="with another cohort"
    ):  # a node that has been upgraded in between
        parts[0].share(AGREED.digest, ring.adverts)


# -- what the server says ----------------------------------------------------------------------------------------------


def test_a_void_round_names_the_place(ring):
    gone = ring.circle[4:7]
    for client in set(range(NODES)) - set(gone):
        ring.server.add(
            client, ring.mask(client), ring.nodes.members[client].participant.sent(AGREED.digest)
        )
    why = (
        "of the nodes that sent a vector, 0 are among the 3 members from client "
        f"{gone[0]} on the circle; 1 are needed"
    )
    with pytest.raises(VoidRound, match=why):
        ring.server.answered()


def test_a_secret_that_cannot_be_opened(ring):
    gone = [ring.circle[place] for place in (0, 2, 10)]
    for client in set(range(NODES)) - set(gone):
        ring.server.add(
            client, ring.mask(client), ring.nodes.members[client].participant.sent(AGREED.digest)
        )
    ring.graph.shape = replace(ring.graph.shape, needed=5)
    first = min(c for c in range(NODES) if len(ring.graph.holders(c).difference(gone)) < 5)
    secret = "masking key" if first in gone else "seed"
    why = rf"of the nodes that sent a vector, 4 hold shares of the {secret} of client {first}; 5 are needed"
    with pytest.raises(VoidRound, match=why):
        ring.server.answered()


def test_wrong_shares_are_found_among_the_neighbours(monkeypatch):
    use_ring(monkeypatch, explicit(4, 0, signers=1))
    nodes, lost = federation(14), {}
    liar = nodes.members[0].participant
    unmask = liar.unmask
    liar.unmask = lambda *given: dict.fromkeys(unmask(*given), "01" * SHARE_BYTES)
    np.testing.assert_array_equal(*aggregate(nodes, terms(10), {}, lost=lost))
    assert lost == {0: "it gave wrong shares"}


# -- a malicious server ------------------------------------------------------------------------------------------------


def test_random_deviations():
    gains, violations, sums = attacked(100, seed=1, ring=True)
    assert violations == []
    assert sums > 0
    assert gains.accepted > 10


@pytest.mark.slow
def test_four_hundred_random_deviations():
    _, violations, sums = attacked(400, seed=2, ring=True)
    assert violations == []
    assert sums > 8


@pytest.mark.parametrize("checked", [True, False])
def test_an_arc_between_two_gaps(monkeypatch, checked):
    """A server drops two nodes at both ends of an arc of three, and reads their sum if signers may
    leave gaps."""
    use_ring(monkeypatch, explicit(2, 0))
    ring, agreed = Ring(7), terms(7)
    circle, parts = ring.circle, [member.participant for member in ring.nodes.members]
    arc, gone = circle[5:8], {*circle[3:5], *circle[8:10]}
    vectors = {client: ring.mask(client).copy() for client in range(NODES)}
    survivors = sorted(set(range(NODES)) - gone)
    signed = {client: parts[client].agree(agreed.digest, survivors) for client in survivors}
    if checked:
        for client in survivors:
            with pytest.raises(Refusal, match="0 are among the 2 members from client"):
                parts[client].unmask(agreed.digest, signed)
        return
    monkeypatch.setattr(Neighbours, "problem", lambda *_: "")
    shares = {client: parts[client].unmask(agreed.digest, signed) for client in survivors}
    cohort, total = (
        ring.server._cohort,
        np.sum([vectors[client] for client in arc], axis=0, dtype=np.uint32),
    )

    def secret(peer):
        holders = sorted(ring.graph.holders(peer) & shares.keys())[: ring.graph.shape.needed]
        return Weights(holders).combine(
            {holder: bytes.fromhex(shares[holder][peer]) for holder in holders}
        )

    for client in arc:
        apply_mask(total, self_mask_key(secret(client), cohort.digest), subtract=True)
        for other in ring.graph.holders(client) & gone:
            key = pair_mask_key(
                secret(other), cohort.adverts[client].masking, cohort.digest, other, client
            )
            apply_mask(total, key, subtract=other < client)
    plain = [ring.nodes.members[client].vectors[cohort.digest] for client in arc]
    np.testing.assert_array_equal(total, np.sum(plain, axis=0, dtype=np.uint32))


def test_the_search_finds_nodes_that_sign_two_sets(monkeypatch):
    def careless(self, attempt, answered):
        session, cohort = self._session_and_cohort(attempt)
        return Survivors(cohort.digest, tuple(session.sharing), cohorts.clients_of(answered)).sign(
            self._signer
        )

    monkeypatch.setattr(participant.Participant, "agree", careless)
    assert any("two signatures" in one for one in attacked(50, seed=1, ring=True)[1])
