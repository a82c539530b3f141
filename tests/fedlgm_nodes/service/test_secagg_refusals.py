"""What a node refuses in rounds of secure aggregation, step by step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedlgm_nodes.policy import Refusal
from fedlgm_nodes.secagg.cohort import Advert, Sent, Survivors, key_pairs
from fedlgm_nodes.service.secagg import Distributed, Participant
from tests.support.secagg import MemoryStore, federation, terms

AGREED = terms(4, 1)
KEY = "ab" * 32


@pytest.fixture
def nodes():
    return federation(5, 1, min_cohort=5)


def advertise(nodes, agreed=AGREED):
    return [member.participant.advertise(agreed).values() for member in nodes.members]


def share(nodes, agreed=AGREED):
    adverts = advertise(nodes, agreed)
    sealed = [member.participant.share(agreed.digest, adverts).sealed for member in nodes.members]
    return {to: {by: sealed[by][to] for by in range(5) if by != to} for to in range(5)}


def mask(nodes, agreed=AGREED):
    for to, delivered in share(nodes, agreed).items():
        member = nodes.members[to]
        member.participant.mask(agreed.digest, delivered, member.charge, member.make)


def test_a_node_needs_its_own_key_among_its_peers():
    policy = federation(3).policy
    with pytest.raises(
        Refusal, match=r"distributed\.peers does not hold this node's service key as client 1"
    ):
        Participant(1, Ed25519PrivateKey.generate(), policy, MemoryStore())


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"min_cohort": 3, "max_colluders": 2}, "must exceed max_colluders"),
        ({"min_cohort": 3, "max_colluders": 0, "peers": ["ab", "cd"]}, "the key of client 0"),
        (
            {"min_cohort": 3, "max_colluders": 1, "peers": [KEY, "", KEY]},
            "clients 0 and 2 have the same key",
        ),
        ({"min_cohort": 3, "max_colluders": 1, "peers": [KEY, KEY.upper()]}, "the key of client 1"),
    ],
)
def test_policies_that_protect_nobody(values, why):
    with pytest.raises(ValueError, match=why):
        Distributed(**({"peers": ["", ""]} | values))


def test_too_little_noise(nodes):
    with pytest.raises(
        Refusal, match="noise that suffices against 0 colluders; this node wants max_colluders = 1"
    ):
        nodes.members[0].participant.advertise(replace(AGREED, colluders=0))


@pytest.mark.parametrize(
    ("threshold", "colluders", "why"),
    [
        (3, 1, r"2 t > n \+ m is needed, that is 4 or more"),
        (6, 1, "6 for 5 nodes"),
        (4, 4, "nobody's noise would count"),
    ],
)
def test_thresholds(nodes, threshold, colluders, why):
    agreed = terms(threshold, colluders)
    adverts = advertise(nodes, agreed)
    with pytest.raises(Refusal, match=why):
        nodes.members[0].participant.share(agreed.digest, adverts)


def test_cohorts(nodes):
    adverts, node = advertise(nodes), nodes.members[0].participant
    other = [
        member.participant.advertise(terms(4, 1, number=1)).values() for member in nodes.members
    ]
    stranger, keys = Ed25519PrivateKey.generate(), key_pairs()
    forged = Advert.make(AGREED, 4, stranger, *keys).values()
    copied = Advert.make(AGREED, 4, nodes.signers[4], *keys)
    copied = replace(copied, masking=adverts[1]["masking"]).values()
    for cohort, why in (
        (adverts[:4], "a cohort of 4 nodes; min_cohort is 5"),
        (adverts[1:], "own advert is missing"),
        ([other[0], *adverts[1:]], "not signed by its enrolled service for these terms"),
        ([*adverts[:4], other[4]], "the advert of client 4 was not signed"),
        ([*adverts[:4], forged], "the advert of client 4 was not signed"),
        ([*adverts[:4], copied], "the advert of client 4 was not signed"),
        ([*adverts, adverts[4]], "a node appears twice"),
        ([*adverts, adverts[4] | {"client": 5}], "client 5 is not among the enrolled peers"),
        ([*adverts[:4], {}], "must have the fields"),
        ([*adverts[:4], adverts[4] | {"sealing": "x" * 64}], "malformed"),
    ):
        with pytest.raises(Refusal, match=why):
            node.share(AGREED.digest, cohort)
    node.share(AGREED.digest, adverts)
    # A colluder's second advert, properly signed, makes another cohort: the secrets were shared
    # with the first.
    again = Advert.make(AGREED, 4, nodes.signers[4], *key_pairs()).values()
    with pytest.raises(Refusal, match="shared its secrets of this attempt with another cohort"):
        node.share(AGREED.digest, [*adverts[:4], again])
    copy = Advert.make(AGREED, 4, nodes.signers[4], bytes(31) + b"1", bytes(31) + b"1").values()
    with pytest.raises(Refusal, match="a public key appears twice"):
        nodes.members[1].participant.share(AGREED.digest, [*adverts[:4], copy])


def test_a_node_is_charged_before_its_vector_is_made_and_not_for_what_it_refuses(nodes):
    delivered, member = share(nodes)[0], nodes.members[0]
    node = member.participant
    for sealed, why in (
        (
            {client: delivered[client] for client in (1, 2)},
            "3 members shared secrets; 4 are needed",
        ),
        (delivered | {1: delivered[2]}, "client 1's shares for this node are not authentic"),
        (delivered | {7: delivered[2]}, "not a member of the cohort"),
        (delivered | {1: "AAAA"}, "not authentic"),
    ):
        with pytest.raises(Refusal, match=why):
            node.mask(AGREED.digest, sealed, member.charge, member.make)
    assert member.charges == []
    with pytest.raises(Refusal, match="has sent no vector"):
        node.agree(AGREED.digest, [0, 1, 2, 3])
    first = node.mask(AGREED.digest, delivered, member.charge, member.make)
    again = node.mask(AGREED.digest, delivered, member.charge, member.make)
    assert (first == again).all()
    assert len(member.charges) == 1
    with pytest.raises(Refusal, match="masked for another set of members"):
        node.mask(AGREED.digest, {c: delivered[c] for c in (1, 2, 3)}, member.charge, member.make)


def test_one_set_of_survivors_is_signed(nodes):
    mask(nodes)
    node = nodes.members[0].participant
    for answered, why in (
        ([0, 1, 2], "3 survivors; 4 are needed"),
        ([1, 2, 3, 4], "this node must be one of them"),
        ([0, 1, 2, 3, 9], "survivors must have shared secrets"),
        ([1, 0, 2, 3], "ascending order"),
        ([0, 1, 2, 2], "ascending order"),
        ("0123", "list of whole numbers"),
    ):
        with pytest.raises(Refusal, match=why):
            node.agree(AGREED.digest, answered)
    signature = node.agree(AGREED.digest, [0, 1, 2, 3])
    assert node.agree(AGREED.digest, [0, 1, 2, 3]) == signature
    with pytest.raises(Refusal, match="accepted another set of survivors"):
        node.agree(AGREED.digest, [0, 1, 2, 3, 4])


def test_shares_are_given_for_the_set_that_enough_have_signed(nodes):
    mask(nodes)
    members, survivors = nodes.members, [0, 1, 2, 3]
    with pytest.raises(Refusal, match="signed no set"):
        members[0].participant.unmask(AGREED.digest, {})
    signatures = {
        client: members[client].participant.agree(AGREED.digest, survivors) for client in survivors
    }
    cohort = members[0].charges[0]
    others = Survivors(cohort, (0, 1, 2, 3, 4), (0, 1, 2, 3, 4))
    colluder = others.sign(nodes.signers[4])
    for given in (
        {}, {c: signatures[c] for c in (0, 1, 2)}, dict.fromkeys(survivors, signatures[0]),
        {**{c: signatures[c] for c in (0, 1, 2)}, 4: colluder}, signatures | {3: signatures[3][:-2]},
        {**{c: signatures[c] for c in (0, 1, 2)}, 9: signatures[3]},
    ):  # fmt: skip
        with pytest.raises(
            Refusal, match="have signed the set that this node has signed; 4 are needed"
        ):
            members[0].participant.unmask(AGREED.digest, given)
    revealed = members[0].participant.unmask(AGREED.digest, signatures)
    assert members[0].participant.unmask(AGREED.digest, signatures) == revealed
    assert sorted(revealed) == [0, 1, 2, 3, 4]


def test_a_node_unmasks_at_once_if_all_have_sent_their_vectors_and_then_accepts_no_other_set(nodes):
    mask(nodes)
    members, everyone = [member.participant for member in nodes.members], [0, 1, 2, 3, 4]
    sent = {client: members[client].sent(AGREED.digest) for client in everyone}
    cohort = nodes.members[0].charges[0]
    for given in (
        {c: sent[c] for c in everyone[1:]}, {c: sent[c] for c in everyone[:4]}, dict.fromkeys(everyone, sent[0]),
        sent | {4: sent[4][:-2]}, sent | {4: Sent(cohort, (0, 1, 2, 4)).sign(nodes.signers[4])},
        sent | {4: Sent("0" * 64, (0, 1, 2, 3, 4)).sign(nodes.signers[4])},
        sent | {4: Survivors(cohort, (0, 1, 2, 3, 4), (0, 1, 2, 3, 4)).sign(nodes.signers[4])},
    ):  # fmt: skip
        with pytest.raises(
            Refusal, match=r"signed no set .* and not every member that shared secrets has signed"
        ):
            members[0].unmask(AGREED.digest, given)
    revealed = members[0].unmask(AGREED.digest, sent)
    assert members[0].unmask(AGREED.digest, sent) == revealed
    with pytest.raises(Refusal, match="accepted another set of survivors"):
        members[0].agree(AGREED.digest, [0, 1, 2, 3])
    signed = {client: members[client].agree(AGREED.digest, [1, 2, 3, 4]) for client in everyone[1:]}
    for given in (sent, sent | {c: signed[c] for c in (1, 2, 3)}):
        with pytest.raises(
            Refusal, match="have signed the set that this node has signed; 4 are needed"
        ):
            members[1].unmask(AGREED.digest, given)
    with pytest.raises(
        Refusal, match="have signed the set that this node has signed; 4 are needed"
    ):
        members[0].unmask(AGREED.digest, signed)


def test_nothing_is_signed_as_sent_before_it_is(nodes):
    share(nodes)
    for step in (lambda: nodes.members[0].participant.sent(AGREED.digest),
                 lambda: nodes.members[0].participant.agree(AGREED.digest, [0, 1, 2, 3, 4])):  # fmt: skip
        with pytest.raises(Refusal, match="has sent no vector"):
            step()


def test_secrets_are_forgotten_once_they_are_needed_no_more(nodes):
    mask(nodes)
    signatures = {
        c: nodes.members[c].participant.agree(AGREED.digest, [0, 1, 2, 3, 4]) for c in range(5)
    }
    node = nodes.members[0].participant
    node.unmask(AGREED.digest, signatures)
    session = node._store.session(AGREED.digest)
    assert (session.sealing, session.masking, session.seed, session.held) == ("", "", "", {})
    for number in range(
        1, 9
    ):  # eight newer attempts: the first is forgotten, but for what was signed
        node.advertise(terms(4, 1, number=number))
    with pytest.raises(Refusal, match="It keeps the 4 newest open rounds"):
        node.share(AGREED.digest, [])
    assert node._store.signed_survivors(session.cohort) is not None
