"""A malicious server with colluding nodes: random deviations from the protocol, and what it holds
in the end.

The colluders give the server all that they receive and sign whatever it wants; honest nodes are
real participants. What leaves honest nodes is recorded share by share, so that what the server
could compute is known exactly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedlgm_nodes.policy import Refusal
from fedlgm_nodes.secagg.cohort import Advert, Sent, Survivors, Terms, key_pairs
from fedlgm_nodes.secagg.neighbours import Neighbours
from tests.support.secagg import Federation, explicit, federation, terms, use_ring

SEED, MASKING = 0, 1


@dataclass
class Gains:
    """What the server has obtained from honest nodes.

    Attributes:
        shares: (attempt, peer, kind of secret) -> honest nodes that gave their share of it.
        signed: (attempt, cohort) -> set of survivors -> honest nodes that have signed or unmasked
            it.
        sent: (attempt, cohort) -> honest nodes whose vector was sent.
        uncharged: vectors that left without a charge.
        deviations: calls that were not those of an honest server.
        accepted: of them, those that nodes did not refuse.
    """

    shares: dict[tuple[str, int, int], set[int]] = field(default_factory=lambda: defaultdict(set))
    signed: dict[tuple[str, str], dict[Survivors, set[int]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(set))
    )
    sent: dict[tuple[str, str], set[int]] = field(default_factory=lambda: defaultdict(set))
    uncharged: int = 0
    deviations: int = 0
    accepted: int = 0


class MaliciousServer:
    """Attacks one federation, again and again.

    Args:
        rng: of all choices.
        nodes: honest and colluding.
        threshold, colluders: t, and m, which are the last clients.
        ring: whether the nodes are on a ring of neighbours.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        nodes: int,
        threshold: int,
        colluders: int,
        *,
        ring: bool = False,
    ) -> None:
        self.ring = ring
        self.rng, self.gains = rng, Gains()
        self.nodes: Federation = federation(nodes, colluders, seed=int(rng.integers(2**31)))
        self.count, self.threshold, self.colluders = nodes, threshold, colluders
        self.honest = range(nodes - colluders)
        self.terms: dict[str, Terms] = {}
        self.adverts: list[dict[str, Any]] = []  # all that were ever seen
        self.sealed: list[tuple[int, int, str]] = []
        self.signatures: list[
            tuple[int, str]
        ] = []  # of sets of survivors, and that a vector was sent

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def some(self, items: Any, count: int) -> list[Any]:
        items = list(items)
        return [items[int(i)] for i in self.rng.permutation(len(items))[:count]]

    def one(self, items: Any) -> Any:
        return self.some(items, 1)[0]

    def call(self, deviates: bool, step: Callable[[], Any]) -> Any:
        """A node's answer; None if it refuses."""
        self.gains.deviations += deviates
        try:
            answer = step()
        except Refusal:
            return None
        self.gains.accepted += deviates
        return answer

    # -- one attempt ---------------------------------------------------------------------------------------------------

    def attempt(self, number: int, zeal: float) -> None:
        """One attempt at a round; each call deviates with probability `zeal`."""
        agreed = terms(self.threshold, self.colluders, number=number, round=1 + number % 2)
        self.terms[agreed.digest] = agreed
        made = {}
        for client in range(self.count):
            asked = agreed
            if self.chance(zeal / 4):  # a lowered threshold, or colluders that are not counted
                asked = replace(
                    agreed,
                    threshold=max(1, self.threshold - 1),
                    colluders=max(0, self.colluders - 1),
                )
            answer = self.call(
                asked != agreed, lambda client=client, asked=asked: self.advertised(client, asked)
            )
            if answer is not None:
                made[client] = answer
                self.adverts.append(answer)
        cohorts = [
            self.cohort(made, agreed, 0.0),
            self.cohort(made, agreed, zeal),
            self.cohort(made, agreed, zeal),
        ]
        sealed: dict[int, dict[int, str]] = {}
        for client in range(self.count):
            plan = [0] if not self.chance(zeal) else self.some(range(3), 2)
            for which in plan:
                shared = self.call(
                    which != 0,
                    lambda client=client, which=which: self.participant(client).share(
                        agreed.digest, cohorts[which]
                    ),
                )
                if shared is not None:
                    sealed.setdefault(client, shared.sealed)
                    self.sealed += [(client, to, text) for to, text in shared.sealed.items()]
        for client in range(self.count):
            for _ in range(2 if self.chance(zeal) else 1):
                self.mask(client, agreed, sealed, zeal)
        directly, sets = self.chance(0.5), self.sets(agreed, zeal)
        for client in self.honest:
            if self.chance(zeal if directly else 1 - zeal):
                self.agree(client, agreed, sets, zeal)
        for client in self.honest:
            for _ in range(2 if self.chance(zeal) else 1):
                self.unmask(client, agreed, zeal)
                if self.chance(zeal):
                    self.agree(client, agreed, sets, 1.0)

    def participant(self, client: int) -> Any:
        return self.nodes.members[client].participant

    def advertised(self, client: int, agreed: Terms) -> dict[str, Any]:
        return self.participant(client).advertise(agreed).values()

    def cohort(self, made: dict[int, Any], agreed: Terms, zeal: float) -> list[dict[str, Any]]:
        """Adverts as they should be, or mixed with old, forged, swapped, copied or missing ones."""
        chosen = dict(made)
        if not self.chance(zeal):
            return list(chosen.values())
        for _ in range(int(self.rng.integers(1, 3))):
            client, how = int(self.rng.integers(self.count)), int(self.rng.integers(6))
            if how == 0:
                chosen.pop(client, None)
            elif how == 1:
                chosen[client] = self.one(self.adverts)
            elif how == 2:  # signed with a key that nobody has enrolled
                chosen[client] = Advert.make(
                    agreed, client, Ed25519PrivateKey.generate(), *key_pairs()
                ).values()
            elif how == 3 and client in chosen:
                chosen[client] = chosen[client] | {"masking": self.one(self.adverts)["masking"]}
            elif (
                how == 4 and self.colluders
            ):  # a colluder may sign anything: other keys, or a copy of its own
                client = self.count - 1
                chosen[client] = Advert.make(
                    agreed, client, self.nodes.signers[client], *key_pairs()
                ).values()
            else:  # one real node and fakes
                real = int(self.rng.integers(self.count))
                chosen = {
                    c: made[c] if c == real and c in made
                    else Advert.make(agreed, c, Ed25519PrivateKey.generate(), *key_pairs()).values()
                    for c in range(self.count)
                }  # fmt: skip
        return list(chosen.values())

    def mask(
        self, client: int, agreed: Terms, sealed: dict[int, dict[int, str]], zeal: float
    ) -> None:
        delivered = {
            by: texts[client] for by, texts in sealed.items() if by != client and client in texts
        }
        deviates = self.chance(zeal)
        if deviates:
            how = int(self.rng.integers(4))
            if how == 0:
                delivered = {
                    by: delivered[by]
                    for by in self.some(delivered, int(self.rng.integers(self.count)))
                }
            elif how == 1 and delivered:
                delivered[self.one(delivered)] = self.one(self.sealed)[2]
            elif how == 2:
                delivered |= {
                    by: text for by, to, text in self.some(self.sealed, 2) if by != client
                }
            elif delivered:
                by = self.one(delivered)
                delivered[by] = delivered[by][:-8]
        member = self.nodes.members[client]
        sharing = None
        if self.ring:
            sharing = sorted({client, *sealed})
            if self.chance(zeal):
                deviates, graph = True, self.graph(client, agreed)
                without = (
                    set(self.some(sharing, 2))
                    if graph is None or self.chance(0.3)
                    else self.arc(graph) - {client}
                )
                delivered = {by: text for by, text in delivered.items() if by not in without}
                sharing = [one for one in sharing if one not in without]
        given = delivered, member.charge, member.make, sharing
        answer = self.call(deviates, lambda: member.participant.mask(agreed.digest, *given))
        if answer is not None and client in self.honest:
            cohort = self.session(client, agreed).cohort
            self.gains.sent[agreed.digest, cohort].add(client)
            self.gains.uncharged += cohort not in member.charges
            self.signatures.append((client, member.participant.sent(agreed.digest)))

    def session(self, client: int, agreed: Terms) -> Any:
        return self.participant(client)._store.session(agreed.digest)

    def graph(self, client: int, agreed: Terms) -> Neighbours | None:
        """Who the client's neighbours are; None if it has not shared its secrets."""
        session = self.session(client, agreed)
        return (
            self.participant(client)._session_and_cohort(agreed.digest)[1].neighbours
            if session and session.cohort
            else None
        )

    def arc(self, graph: Neighbours) -> set[int]:
        """Consecutive members, about as many as no mask reaches across."""
        first, length = (
            int(self.rng.integers(self.count)),
            graph.shape.reach + int(self.rng.integers(-1, 2)),
        )
        return {graph._circle[(first + place) % len(graph._circle)] for place in range(length)}

    def sets(self, agreed: Terms, zeal: float) -> list[list[int]]:
        """Sets of survivors, which are dealt to overlapping halves, or each to everyone."""
        everyone = sorted(
            c for c in range(self.count) if (s := self.session(c, agreed)) is not None and s.sharing
        )
        sets = [everyone]
        for _ in range(2):
            size = int(self.rng.integers(max(1, self.threshold - 1), self.count + 1))
            sets.append(sorted(self.some(range(self.count), size)))
        if self.ring and (graph := self.graph(int(self.rng.integers(self.count)), agreed)):
            for which in (1, 2):
                sets[which] = sorted({*everyone} - self.arc(graph) - self.arc(graph))
        if self.chance(0.5 if self.ring else zeal):
            sets[0] = sets[1]
        return sets

    def agree(self, client: int, agreed: Terms, sets: list[list[int]], zeal: float) -> None:
        plan = [0] if not self.chance(zeal) else self.some(range(3), 3)
        for which in plan:
            answered = sets[which]
            signature = self.call(
                which != 0,
                lambda answered=answered: self.participant(client).agree(agreed.digest, answered),
            )
            if signature is None:
                continue
            session = self.session(client, agreed)
            survivors = Survivors(session.cohort, tuple(session.sharing), tuple(answered))
            self.gains.signed[agreed.digest, session.cohort][survivors].add(client)
            self.signatures.append((client, signature))

    def unmask(self, client: int, agreed: Terms, zeal: float) -> None:
        session = self.session(client, agreed)
        if session is None or not session.cohort:
            return
        found = self.participant(client)._store.signed_survivors(session.cohort)
        wanted = Sent(session.cohort, tuple(session.sharing)) if found is None else found[0]
        signatures = {
            signer: signature
            for signer, signature in self.signatures
            if wanted.valid(signature, self.nodes.services[signer])
        }
        for colluder in range(len(self.honest), self.count):
            signatures[colluder] = wanted.sign(self.nodes.signers[colluder])
        deviates = self.chance(zeal)
        if deviates:
            how = int(self.rng.integers(4))
            if how == 0:
                signatures = {c: signatures[c] for c in self.some(signatures, self.threshold - 1)}
            elif how == 1:
                signatures = {c: text[:-2] for c, text in signatures.items()}
            elif how == 2:
                signatures = dict(self.some(self.signatures, self.threshold))
            elif signatures:
                same = self.one(list(signatures.values()))
                signatures = dict.fromkeys(range(self.count), same)
        held = dict(session.held)
        revealed = self.call(
            deviates, lambda: self.participant(client).unmask(agreed.digest, signatures)
        )
        if not revealed or not held:
            return
        seeds = {peer for peer, share in revealed.items() if held[str(peer)][SEED] == share}
        found = self.participant(client)._store.signed_survivors(session.cohort)
        far = (
            set() if found is None else set(found[0].answered) - revealed.keys()
        )  # it holds no shares of these
        survivors = Survivors(session.cohort, tuple(session.sharing), tuple(sorted(seeds | far)))
        self.gains.signed[agreed.digest, session.cohort][survivors].add(client)
        for peer, share in revealed.items():
            self.gains.shares[agreed.digest, peer, held[str(peer)].index(share)].add(client)

    # -- what it has ---------------------------------------------------------------------------------------------------

    def obtained(self, attempt: str, peer: int, kind: int) -> bool:
        """Whether the server can compute that secret of an honest peer, with the shares that
        colluders hold."""
        graph = self.graph(peer, self.terms[attempt])
        if graph is None:
            return False
        colluders = graph.holders(peer) - set(self.honest)
        return len(self.gains.shares[attempt, peer, kind]) + len(colluders) >= graph.shape.needed

    def learnt(self, attempt: str, cohort: str) -> list[set[int]]:
        """The honest nodes in each sum that the server can read: no mask of theirs is left that it
        does not know."""
        seeds, keys = (
            {peer for peer in self.honest if self.obtained(attempt, peer, kind)}
            for kind in (SEED, MASKING)
        )
        masked = {}
        for client in self.gains.sent[attempt, cohort]:
            graph, session = (
                self.graph(client, self.terms[attempt]),
                self.session(client, self.terms[attempt]),
            )
            masked[client] = (
                graph.holders(client).intersection(session.sharing, self.honest) - {client} - keys
            )
        sums = []
        for start in seeds & masked.keys():
            within, ahead = {start}, [start]
            while ahead and within <= seeds & masked.keys():
                one = ahead.pop()
                ahead += masked[one] - within
                within |= masked[one]
            if within <= seeds & masked.keys() and all(
                one in masked[other] for one in within for other in masked[one]
            ):
                sums.append(within)
        return sums

    def violations(self) -> list[str]:
        """What must never happen and has."""
        found = []
        for attempt in self.terms:
            for peer in self.honest:
                if self.obtained(attempt, peer, SEED) and self.obtained(attempt, peer, MASKING):
                    found.append(f"both secrets of client {peer}")
        for (attempt, cohort), sets in self.gains.signed.items():
            for client in self.honest:
                if sum(client in signers for signers in sets.values()) > 1:
                    found.append(f"two signatures of client {client}")
            complete = [
                s for s, signers in sets.items() if len(signers) + self.colluders >= self.threshold
            ]
            if len(complete) > 1:
                found.append("two sets of survivors of one release")
            unmasked = {peer for peer in self.honest if self.obtained(attempt, peer, SEED)}
            few = len(self.gains.sent[attempt, cohort] & unmasked) < self.threshold - self.colluders
            if unmasked and few and not self.ring:  # on a ring the seeds of a few are not yet a sum
                found.append("a sum of too few")
        for attempt, cohort in list(self.gains.sent):
            sums = self.learnt(attempt, cohort)
            if any(len(one) < self.threshold - self.colluders for one in sums):
                found.append("a sum of too few")
            if any(one != sums[0] for one in sums):
                found.append("two sums")
        if self.gains.uncharged:
            found.append("a vector that was not charged")
        return found


