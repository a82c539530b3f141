"""Messages between a server and a node's release service: questions, answers and signatures.

A question passes through untrusted processes, so it is identified by a digest of all its fields. If
a node answers only questions whose digest the server has signed, only the server can spend the
node's budget. The service signs its answer together with the digest, so nobody can forge or alter
an answer, or use it for another question. `fedlgm_nodes.protocol.frames` has the bytes that carry
questions and answers.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from typing import Annotated, Any, TypeVar, get_type_hints

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import AfterValidator

from fedlgm.privacy.chain import digest as digest

PROTOCOL = 5  # raised whenever the content of questions or answers changes
SUPPORTED = (PROTOCOL,)
"""Protocols in which a service answers and a server can ask, the newest first. When `PROTOCOL` is
raised, the previous number must stay here. Nodes and server can then be upgraded in any order, as
long as they are at most one protocol apart.
"""
HELLO = {"protocol": min(SUPPORTED), "ask": "hello"}  # asks a service for facts about its node
TEST = "test-"  # prefix of the identity of a ledger with known noise keys
_SIGNATURE_DIGITS = 128
R = TypeVar("R")
types_of: Callable[[type], dict[str, type]] = cache(get_type_hints)
"""Function that returns the types of a record class by field."""

# Refusals after which the same question may be asked again.
TRANSIENT = frozenset({"busy", "slow", "unavailable"})

# Refusals after which a node answers no more questions of a run.
LASTING = frozenset({"budget-spent", "rolled-back"})


def _checked_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", value):
        raise ValueError(
            "must be at most 64 letters, digits, '_', '.' and '-', and begin with a letter or digit"
        )
    return value


Name = Annotated[str, AfterValidator(_checked_name)]
"""Name of a node, limited to characters that are safe in logs, terminals and paths."""


def pause_after(silence: float, shortest: float, longest: float, share: float = 0.1) -> float:
    """Seconds to wait before polling again, if `silence` seconds have passed since the last answer.

    The wait is a share of `silence`, between `shortest` and `longest`. Each poll costs both
    processes a few milliseconds, and the share bounds the time that waiting adds to a round.

    Example:
        >>> pause_after(5.0, 0.1, 3.0), pause_after(100.0, 0.1, 3.0)
        (0.5, 3.0)
    """
    return min(max(share * silence, shortest), longest)


def canonical(value: Any) -> str:
    """JSON text that is the same for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def sha256(data: bytes | memoryview) -> str:
    """SHA-256 as hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


def record_of(kind: type[R], raw: Any) -> R | None:
    """Make a record from plain values; None if the values are not exactly the record's fields with
    their types.

    Example:
        >>> values = {"ledger": "a", "seq": 1, "head": "b", "signature": "c"}
        >>> record_of(Position, values), record_of(Position, values | {"seq": True})
        (Position(ledger='a', seq=1, head='b', signature='c'), None)
    """
    types = types_of(kind)
    if not isinstance(raw, dict) or raw.keys() != types.keys():
        return None
    return (
        kind(**raw)
        if all(type(raw[name]) is expected for name, expected in types.items())
        else None
    )


@dataclass(frozen=True)
class Question:
    """A server's question to one node in one round.

    Attributes:
        run: label of the run for logs; not authenticated.
        round: number, from 1.
        client: the node's client number.
        plan: JSON text of the `ReleasePlan`.
        model: SHA-256 of the frame's body, the global model.
        work: the requested work under the keys "mechanism", "group_by", "task", "model" and
            "training", as names that are installed on the node, with options, for example
            {"mechanism": {"name": "dp-sgd", "style": "per-layer"}, ...}.
        nonce: 32 hexadecimal digits, which tie an answer to this question.
        service: public key of the node's service. No other service answers this question.
        expect: values of a ledger position that the service signed earlier, which its ledger must
            still contain; None if there is none.
        protocol: number of the protocol in which the question is asked.
    """

    run: str
    round: int
    client: int
    plan: str
    model: str
    work: Mapping[str, Any]
    nonce: str
    service: str = ""
    expect: Mapping[str, Any] | None = None
    protocol: int = PROTOCOL

    @property
    def digest(self) -> str:
        """Digest of all fields, which identifies the question together with its model."""
        who = (self.protocol, self.run, self.round, self.client, self.service, self.nonce)
        return digest(
            "fedlgm question",
            *who,
            self.plan,
            self.model,
            canonical(self.work),
            canonical(self.expect),
        )

    def header(self, signer: Ed25519PrivateKey | None = None) -> dict[str, Any]:
        """The header of the question's frame, with a signature if a `signer` is given."""
        header: dict[str, Any] = {
            "protocol": self.protocol,
            "ask": "release",
            "run": self.run,
            "round": self.round,
            "client": self.client,
            "plan": self.plan,
            "work": dict(self.work),
            "nonce": self.nonce,
        }
        if self.expect is not None:
            header["expect"] = dict(self.expect)
        if signer is not None:
            header["signature"] = sign(signer, "question", self.digest)
        return header


@dataclass(frozen=True)
class Position:
    """Position of a node's ledger, signed by the service.

    Attributes:
        ledger: the ledger's identity.
        seq: number of releases charged.
        head: head of its hash chain.
        signature: the service's signature of these three values.
    """

    ledger: str
    seq: int
    head: str
    signature: str

    @classmethod
    def make(cls, ledger: str, seq: int, head: str, signer: Ed25519PrivateKey) -> Position:
        """Make a position with the service's signature."""
        return cls(ledger, seq, head, sign(signer, "position", ledger, seq, head))

    @property
    def test(self) -> bool:
        """Whether the ledger belongs to a test, whose noise is known."""
        return self.ledger.startswith(TEST)

    def valid(self, key: Ed25519PublicKey) -> bool:
        """Whether the service that owns `key` has signed the position."""
        return verify(key, self.signature, "position", self.ledger, self.seq, self.head)

    def values(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def answer_fields(
    question: str, client: int, seq: int, body: str, position: Position
) -> tuple[str | int, ...]:
    """The fields of an answer that its signature covers, which are the digests of question and
    body, the client, the number of the release and the ledger position.
    """
    return ("answer", question, client, seq, body, position.ledger, position.seq, position.head)


def sign(key: Ed25519PrivateKey, *fields: str | int) -> str:
    """Sign the digest of the fields with an Ed25519 key, and return the signature as hexadecimal
    digits.
    """
    return key.sign(bytes.fromhex(digest(*fields))).hex()


def verify(key: Ed25519PublicKey, signature: str, *fields: str | int) -> bool:
    """Whether `signature` is the signature of the fields by the owner of `key`, in the form that
    `sign` returns.

    Signatures with spaces between the digits are refused, because a sender could make them
    arbitrarily long, and the server copies signatures into the headers of further messages.
    """
    try:
        key.verify(bytes.fromhex(signature), bytes.fromhex(digest(*fields)))
    except (InvalidSignature, ValueError, TypeError):
        return False
    return len(signature) == _SIGNATURE_DIGITS


def public_key(text: str) -> Ed25519PublicKey:
    """The Ed25519 public key that 64 hexadecimal digits encode.

    Raises:
        ValueError: the string is malformed.
    """
    return Ed25519PublicKey.from_public_bytes(bytes.fromhex(text))


def public_text(key: Ed25519PrivateKey) -> str:
    """The public half of an Ed25519 key, as 64 hexadecimal digits."""
    return key.public_key().public_bytes_raw().hex()
