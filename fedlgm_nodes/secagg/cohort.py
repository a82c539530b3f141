"""The values on which the members of a secure sum agree: its terms, adverts, cohort and signed
sets.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedlgm.errors import RunError
from fedlgm.planning.distributed_trust import least_threshold
from fedlgm_nodes.protocol.messages import (
    R,
    canonical,
    digest,
    public_key,
    record_of,
    sign,
    types_of,
    verify,
)
from fedlgm_nodes.secagg.keys import new_secret, public_of, shared_secret
from fedlgm_nodes.secagg.neighbours import Neighbours, shape_of

MOST_NODES = 1000
"""Size of the largest cohort, since the adverts of all members must fit into one message's header.
"""
MOST_WORDS = 1 << 30
_HEXADECIMAL = re.compile("[0-9a-f]*")


@dataclass(frozen=True)
class Terms:
    """The public terms of one attempt at one round.

    Attributes:
        run: label of the run.
        round: number, from 1.
        plan: digest of the plan and the work of the requested release, without the model.
        threshold: smallest number of nodes whose vectors may be summed (t).
        colluders: number of nodes that may collude with the server (m). The noise of t - m other
            nodes must suffice.
        size: number of 32-bit words of a vector.
        attempt: 32 hexadecimal digits, unique to the attempt.

    Example:
        >>> terms = Terms("run", 1, "0" * 64, 7, 1, 100, "0" * 32)
        >>> terms.problem(10), terms.problem(14)
        ('', 'a threshold of 7 for 14 nodes, 1 of whom may collude: 2 t > n + m is needed, that is 8 or more')
    """

    run: str
    round: int
    plan: str
    threshold: int
    colluders: int
    size: int
    attempt: str

    @classmethod
    def of(cls, raw: Any) -> Terms:
        """Terms from plain values.

        Raises:
            RunError: terms cannot have these values.
        """
        terms = _of(cls, raw)
        if (
            terms.round < 1
            or not 1 <= terms.size <= MOST_WORDS
            or terms.colluders < 0
            or terms.threshold < 1
        ):
            raise RunError("the terms of a round hold a number out of range")
        if (
            len(terms.run) > 200
            or not _hexadecimal(terms.plan, 64)
            or not _hexadecimal(terms.attempt, 32)
        ):
            raise RunError("the terms of a round hold a malformed name or digest")
        return terms

    @cached_property
    def digest(self) -> str:
        """Name of the attempt."""
        return digest("fedlgm secagg terms", canonical(self.values()))

    def values(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def problem(self, nodes: int) -> str:
        """The reason why a cohort of this size must not be aggregated on these terms; empty if it
        may be aggregated.
        """
        threshold, colluders = self.threshold, self.colluders
        least = least_threshold(nodes, colluders)
        if nodes > MOST_NODES:
            return f"a cohort of {nodes} nodes; at most {MOST_NODES} share secrets"
        if threshold > nodes:
            return f"a threshold of {threshold} for {nodes} nodes"
        if threshold <= colluders:
            return f"a threshold of {threshold} where {colluders} may collude: nobody's noise would count"
        if threshold < least:
            return (
                f"a threshold of {threshold} for {nodes} nodes, {colluders} of whom may collude: 2 "
                f"t > n + m is needed, that is {least} or more"
            )
        return ""


@dataclass(frozen=True)
class Advert:
    """A node's public keys for one attempt, signed by its enrolled service.

    Attributes:
        client: the node's client number.
        sealing: X25519 key with which other nodes seal shares for this node, 64 hexadecimal digits.
        masking: X25519 key of this node's masks.
        signature: signature over terms, client and both keys by the service's Ed25519 key.
    """

    client: int
    sealing: str
    masking: str
    signature: str

    @classmethod
    def of(cls, raw: Any) -> Advert:
        """An advert from plain values.

        Raises:
            RunError: an advert cannot have these values.
        """
        advert = _of(cls, raw)
        if not 0 <= advert.client < 2**31 or not all(_hexadecimal(key, 64) for key in advert.keys):
            raise RunError("an advert holds a malformed number or key")
        return advert

    @classmethod
    def make(
        cls, terms: Terms, client: int, signer: Ed25519PrivateKey, sealing: bytes, masking: bytes
    ) -> Advert:
        """Make and sign the advert of two private keys."""
        keys = public_of(sealing), public_of(masking)
        return cls(client, *keys, sign(signer, "secagg advert", terms.digest, client, *keys))

    def valid(self, terms: Terms, service: str) -> bool:
        """Whether the service with this public key has signed the advert for these terms."""
        fields_ = ("secagg advert", terms.digest, self.client, self.sealing, self.masking)
        return verify(public_key(service), self.signature, *fields_)

    def check_keys(self) -> None:
        """Refuse an advert with a key from which no shared secret can be derived.

        Raises:
            RunError: one of the keys is unusable.
        """
        for key in self.keys:
            shared_secret(new_secret(), key)

    @property
    def keys(self) -> tuple[str, str]:
        """The two public keys, for sealed shares and for masks."""
        return self.sealing, self.masking

    def values(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


class Cohort:
    """The members of one attempt at a secure sum, which all have valid adverts.

    Attributes:
        digest: name of the cohort. On a ring the digest covers the ring's shape, so nodes that
            compute another shape, or have an earlier version without rings, share neither secrets
            nor masks with these members.
        complete: whether any two members are neighbours.

    Args:
        terms: terms of the attempt.
        adverts: the members' adverts, in any order.
        services: client -> public key of its enrolled service.
        check: whether to check the adverts' signatures; False for adverts that were checked before.

    Raises:
        RunError: a member is unknown or repeated, its service has not signed an advert for these
            terms, or a key occurs twice.
    """

    def __init__(
        self,
        terms: Terms,
        adverts: Iterable[Advert],
        services: Mapping[int, str],
        *,
        check: bool = True,
    ) -> None:
        self.terms = terms
        members = sorted(adverts, key=lambda advert: advert.client)
        self.adverts = {advert.client: advert for advert in members}
        if len(self.adverts) < len(members):
            raise RunError("a node appears twice in the cohort")
        for client, advert in self.adverts.items():
            if client not in services:
                raise RunError(f"client {client} is not among the enrolled peers")
            if check and not advert.valid(terms, services[client]):
                raise RunError(
                    f"the advert of client {client} was not signed by its enrolled service for "
                    "these terms"
                )
        keys = [key for advert in members for key in advert.keys]
        service_keys = [services[client] for client in self.adverts]
        if len(set(keys)) < len(keys) or len(set(service_keys)) < len(service_keys):
            raise RunError("a public key appears twice in the cohort")
        columns = [
            (services[member.client], member.client, member.sealing, member.masking)
            for member in members
        ]
        self._shape = shape_of(len(members), terms.threshold, terms.colluders)
        self.complete = self._shape.complete(len(members))
        ring = () if self.complete else (canonical(asdict(self._shape)),)
        self.digest = digest("fedlgm secagg cohort", terms.digest, canonical(columns), *ring)

    @cached_property
    def neighbours(self) -> Neighbours:
        """The neighbours with which each member shares secrets and masks."""
        return Neighbours(self.digest, self.adverts, self._shape)

    def __len__(self) -> int:
        return len(self.adverts)


class _Statement(ABC):
    """A statement that a member of a cohort signs."""

    def sign(self, signer: Ed25519PrivateKey) -> str:
        """Sign the statement with the key of a member's service."""
        return sign(signer, *self._fields)

    def valid(self, signature: str, service: str) -> bool:
        """Whether the service with this public key has signed the statement."""
        return verify(public_key(service), signature, *self._fields)

    @property
    @abstractmethod
    def _fields(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Sent(_Statement):
    """A member's statement that it has sent its vector. If all members that shared secrets sign
    this statement, nobody has dropped out.

    Attributes:
        cohort: digest of the cohort.
        sharing: clients that shared their secrets, in ascending order (U1).
    """

    cohort: str
    sharing: tuple[int, ...]

    @cached_property  # it is read once for each signature of a cohort
    def _fields(self) -> tuple[str, ...]:
        return ("secagg sent", self.cohort, canonical(self.sharing))


@dataclass(frozen=True)
class Survivors(_Statement):
    """The clients that shared secrets, and among them the survivors, which then sent a vector. A
    node accepts only one such pair of sets for each cohort.

    Attributes:
        cohort: digest of the cohort.
        sharing: clients that shared their secrets, in ascending order (U1).
        answered: clients whose vectors are summed (U2).
    """

    cohort: str
    sharing: tuple[int, ...]
    answered: tuple[int, ...]

    @property
    def dropped(self) -> list[int]:
        """Clients that shared secrets but sent no vector, so that their masks are in the vectors of
        others.
        """
        return sorted(set(self.sharing) - set(self.answered))

    @cached_property  # it is read once for each signature of a cohort
    def _fields(self) -> tuple[str, ...]:
        return ("secagg survivors", self.cohort, canonical(self.sharing), canonical(self.answered))


def clients_of(raw: Any) -> tuple[int, ...]:
    """Check that a value is a list of client numbers in ascending order without duplicates, and
    return it.

    Raises:
        RunError: the value is not such a list.
    """
    if (
        not isinstance(raw, Sequence)
        or isinstance(raw, str | bytes)
        or not all(type(client) is int for client in raw)
    ):
        raise RunError("a set of clients must be a list of whole numbers")
    if list(raw) != sorted(set(raw)):
        raise RunError("a set of clients must be in ascending order, each once")
    return tuple(raw)


def key_pairs() -> tuple[bytes, bytes]:
    """Fresh private X25519 keys for an advert, one for sealed shares and one for masks."""
    return new_secret(), new_secret()


def _hexadecimal(text: str, digits: int) -> bool:
    return len(text) == digits and _HEXADECIMAL.fullmatch(text) is not None


def _of(kind: type[R], raw: Any) -> R:
    record = record_of(kind, raw)
    if record is None:
        names = ", ".join(types_of(kind))
        raise RunError(
            f"{kind.__name__.lower()} of a round must have the fields {names}, each of its type"
        )
    return record
