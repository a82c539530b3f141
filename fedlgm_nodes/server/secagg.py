"""The server's side of secure aggregation, which relays the nodes' messages, adds up their masked
vectors, and removes the masks from the sum.

A step takes the nodes' answers and returns what the next step's questions need. An unusable answer
counts as missing, and `lost` gives the reason. The round is void if fewer nodes than the threshold
answer. On a ring of neighbours the round is also void if too few nodes answer in some part of the
ring. No node relies on this code for its privacy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from fedlgm.errors import RunError
from fedlgm_nodes.protocol.messages import sha256
from fedlgm_nodes.secagg.cohort import Advert, Cohort, Sent, Survivors, Terms
from fedlgm_nodes.secagg.keys import (
    SEALED_DIGITS,
    apply_mask,
    pair_mask_key,
    public_of,
    self_mask_key,
)
from fedlgm_nodes.secagg.shamir import SHARE_BYTES, Weights


class VoidRound(RunError):
    """Too few nodes answered, so there is no sum. Nodes that were charged remain charged, and
    another attempt costs them again.
    """


class SecureSum:
    """The server's side of one attempt at one round. Its steps are called in the order in which
    they are defined.

    Args:
        terms: terms of the attempt.
        services: client -> public key of its enrolled service.

    Attributes:
        lost: client -> reason why it no longer takes part.
        crowd: largest number of colluders among one node's neighbours, and so of false accusations
            against it.
    """

    def __init__(self, terms: Terms, services: Mapping[int, str]) -> None:
        self.terms, self.lost, self.crowd = terms, dict[int, str](), terms.colluders
        self._services = services
        self._commitments: dict[int, str] = {}
        self._sent: dict[int, str] = {}  # client -> its signature that it has sent its vector
        self._total = np.zeros(terms.size, np.uint32)

    def advertised(self, answers: Mapping[int, Any]) -> list[dict[str, Any]]:
        """Form the cohort of all nodes with valid adverts, and return its adverts, which all
        members receive.

        Raises:
            VoidRound: the cohort's size does not suit the terms.
        """
        adverts, owners = dict[int, Advert](), dict[str, int]()
        for client, raw in answers.items():
            try:
                advert = Advert.of(raw)
                Cohort(self.terms, [advert], self._services)
                if advert.client != client:
                    raise RunError(f"an advert of client {advert.client}")
                advert.check_keys()  # every other node would refuse the cohort
                adverts[client] = advert
            except RunError as error:
                self.lost[client] = str(error)
                continue
            for key in advert.keys:
                if (other := owners.setdefault(key, client)) != client:
                    self.lost |= {
                        client: f"it has a key of client {other}",
                        other: f"client {client} has its key",
                    }
        members = [advert for client, advert in adverts.items() if client not in self.lost]
        self._cohort = Cohort(self.terms, members, self._services, check=False)
        if problem := self.terms.problem(len(members)):
            raise VoidRound(f"the cohort cannot be aggregated: {problem}")
        self.crowd = min(self.terms.colluders, self._cohort.neighbours.shape.crowd)
        return [advert.values() for advert in self._cohort.adverts.values()]

    def shared(
        self, answers: Mapping[int, tuple[Mapping[int, str], str]]
    ) -> dict[int, dict[int, str]]:
        """For each client, the sealed shares that its neighbours have made for it. If this step is
        repeated, the last answers count.

        Args:
            answers: client -> (receiver -> sealed shares, commitment).

        Raises:
            VoidRound: too few nodes shared their secrets.
        """
        members, holders, self._commitments = (
            self._cohort.adverts,
            self._cohort.neighbours.holders,
            {},
        )
        for client, (sealed, commitment) in answers.items():
            complete = client in members and sealed.keys() == holders(client) - {client}
            if complete and all(len(text) == SEALED_DIGITS for text in sealed.values()):
                self._commitments[client] = commitment
            else:
                self.lost[client] = "it did not share its secrets with every neighbour"
        self._sharing = tuple(sorted(self._commitments))
        self._require(self._sharing, "shared secrets")
        near = {
            client: sorted(holders(client) & self._commitments.keys() - {client})
            for client in self._sharing
        }
        return {to: {by: answers[by][0][to] for by in others} for to, others in near.items()}

    def sharing_field(self) -> dict[str, list[int]]:
        """The field of the "mask" question that lists all members that shared secrets; empty if any
        two members are neighbours, since a node then gets shares from all of them.
        """
        return {} if self._cohort.complete else {"sharing": list(self._sharing)}

    def add(self, client: int, words: np.ndarray, sent: str) -> None:
        """Add one node's masked vector. A second vector of the same node does not count.

        Args:
            client: the node.
            words: uint32 [size].
            sent: the node's signature of the statement that it has sent the words.
        """
        if client not in self._sharing or client in self._sent:
            self.lost.setdefault(client, "it sent a vector for which it was not asked")
        elif words.dtype != np.uint32 or words.shape != self._total.shape:
            self.lost[client] = (
                f"its vector is {words.dtype} {words.shape}, not uint32 {self._total.shape}"
            )
        elif not Sent(self._cohort.digest, self._sharing).valid(sent, self._services[client]):
            self.lost[client] = "it did not sign that it had sent its vector"
        else:
            self._total += words
            self._sent[client] = sent

    @property
    def summed(self) -> tuple[dict[int, str], bytes]:
        """The arguments of `resume`, which are the signatures of all clients whose vectors are in
        the sum, and the masked sum.
        """
        return dict(self._sent), self._total.astype("<u4").tobytes()

    def resume(self, sent: Mapping[int, str], total: bytes) -> None:
        """Continue with the masked sum of an earlier process, which had called `answered`.

        Args:
            sent: first value of that process's `summed`.
            total: second value.

        Raises:
            RunError: the sum does not have the size of the terms.
        """
        if len(total) != 4 * self.terms.size:
            raise RunError(
                f"a sum of {len(total)} bytes, where {self.terms.size} words of 4 bytes are summed"
            )
        self._sent, self._total = dict(sent), np.frombuffer(total, "<u4").astype(np.uint32)

    def answered(self) -> list[int]:
        """Fix and return the set of survivors. No vector may be added afterwards.

        Raises:
            VoidRound: too few nodes sent vectors.
        """
        survivors = tuple(sorted(self._sent))
        self._require(survivors, "sent a vector", survivors)
        self.survivors = Survivors(self._cohort.digest, self._sharing, survivors)
        return list(survivors)

    def sent(self) -> dict[int, str]:
        """Signatures by client which state that all nodes have sent a vector. With these signatures
        the nodes unmask at once. Empty if a node dropped out.
        """
        return {} if self.survivors.dropped else dict(self._sent)

    def signed(self, answers: Mapping[int, str]) -> dict[int, str]:
        """The survivors' valid signatures of their set, by client, to be sent to the nodes that
        signed.

        Raises:
            VoidRound: too few survivors signed.
        """
        valid = {}
        for client, signature in answers.items():
            if client in self.survivors.answered and self.survivors.valid(
                signature, self._services[client]
            ):
                valid[client] = signature
            else:
                self.lost[client] = "it did not sign the set of survivors"
        self._require(valid, "signed the set of survivors", self.survivors.answered)
        return valid

    def total(self, answers: Mapping[int, Mapping[int, str]]) -> np.ndarray:
        """Remove all masks and return the sum mod 2^32 of the survivors' vectors, uint32 [size].

        Args:
            answers: client -> (peer -> share), from the nodes that unmask.

        Raises:
            VoidRound: too few nodes unmask, or the shares of a secret do not belong together.
        """
        shares = {
            client: values
            for client, raw in answers.items()
            if (values := self._readable(client, raw)) is not None
        }
        self._require(shares, "unmasked", self.survivors.answered)
        secret, cohort, survivors = self._secrets(shares), self._cohort, self.survivors.answered
        for peer in survivors:
            apply_mask(self._total, self_mask_key(secret[peer], cohort.digest), subtract=True)
        for gone in self.survivors.dropped:
            for peer in cohort.neighbours.holders(gone).intersection(survivors):
                key = pair_mask_key(
                    secret[gone], cohort.adverts[peer].masking, cohort.digest, gone, peer
                )
                apply_mask(self._total, key, subtract=gone < peer)
        return self._total

    def _secrets(self, shares: Mapping[int, Mapping[int, bytes]]) -> dict[int, bytes]:
        """Each client's secret: the seed of a survivor, the masking key of a client that dropped
        out.

        Raises:
            VoidRound: a secret cannot be opened.
        """
        # without a ring the same nodes, and so the same weights, open all secrets
        weights = lru_cache(maxsize=None)(Weights)
        return {peer: self._secret(peer, shares, weights) for peer in self._sharing}

    def _secret(
        self,
        peer: int,
        shares: Mapping[int, Mapping[int, bytes]],
        weights: Callable[[tuple[int, ...]], Weights],
    ) -> bytes:
        """Open a client's secret from shares that belong together. If some shares are wrong, the
        shares of other nodes are tried.

        Raises:
            VoidRound: the shares belong together in none of the tried sets. If there are more nodes
                than needed, every node is left out of at least one set.
        """
        graph, needed = self._cohort.neighbours, self._cohort.neighbours.shape.needed
        # Nodes that have given wrong shares before come last.
        clients = sorted(
            graph.holders(peer) & shares.keys(), key=lambda client: (client in self.lost, client)
        )
        starts = (
            range(0, len(clients), len(clients) - needed) if len(clients) > needed else range(1)
        )
        for start in starts:
            using = (2 * clients)[start : start + needed]
            secret, problem = self._combine(peer, shares, weights(tuple(using)))
            if problem:
                continue
            for client in set(clients) - set(using) if start else ():
                if self._combine(peer, shares, weights((client, *using[1:])))[1]:
                    self.lost[client] = "it gave wrong shares"
            return secret
        raise VoidRound(problem)

    def _combine(
        self, peer: int, shares: Mapping[int, Mapping[int, bytes]], weights: Weights
    ) -> tuple[bytes, str]:
        """Combine some nodes' shares, and return the client's secret and the reason why the result
        is not the secret. The reason is empty if it is.
        """
        survived = peer in self.survivors.answered
        expected = self._commitments[peer] if survived else self._cohort.adverts[peer].masking
        try:
            secret = weights.combine({client: shares[client][peer] for client in weights.points})
        except RunError as error:
            return b"", f"client {peer}: {error}"
        if (sha256(secret) if survived else public_of(secret)) != expected:
            return b"", f"the shares of a secret of client {peer} do not belong together"
        return secret, ""

    def _readable(self, client: int, raw: Mapping[int, str]) -> dict[int, bytes] | None:
        try:
            near = self._cohort.neighbours.holders(client).intersection(self._sharing)
            if client not in self.survivors.answered or raw.keys() != near:
                raise ValueError
            shares = {peer: bytes.fromhex(share) for peer, share in raw.items()}
            if any(len(share) != SHARE_BYTES for share in shares.values()):
                raise ValueError
        except ValueError:
            self.lost[client] = "it sent no usable shares"
            return None
        return shares

    def _require(
        self, clients: Collection[int], what: str, answered: Collection[int] | None = None
    ) -> None:
        """Refuse to continue with too few nodes. If the survivors `answered` are given, enough
        nodes must hold shares of each survivor's seed and of each other node's masking key.
        """
        if len(clients) < self.terms.threshold:
            void = (
                f"{len(clients)} nodes {what}, {self.terms.threshold} are needed: the round is void"
            )
            raise VoidRound(void + reasons(self.lost))
        secrets = dict.fromkeys(self._sharing, "secrets" if answered is None else "masking key")
        secrets |= dict.fromkeys(answered or (), "seed")
        if problem := self._cohort.neighbours.problem(clients, secrets):
            raise VoidRound(
                f"of the nodes that {what}, {problem}: the round is void{reasons(self.lost)}"
            )


def reasons(lost: Mapping[int, str]) -> str:
    """The first five clients that are lost, each with the reason, as text that completes a
    sentence.
    """
    return "".join(f"; client {client}: {why}" for client, why in sorted(lost.items())[:5])
