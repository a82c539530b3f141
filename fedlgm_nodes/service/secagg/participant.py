"""The node's side of the five steps of secure aggregation, which are advertise, share, mask, agree
and unmask.

Every step may be requested again after a lost connection or a restart, and then gives the same
answer. The node trusts only the signatures of the services that its own policy lists. It follows
these rules:

* it shares the secrets of an attempt with only one cohort, and records this cohort on disk before
  it sends a share. Every mask depends on this cohort, and the next attempt has other keys;
* it charges its ledger before it makes a vector, and writes the vector to disk before it sends it;
* it accepts only one set of survivors for a cohort, and records the set on disk before it sends its
  signature or a share;
* it reveals at most one share for each peer: a share of the seed of a survivor, or of the masking
  key of a peer that dropped out. It reveals shares in only two cases. In the first, at least
  `threshold` survivors have signed the same set as this node, and on a ring of neighbours enough of
  these survivors are in every part of the ring. In the second, all members that shared secrets have
  signed that they sent a vector, and these members are the set.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedlgm.errors import RunError
from fedlgm_nodes.policy import Distributed, Refusal
from fedlgm_nodes.protocol.messages import public_text, sha256
from fedlgm_nodes.secagg.cohort import Advert, Cohort, Sent, Survivors, Terms, clients_of, key_pairs
from fedlgm_nodes.secagg.keys import (
    apply_mask,
    new_secret,
    pair_mask_key,
    seal,
    self_mask_key,
    unseal,
)
from fedlgm_nodes.secagg.shamir import SHARE_BYTES, split
from fedlgm_nodes.service.secagg.store import Session, SessionStore

_NOTHING_SENT = "this node has sent no vector in this attempt"


@dataclass(frozen=True)
class Shared:
    """The answer to the second step, "share".

    Attributes:
        sealed: client -> shares that only this client can decrypt, in base 64.
        commitment: SHA-256 of the seed. With it, the server detects shares that do not belong
            together.
    """

    sealed: dict[int, str]
    commitment: str


class Participant:
    """A node that takes part in secure aggregation.

    Args:
        client: the node's client number.
        signer: Ed25519 key of the node's service.
        policy: the peers and limits that the node accepts.
        store: store of its sessions.

    Raises:
        Refusal: the policy does not list this node's service key. Every step raises it if the
            question is not allowed; nothing has then been sent.
    """

    def __init__(
        self, client: int, signer: Ed25519PrivateKey, policy: Distributed, store: SessionStore
    ) -> None:
        self._client, self._signer, self._policy, self._store = client, signer, policy, store
        if policy.services.get(client) != public_text(signer):
            raise Refusal(
                "cohort",
                f"distributed.peers does not hold this node's service key as client {client}",
            )

    def advertise(self, terms: Terms) -> Advert:
        """Make fresh keys for an attempt, and return the advert of their public halves. A repeated
        call returns the same advert.

        Raises:
            Refusal: the terms assume fewer colluders than the policy's `max_colluders`.
        """
        if terms.colluders < self._policy.max_colluders:
            raise Refusal(
                "cohort",
                f"noise that suffices against {terms.colluders} colluders; this node wants "
                f"max_colluders = {self._policy.max_colluders}",
            )
        session = self._store.session(terms.digest)
        if session is None:
            sealing, masking = key_pairs()
            advert = Advert.make(terms, self._client, self._signer, sealing, masking)
            session = Session(terms.values(), advert.values(), sealing.hex(), masking.hex())
            self._store.open(terms.digest, session)
        return Advert.of(session.advert)

    def share(self, attempt: str, adverts: list[Any]) -> Shared:
        """Split this node's two secrets, and return the shares sealed for each of its neighbours in
        the cohort.

        Args:
            attempt: digest of the terms.
            adverts: all members' adverts, as plain values.

        Raises:
            Refusal: the cohort is too small, lacks this node's advert or breaks the terms, or this
                node has shared its secrets with another cohort.
        """
        session = self._session(attempt)
        cohort = self._cohort(session, adverts)
        if cohort.adverts.get(self._client) != Advert.of(session.advert):
            raise Refusal(
                "cohort", "this node's own advert is missing from the cohort, or was changed"
            )
        if len(cohort) < self._policy.min_cohort:
            raise Refusal(
                "cohort",
                f"a cohort of {len(cohort)} nodes; min_cohort is {self._policy.min_cohort}",
            )
        if problem := cohort.terms.problem(len(cohort)):
            raise Refusal("cohort", problem)
        # A session from a restored file may have shared its secrets before; the ledger has the
        # cohort.
        bound = session.cohort or self._store.bind_keys(session.advert["masking"], cohort.digest)
        if bound != cohort.digest:
            raise Refusal(
                "cohort", "this node has shared its secrets of this attempt with another cohort"
            )
        if not session.cohort:
            self._split(session, cohort)
            self._store.keep(attempt, session)
        sealed = {int(client): text for client, text in session.outgoing.items()}
        return Shared(sealed, session.commitment)

    def mask(
        self,
        attempt: str,
        sealed: Mapping[int, str],
        charge: Callable[[str], None],
        make: Callable[[str], np.ndarray],
        sharing: Any = None,
    ) -> np.ndarray:
        """Charge, make and mask the node's vector, uint32 [size]. A repeated call returns the
        stored vector.

        Args:
            attempt: digest of the terms.
            sealed: client -> sealed shares for this node, in base 64, from each of its neighbours
                that shared.
            charge: called with the cohort's digest before the vector is made. It returns once the
                charge is on disk, and charges each digest only once.
            make: called with the cohort's digest. It returns the node's vector, uint32 [size], the
                same for the same digest.
            sharing: client numbers of all members that shared secrets, ascending. None stands for
                the clients of `sealed` and this node, which are all of them if every member is this
                node's neighbour.

        Raises:
            Refusal: the shares are not those of this node's neighbours, too few members shared, or
                the vector was masked for other members.
            RunError: `make` returns a vector whose type or size differs from the terms.
        """
        session, cohort = self._session_and_cohort(attempt)
        near = {*sealed, self._client}
        with _refusing():
            everyone = clients_of(sorted(near) if sharing is None else sharing)
        vector = self._store.vector(attempt)
        if vector is not None:
            if list(everyone) != session.sharing:
                raise Refusal("cohort", "this node's vector was masked for another set of members")
            return np.frombuffer(vector, "<u4")
        if not near.union(everyone) <= cohort.adverts.keys():
            raise Refusal("cohort", "shares of a node that is not a member of the cohort")
        if len(everyone) < cohort.terms.threshold:
            raise Refusal(
                "cohort",
                f"{len(everyone)} members shared secrets; {cohort.terms.threshold} are needed",
            )
        if near != cohort.neighbours.holders(self._client).intersection(everyone):
            raise Refusal(
                "cohort",
                "the shares are not those of this node's neighbours among the members that shared",
            )
        if problem := cohort.neighbours.problem(everyone, {self._client: "secrets"}):
            raise Refusal("cohort", f"of the members that shared secrets, {problem}")
        held = {
            str(client): self._unseal_shares(session, cohort, client, text)
            for client, text in sealed.items()
            if client != self._client
        }
        masking, keys = bytes.fromhex(session.masking), {}
        for other in near:
            if other != self._client:
                with _refusing():
                    keys[other] = pair_mask_key(
                        masking, cohort.adverts[other].masking, cohort.digest, self._client, other
                    )
        charge(cohort.digest)
        values = make(cohort.digest)
        if values.dtype != np.uint32 or values.shape != (cohort.terms.size,):
            raise RunError(
                f"a vector of {values.dtype} {values.shape}; the terms say uint32 "
                f"({cohort.terms.size},)"
            )
        words = values.astype("<u4")
        apply_mask(words, self_mask_key(bytes.fromhex(session.seed), cohort.digest))
        for other, key in keys.items():
            apply_mask(words, key, subtract=other > self._client)
        session.sharing, session.held = list(everyone), session.held | held
        self._store.keep(attempt, session, words.tobytes())
        return words

    def sent(self, attempt: str) -> str:
        """Signature of the statement that this node has sent its vector. The statement names all
        members that shared secrets.

        Raises:
            Refusal: this node has sent no vector in this attempt.
        """
        session, cohort = self._session_and_cohort(attempt)
        if not session.sharing:
            raise Refusal("cohort", _NOTHING_SENT)
        return Sent(cohort.digest, tuple(session.sharing)).sign(self._signer)

    def agree(self, attempt: str, answered: Any) -> str:
        """Accept the set of members whose vectors are summed, and return this node's signature of
        it.

        Args:
            attempt: digest of the terms.
            answered: client numbers of these members, ascending.

        Raises:
            Refusal: this node has sent no vector or is not among the survivors, the survivors are
                too few or include a member that did not share, or this node has accepted another
                set.
        """
        session, cohort = self._session_and_cohort(attempt)
        with _refusing():
            survivors = Survivors(cohort.digest, tuple(session.sharing), clients_of(answered))
        agreement = self._store.signed_survivors(cohort.digest)
        if agreement is not None:
            if agreement[0] != survivors:
                raise Refusal(
                    "cohort", "this node has accepted another set of survivors of this cohort"
                )
            return agreement[1]
        if not session.sharing:
            raise Refusal("cohort", _NOTHING_SENT)
        if (
            not set(survivors.answered) <= set(survivors.sharing)
            or self._client not in survivors.answered
        ):
            raise Refusal(
                "cohort", "survivors must have shared secrets, and this node must be one of them"
            )
        if len(survivors.answered) < cohort.terms.threshold:
            raise Refusal(
                "cohort",
                f"{len(survivors.answered)} survivors; {cohort.terms.threshold} are needed for a "
                "sum",
            )
        signature = survivors.sign(self._signer)
        self._store.sign(survivors, signature)
        return signature

    def unmask(self, attempt: str, signatures: Mapping[int, str]) -> dict[int, str]:
        """Reveal one share for each neighbour that shared, and for this node: a share of a
        survivor's seed, or of the masking key of a node that dropped out.

        Args:
            attempt: digest of the terms.
            signatures: client -> its signature of the set that this node has signed, or its
                signature of the statement that it has sent its vector.

        Returns:
            client -> share, hexadecimal digits.
        """
        session, cohort = self._session_and_cohort(attempt)
        survivors = self._accept_survivors(session, cohort, signatures)
        if not session.revealed:
            gone = set(survivors.dropped)
            session.revealed = {
                client: masking if int(client) in gone else seed
                for client, (seed, masking) in session.held.items()
            }
            # Anyone who copies this node's disk from now on finds only one share for each peer,
            # which the server is about to receive.
            session.sealing = session.masking = session.seed = ""
            session.held = {}
            self._store.keep(attempt, session)
        return {int(client): share for client, share in session.revealed.items()}

    # -- parts of the steps --------------------------------------------------------------------------------------------

    def _accept_survivors(
        self, session: Session, cohort: Cohort, signatures: Mapping[int, str]
    ) -> Survivors:
        """The set of survivors for which this node may reveal shares. It is recorded as the only
        set of its cohort.
        """
        agreement, services, sharing = (
            self._store.signed_survivors(cohort.digest),
            self._policy.services,
            tuple(session.sharing),
        )
        sent, everyone = Sent(cohort.digest, sharing), Survivors(cohort.digest, sharing, sharing)
        all_sent = bool(sharing) and all(
            sent.valid(str(signatures.get(client, "")), services[client]) for client in sharing
        )
        if agreement is None:
            if not all_sent:
                raise Refusal(
                    "cohort",
                    "this node has signed no set of survivors of this cohort, and not every "
                    "member that shared secrets has signed that it sent a vector",
                )
            self._store.sign(everyone, everyone.sign(self._signer))
            return everyone
        survivors = agreement[0]
        if all_sent and survivors == everyone:
            return survivors
        valid = [
            client
            for client, signature in signatures.items()
            if client in survivors.answered and survivors.valid(str(signature), services[client])
        ]
        signed = "signed the set that this node has signed"
        if len(valid) < cohort.terms.threshold:
            raise Refusal(
                "cohort",
                f"{len(valid)} survivors have {signed}; {cohort.terms.threshold} are needed",
            )
        if problem := cohort.neighbours.problem(valid):
            raise Refusal("cohort", f"of the survivors that {signed}, {problem}")
        return survivors

    def _session(self, attempt: str) -> Session:
        session = self._store.session(attempt)
        if session is None:
            raise Refusal(
                "cohort",
                "this node holds no keys for this attempt: it made no keys, its "
                "state/rounds.sqlite was deleted or restored, or newer rounds replaced the keys. "
                f"It keeps the {self._store.kept} newest open rounds: let fewer runs ask it at a "
                "time",
            )
        return session

    def _session_and_cohort(self, attempt: str) -> tuple[Session, Cohort]:
        session = self._session(attempt)
        if not session.cohort:
            raise Refusal("cohort", "this node has shared no secrets in this attempt")
        # The cohort was checked before secrets were shared.
        cohort = self._cohort(session, session.members, check=False)
        if cohort.digest != session.cohort:
            raise Refusal(
                "cohort",
                "this node's peers have changed since it shared its secrets in this attempt",
            )
        return session, cohort

    def _cohort(self, session: Session, adverts: list[Any], *, check: bool = True) -> Cohort:
        with _refusing():
            members = [Advert.of(raw) for raw in adverts]
            return Cohort(Terms.of(session.terms), members, self._policy.services, check=check)

    def _split(self, session: Session, cohort: Cohort) -> None:
        seed, masking, sealing = (
            new_secret(),
            bytes.fromhex(session.masking),
            bytes.fromhex(session.sealing),
        )
        holders, needed = cohort.neighbours.holders(self._client), cohort.neighbours.shape.needed
        seeds, maskings = split(seed, needed, holders), split(masking, needed, holders)
        for client, advert in cohort.adverts.items():
            if client in holders and client != self._client:
                with _refusing():
                    sealed = seal(
                        sealing,
                        advert.sealing,
                        cohort.digest,
                        self._client,
                        client,
                        seeds[client] + maskings[client],
                    )
                session.outgoing[str(client)] = b64encode(sealed).decode()
        session.held = {
            str(self._client): [seeds[self._client].hex(), maskings[self._client].hex()]
        }
        session.members = [advert.values() for advert in cohort.adverts.values()]
        session.seed, session.commitment, session.cohort = seed.hex(), sha256(seed), cohort.digest

    def _unseal_shares(self, session: Session, cohort: Cohort, client: int, text: str) -> list[str]:
        try:
            shares = unseal(
                bytes.fromhex(session.sealing),
                cohort.adverts[client].sealing,
                cohort.digest,
                client,
                self._client,
                b64decode(text),
            )
            if len(shares) != 2 * SHARE_BYTES:
                raise RunError(f"{len(shares)} bytes")
        except (RunError, ValueError) as error:
            raise Refusal(
                "cohort", f"client {client}'s shares for this node are not authentic", client
            ) from error
        return [shares[:SHARE_BYTES].hex(), shares[SHARE_BYTES:].hex()]


class _refusing:
    """Context in which input that cannot be read or is not authentic raises a `Refusal`."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, RunError | ValueError):
            raise Refusal("cohort", str(error)) from error