def attacked(deviations: int, seed: int, *, ring: bool = False) -> tuple[Gains, list[str], int]:
    """All gains of that many random deviations over many federations, the violations, and the sums
    that were read."""
    rng, all_, violations, sums = np.random.default_rng(seed), Gains(), list[str](), 0
    while all_.deviations < deviations:
        nodes = int(rng.integers(10, 15) if ring else rng.integers(3, 7))
        colluders = int(rng.integers(0, min(2, nodes - 2) + 1))
        least = (nodes + colluders) // 2 + 1
        threshold = int(rng.integers(least, min(least + 3, nodes) + 1 if ring else nodes + 1))
        if threshold <= colluders:
            continue
        with pytest.MonkeyPatch.context() as patch:
            if ring:
                use_ring(patch, explicit(2 + colluders, colluders))
            server = MaliciousServer(rng, nodes, threshold, colluders, ring=ring)
            for number in range(3):
                server.attempt(
                    number, zeal=float(rng.choice([0.01, 0.04, 0.2] if ring else [0.05, 0.15, 0.4]))
                )
            violations += server.violations()
            all_.deviations += server.gains.deviations
            all_.accepted += server.gains.accepted
            sums += sum(
                bool(server.learnt(attempt, cohort)) for attempt, cohort in server.gains.sent
            )
    return all_, violations, sums
