"""Members of rounds of secure aggregation, without transport: each has a participant, vectors and
charges."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedlgm_nodes.policy import Refusal
from fedlgm_nodes.protocol.messages import public_text
from fedlgm_nodes.secagg import cohort as cohorts
from fedlgm_nodes.secagg.cohort import Survivors, Terms
from fedlgm_nodes.secagg.neighbours import Shape, shape_of
from fedlgm_nodes.server.secagg import SecureSum
from fedlgm_nodes.service.secagg import Distributed, Participant, SessionStore
from fedlgm_nodes.service.secagg.store import _SCHEMA

STEPS = ("advertise", "share", "mask", "agree", "unmask")


class MemoryStore(SessionStore):
    """A store that a crash would take along, for tests in which there is none."""

    def __init__(self) -> None:
        self._path, self.kept = Path(":memory:"), 4
        self._db = sqlite3.connect(":memory:", isolation_level=None)
        self._db.executescript(_SCHEMA)
        self.sets: dict[str, tuple[Survivors, str]] = {}
        self.cohorts: dict[str, str] = {}

    def bind_keys(self, masking: str, cohort: str) -> str:
        return self.cohorts.setdefault(masking, cohort)

    def signed_survivors(self, cohort: str) -> tuple[Survivors, str] | None:
        return self.sets.get(cohort)

    def sign(self, survivors: Survivors, signature: str) -> None:
        assert survivors.cohort not in self.sets
        self.sets[survivors.cohort] = survivors, signature


@dataclass
class Member:
    """One node.

    Attributes:
        vectors: cohort -> the vector that it put in.
        charges: cohorts that it was charged for.
    """

    participant: Participant
    rng: np.random.Generator
    size: int
    vectors: dict[str, np.ndarray] = field(default_factory=dict)
    charges: list[str] = field(default_factory=list)

    def charge(self, cohort: str) -> None:
        if cohort not in self.charges:
            self.charges.append(cohort)

    def make(self, cohort: str) -> np.ndarray:
        """Other words for every cohort, the same for the same one; only once charged."""
        assert cohort in self.charges
        if cohort not in self.vectors:
            self.vectors[cohort] = self.rng.integers(0, 2**32, self.size, dtype=np.uint32)
        return self.vectors[cohort]


@dataclass
class Federation:
    """Nodes that know each other's keys."""

    members: list[Member]
    services: dict[int, str]
    signers: list[Ed25519PrivateKey]
    policy: Distributed


def federation(
    nodes: int,
    colluders: int = 0,
    *,
    size: int = 3,
    seed: int = 0,
    min_cohort: int | None = None,
    store: Callable[[int], SessionStore] = lambda client: MemoryStore(),
) -> Federation:
    """Nodes 0 to `nodes` - 1."""
    signers = [Ed25519PrivateKey.generate() for _ in range(nodes)]
    policy = Distributed(
        min_cohort=min_cohort or max(2, colluders + 2), max_colluders=colluders,
        peers=tuple(public_text(signer) for signer in signers),
    )  # fmt: skip
    rng = np.random.default_rng(seed)
    members = [
        Member(
            Participant(client, signer, policy, store(client)),
            np.random.default_rng(rng.integers(2**32)),
            size,
        )
        for client, signer in enumerate(signers)
    ]
    return Federation(members, policy.services, signers, policy)


def terms(
    threshold: int, colluders: int = 0, size: int = 3, number: int = 0, round: int = 1
) -> Terms:
    """Terms of attempt `number`."""
    return Terms("run", round, "ab" * 32, threshold, colluders, size, f"{number:032x}")


def aggregate(
    nodes: Federation,
    agreed: Terms,
    drops: dict[str, set[int]],
    present: Iterable[int] | None = None,
    lost: dict[int, str] | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """The sum that a server gets whose nodes drop out at those steps, and the sum of the survivors'
    vectors.

    Raises:
        VoidRound: too few came back.
    """
    server, attempt = SecureSum(agreed, nodes.services), agreed.digest
    server.lost = {} if lost is None else lost
    here = set(range(len(nodes.members)) if present is None else present)

    def asked(step: str, clients: Iterable[int]) -> list[int]:
        here.difference_update(drops.get(step, ()))
        return [client for client in clients if client in here]

    members = nodes.members
    adverts = server.advertised(
        {
            c: members[c].participant.advertise(agreed).values()
            for c in asked("advertise", range(len(members)))
        }
    )
    shares = {}
    for client in asked("share", [advert["client"] for advert in adverts]):
        shared = members[client].participant.share(attempt, adverts)
        shares[client] = shared.sealed, shared.commitment
    deliveries = server.shared(shares)
    for client in asked("mask", deliveries):
        member = members[client]
        given = (
            attempt,
            deliveries[client],
            member.charge,
            member.make,
            server.sharing_field().get("sharing"),
        )
        words = member.participant.mask(*given)
        server.add(client, words, member.participant.sent(attempt))
    answered = server.answered()
    agreeing = asked("agree", answered)
    signatures = server.sent() or server.signed(
        {c: members[c].participant.agree(attempt, answered) for c in agreeing}
    )
    found = server.total(
        {c: members[c].participant.unmask(attempt, signatures) for c in asked("unmask", signatures)}
    )
    (cohort,) = {members[client].charges[-1] for client in answered}
    expected = np.sum(
        [members[client].vectors[cohort] for client in answered], axis=0, dtype=np.uint32
    )
    return found, expected


def explicit(reach: int, crowd: int, signers: int | None = None) -> Shape:
    """A ring that is safe where no node has more than `crowd` colluders among its neighbours."""
    return Shape(
        reach, (2 * reach + 1 + crowd) // 2 + 1, crowd + 1 if signers is None else signers, crowd
    )


def use_ring(monkeypatch: pytest.MonkeyPatch, shape: Shape) -> None:
    """Give all cohorts this shape, however few their members are, unless that makes everyone a
    neighbour."""

    def shape_for(nodes: int, threshold: int, colluders: int) -> Shape:
        return shape_of(nodes, threshold, colluders) if shape.complete(nodes) else shape

    monkeypatch.setattr(cohorts, "shape_of", shape_for)


def refused(step: Callable[[], object]) -> bool:
    """Whether a node refuses a step."""
    try:
        step()
    except Refusal:
        return True
    return False
