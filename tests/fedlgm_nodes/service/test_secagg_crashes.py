"""A node that dies anywhere in a round: what it sent stays as it was, nothing is signed twice or
released uncharged."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedlgm.privacy.events import gaussian_event
from fedlgm_nodes.policy import Refusal
from fedlgm_nodes.protocol.messages import digest, public_text
from fedlgm_nodes.server.secagg import SecureSum
from fedlgm_nodes.service.ledger import NodeLedger
from fedlgm_nodes.service.row import CLIENT
from fedlgm_nodes.service.secagg import Distributed, Participant, SessionStore
from tests.support.secagg import terms

AGREED, SIZE = terms(2, size=5), 5
DURABLE = ("open", "bind_keys", "keep", "sign", "charge")


class Killed(BaseException):
    """As if the process had ended here."""


class Node:
    """A participant over a store and a ledger on disk, that can be started again.

    Args:
        folder: of both files.
        client, signer, policy: as for a participant.
    """

    def __init__(
        self, folder: Path, client: int, signer: Ed25519PrivateKey, policy: Distributed
    ) -> None:
        self.client, self.folder = client, folder
        self._parts = client, signer, policy
        folder.mkdir()
        NodeLedger.create(folder / "ledger.sqlite", folder / "seen.json", "hearts")
        self.start()

    def start(self) -> None:
        self.ledger = NodeLedger(self.folder / "ledger.sqlite", self.folder / "seen.json", "hearts")
        self.store = SessionStore(self.folder / "rounds.sqlite", self.ledger)
        self.participant = Participant(*self._parts, self.store)

    def stop(self) -> None:
        self.store.close()
        self.ledger.close()

    def restart(self) -> None:
        self.stop()
        self.start()

    def charge(self, cohort: str) -> None:
        if self.ledger.find(cohort) is None:
            self.ledger.charge(
                cohort,
                gaussian_event(2.0),
                trust="distributed",
                run="run",
                round=1,
                data="d",
                protects=CLIENT,
            )

    def make(self, cohort: str) -> np.ndarray:
        assert self.ledger.find(cohort) is not None
        return np.random.default_rng(int(digest(cohort, self.client)[:8], 16)).integers(
            0, 2**32, SIZE, dtype=np.uint32
        )


@pytest.fixture
def nodes(tmp_path):
    signers = [Ed25519PrivateKey.generate() for _ in range(3)]
    policy = Distributed(
        min_cohort=3, max_colluders=0, peers=tuple(public_text(signer) for signer in signers)
    )
    made = [
        Node(tmp_path / str(client), client, signer, policy)
        for client, signer in enumerate(signers)
    ]
    yield made
    for node in made:
        node.stop()


def steps(nodes, server, directly=False):
    """The round's calls, as (step, node, call that gives the answer); a generator that is sent the
    answers."""
    attempt, here = AGREED.digest, range(3)
    adverts = {}
    for c in here:
        adverts[c] = yield (
            "advertise",
            nodes[c],
            lambda c=c: nodes[c].participant.advertise(AGREED).values(),
        )
    cohort, shares = server.advertised(adverts), {}
    for c in here:
        shared = yield "share", nodes[c], lambda c=c: nodes[c].participant.share(attempt, cohort)
        shares[c] = shared.sealed, shared.commitment
    given = server.shared(shares)
    for c in here:
        masked = yield (
            "mask",
            nodes[c],
            lambda c=c: nodes[c].participant.mask(
                attempt, given[c], nodes[c].charge, nodes[c].make
            ),
        )
        server.add(c, masked, nodes[c].participant.sent(attempt))
    answered, signatures, revealed = server.answered(), {}, {}
    for c in () if directly else here:
        signatures[c] = yield (
            "agree",
            nodes[c],
            lambda c=c: nodes[c].participant.agree(attempt, answered),
        )
    signed = server.sent() if directly else server.signed(signatures)
    for c in here:
        revealed[c] = yield (
            "unmask",
            nodes[c],
            lambda c=c: nodes[c].participant.unmask(attempt, signed),
        )
    yield "total", None, lambda: server.total(revealed)


def same(one, other) -> bool:
    return bool(np.array_equal(one, other)) if isinstance(one, np.ndarray) else one == other


@pytest.mark.parametrize("directly", [False, True])
def test_every_step_is_the_same_after_a_restart(nodes, directly):
    """The node ends after each answer; the same question after it gives the same answer, and the
    sum is exact."""
    server = SecureSum(AGREED, nodes[0].participant._policy.services)
    run = steps(nodes, server, directly)
    step, node, call = next(run)
    while step != "total":
        answer = call()
        node.restart()
        assert same(call(), answer), step
        step, node, call = run.send(answer)
    (cohort,) = {row.request for node in nodes for row in node.ledger.rows()}
    expected = np.sum([node.make(cohort) for node in nodes], axis=0, dtype=np.uint32)
    np.testing.assert_array_equal(call(), expected)
    assert [len(node.ledger.rows()) for node in nodes] == [1] * 3
    for node in nodes:
        with pytest.raises(Refusal, match="another set"):
            node.participant.agree(AGREED.digest, [0, 1])


def once_dying(original, name, crashes, when):
    """A write at which the node dies the first time."""

    def write(*args, **options):
        if name in crashes:
            return original(*args, **options)
        crashes.add(name)
        if when == "after":
            original(*args, **options)
        raise Killed

    return write


@pytest.mark.parametrize("directly", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_crash_at_every_write(nodes, monkeypatch, when, directly):
    """The node dies before or after each write; started again it goes on, charged once, and the sum
    is exact."""
    victim, server = nodes[1], SecureSum(AGREED, nodes[0].participant._policy.services)
    run, crashes = steps(nodes, server, directly), set()
    step, node, call = next(run)
    while step != "total":
        answer = None
        while answer is None:
            for write in DURABLE if node is victim else ():
                owner = victim.ledger if write == "charge" else victim.store
                monkeypatch.setattr(
                    owner, write, once_dying(getattr(owner, write), (step, write), crashes, when)
                )
            with contextlib.suppress(Killed):
                answer = call()
            if node is victim:
                victim.restart()  # what was patched is gone with the old objects
        step, node, call = run.send(answer)
    assert crashes == {
        ("advertise", "open"),
        ("share", "bind_keys"),
        ("share", "keep"),
        ("mask", "charge"),
        ("mask", "keep"),
        ("unmask" if directly else "agree", "sign"),
        ("unmask", "keep"),
    }
    (cohort,) = {row.request for node in nodes for row in node.ledger.rows()}
    expected = np.sum([node.make(cohort) for node in nodes], axis=0, dtype=np.uint32)
    np.testing.assert_array_equal(call(), expected)
    assert [len(node.ledger.rows()) for node in nodes] == [1] * 3


@pytest.mark.parametrize(
    ("write", "last", "directly"),
    [
        ("charge", "mask", False),
        ("keep", "mask", False),
        ("sign", "agree", False),
        ("sign", "unmask", True),
    ],
)
def test_kill_9(nodes, write, last, directly):
    """A process that is killed right after a write has left it on disk, and the next one keeps to
    it."""
    victim, server = nodes[0], SecureSum(AGREED, nodes[0].participant._policy.services)
    run = steps(nodes, server, directly)
    step, node, call = next(run)
    while (step, node) != (last, victim):
        step, node, call = run.send(call())
    victim.stop()

    def die() -> None:
        victim.start()
        owner = victim.ledger if write == "charge" else victim.store
        original = getattr(owner, write)

        def dying(*args, **options):
            original(*args, **options)
            os.kill(os.getpid(), signal.SIGKILL)

        setattr(owner, write, dying)
        call()

    process = multiprocessing.get_context("fork").Process(target=die)
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    victim.start()
    assert len(victim.ledger.rows()) == 1  # charged, whether or not anything left
    if write == "keep":
        assert victim.store.vector(AGREED.digest) is not None
    if write == "sign":
        with pytest.raises(Refusal, match="another set"):
            victim.participant.agree(AGREED.digest, [0, 1])
    while step != "total":
        step, node, call = run.send(call())
    call()
    assert len(victim.ledger.rows()) == 1
