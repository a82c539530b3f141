"""Messages between a server and a node's release service: frames, questions and signatures.

A frame is `uint32 header length | uint64 body length | header | body`, little-endian. The header is a JSON object; the
body is one array in the .npy format, version 1, or empty. Nothing in a frame is executed or unpickled. Processes that
only forward frames need neither torch nor flwr.

A question passes through any number of untrusted processes, so a digest of all its parts names it. If the server signs
this digest, only the server can spend the node's budget. The service signs its answer together with the digest, so
nobody can forge or alter an answer, or use it for another question.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import AfterValidator

from fedlgm import wire
from fedlgm.errors import RunError
from fedlgm.wire import npy as npy  # bodies of messages are written by it
from fedlgm.wire import view

PROTOCOL = 5  # raised whenever what a question or an answer says changes
HELLO = {"protocol": PROTOCOL, "ask": "hello"}  # asks a service who it is
TEST = "test-"  # how the identity of a ledger begins whose noise keys are known
HEADER_BYTES = 1 << 19  # a plan for a few thousand layers
_LARGEST_ANSWER = 1 << 33  # bytes of its body
_SIGNATURE_DIGITS = 128
_PREFIX = struct.Struct("<IQ")
PREFIX_BYTES = _PREFIX.size

# Flower messages between `strategies.node.link` and the process in front of the service; see `clients.node.relay`.
HEADER = "node.header"
BODY = "node.body"
MASK = "node.mask"
RECORD_BYTES = 5 << 20  # of a body in one record, at most: as many as in a part of one of Flower's arrays

# Refusals after which the same question may be asked again.
TRANSIENT = frozenset({"busy", "slow", "unavailable"})

# Refusals after which a node answers no more questions of a run.
LASTING = frozenset({"budget-spent", "rolled-back"})


def _checked_name(value: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", value):
        raise ValueError("must be at most 64 letters, digits, '_', '.' and '-', and begin with a letter or digit")
    return value


Name = Annotated[str, AfterValidator(_checked_name)]
"""Name of a node, which goes into logs, terminals and paths."""


def pause_after(silence: float, shortest: float, longest: float, share: float = 0.1) -> float:
    """Seconds to wait before polling again, `silence` seconds after the last news.

    The wait is a share of `silence`, within limits. Polling costs both processes a few milliseconds, and the share
    bounds the time that waiting adds to a round.

    Example:
        >>> pause_after(5.0, 0.1, 3.0), pause_after(100.0, 0.1, 3.0)
        (0.5, 3.0)
    """
    return min(max(share * silence, shortest), longest)


def printable(text: str, longest: int) -> str:
    """Untrusted text for a log or a terminal: one short line, with "?" for characters that are not printable.

    Example:
        >>> printable("gone" + chr(10) + "round 9: all is well" + chr(27), 30)
        'gone?round 9: all is well?'
    """
    return "".join(sign if sign.isprintable() else "?" for sign in text[:longest])


class FrameError(RunError):
    """Bytes that are not a frame of this protocol."""


def encode(header: Mapping[str, Any], body: bytes | memoryview = b"") -> bytes:
    """The bytes of one frame."""
    return encode_header(header, len(body)) + body


def encode_header(header: Mapping[str, Any], size: int) -> bytes:
    """The bytes before a frame's body of `size` bytes."""
    text = json.dumps(header, allow_nan=False).encode()
    return _PREFIX.pack(len(text), size) + text


def lengths(prefix: bytes, largest_body: int) -> tuple[int, int]:
    """Lengths of header and body that a frame's first `PREFIX_BYTES` bytes announce.

    Raises:
        FrameError: a length exceeds its limit.
    """
    header, body = _PREFIX.unpack(prefix)
    if header > HEADER_BYTES:
        raise FrameError(f"a header of {header} bytes; at most {HEADER_BYTES} are read")
    if body > largest_body:
        raise FrameError(f"a body of {body} bytes; at most {largest_body} are read")
    return header, body


def parse_header(text: bytes) -> dict[str, Any]:
    """The JSON object of a header.

    Raises:
        FrameError: the bytes are not a JSON object, or hold NaN, Infinity or numbers beyond float64.
    """
    try:
        header = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"the header is not JSON: {error}") from error
    if not isinstance(header, dict):
        raise FrameError("the header is not a JSON object")
    return header


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text[:40]} is too large a number")
    return number


def exchange(
    path: str, header: Mapping[str, Any] | str, body: bytes | memoryview, *, timeout: float
) -> tuple[dict[str, Any], memoryview]:
    """Ask the service behind the Unix domain socket at `path` and wait for its answer.

    Args:
        path: the socket.
        header: the question's header; a string is sent unchanged.
        body: the question's body.
        timeout: seconds for the whole exchange.

    Returns:
        Header and body of the answer.

    Raises:
        RunError: no service listens on the socket, or the answer is late or not a frame.
    """
    deadline = time.monotonic() + timeout
    text = header.encode() if isinstance(header, str) else json.dumps(header, allow_nan=False).encode()
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(timeout)
            link.connect(path)
            try:
                link.sendall(_PREFIX.pack(len(text), len(body)) + text)
                link.sendall(body)
            except (BrokenPipeError, ConnectionResetError):
                pass  # refused before all of it was read: the answer says why
            head, size = lengths(bytes(_receive(link, PREFIX_BYTES, deadline)), _LARGEST_ANSWER)
            return parse_header(bytes(_receive(link, head, deadline))), _receive(link, size, deadline)
    except TimeoutError as error:
        raise RunError(f"the release service at {path} did not answer within {timeout:g} s") from error
    except OSError as error:
        raise RunError(f"the release service at {path} cannot be reached: {error.strerror or error}") from error


def _receive(link: socket.socket, count: int, deadline: float) -> memoryview:
    view, got = memoryview(bytearray(count)), 0
    while got < count:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        link.settimeout(left)
        received = link.recv_into(view[got:])
        if received == 0:
            raise FrameError("the release service closed the connection in the middle of an answer")
        got += received
    return view


def vector(data: bytes | memoryview, kinds: tuple[str, ...]) -> np.ndarray:
    """The one-dimensional array in `data`, read-only and without a copy.

    Args:
        data: the .npy format, version 1: one array and nothing after it.
        kinds: accepted dtypes, for example ("<f4",).

    Raises:
        FrameError: the data are anything else, in particular objects and pickles.
    """
    try:
        values = view(data)
    except RunError as error:
        raise FrameError(f"not an array in the .npy format, version 1: {error}") from error
    if values.dtype.str not in kinds or values.ndim != 1:
        raise FrameError(
            f"an array of {values.dtype} and shape {values.shape}; expected one dimension of {' or '.join(kinds)}"
        )
    return values


def masked(data: bytes | memoryview, key: int) -> memoryview:
    """Bytes XORed with a repeated 32-bit key, so that equal contents differ; masking twice restores them.

    Flower stores objects by their content. If a run ends after a node has received a message, some announced objects
    are never fetched, and every later message with the same content waits for them forever. A resumed run would send
    such content, since it sends the same model again.

    Raises:
        FrameError: the length is not a multiple of four bytes, as it is for every array of numbers in the .npy format.
    """
    if len(data) % 4 or not 0 <= key < 2**32:
        raise FrameError(f"{len(data)} bytes cannot be masked with {key}")
    return (np.frombuffer(data, "<u4") ^ np.uint32(key)).view(np.uint8).data


def body_records(body: bytes | memoryview, key: int) -> dict[str, dict[str, bytes]]:
    """The configuration records of a Flower message that hold a body, masked with `key`: name -> values.

    Flower transfers each record as one object, which costs several requests. An array would be three objects.

    Raises:
        FrameError: as for `masked`.

    Example:
        >>> records = body_records(b"a model.", 7)
        >>> list(records), bytes(body_of(records, 7))
        (['node.body.0'], b'a model.')
    """
    data = masked(body, key)
    starts = range(0, len(data), RECORD_BYTES)
    return {f"{BODY}.{number}": {BODY: bytes(data[low : low + RECORD_BYTES])} for number, low in enumerate(starts)}


def body_of(records: Mapping[str, Mapping[str, Any]], key: int) -> memoryview:
    """The body that the records of a message hold; its first part may be in the record of the header.

    Raises:
        FrameError: the records hold something else, or as for `masked`.
    """
    parts = [records[wire.CONFIG][BODY]] if BODY in records.get(wire.CONFIG, ()) else []
    while BODY in records.get(f"{BODY}.{len(parts)}", ()):
        parts.append(records[f"{BODY}.{len(parts)}"][BODY])
    if not all(isinstance(part, bytes) for part in parts):
        raise FrameError("the body of a message must be bytes")
    return masked(parts[0] if len(parts) == 1 else b"".join(parts), key)


def digest(*fields: str | bytes | int) -> str:
    """SHA-256 over length-prefixed fields, as hexadecimal digits."""
    total = hashlib.sha256()
    for field in fields:
        data = field if isinstance(field, bytes) else str(field).encode()
        total.update(len(data).to_bytes(8, "little") + data)
    return total.hexdigest()


def canonical(value: Any) -> str:
    """JSON text that is the same for equal values."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def sha256(data: bytes | memoryview) -> str:
    """SHA-256 as hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class Question:
    """A server's question to one node in one round.

    Attributes:
        run: label of the run, for people; not authenticated.
        round: number, from 1.
        client: the node's client number.
        plan: JSON text of the `ReleasePlan`.
        model: SHA-256 of the frame's body, the global model.
        work: names that are installed on the node, with options: {"mechanism", "group_by", "task", "model",
            "training"}, for example {"mechanism": {"name": "dp-sgd", "style": "per-layer"}, ...}.
        nonce: 32 hexadecimal digits, which tie an answer to this question.
        service: public key of the node's service; no other service answers this question.
        expect: `Position.values` that the service signed earlier and must still recognise.
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

    @property
    def digest(self) -> str:
        """Name of the question, which covers its model."""
        who = (PROTOCOL, self.run, self.round, self.client, self.service, self.nonce)
        return digest("fedlgm question", *who, self.plan, self.model, canonical(self.work), canonical(self.expect))

    def header(self, signer: Ed25519PrivateKey | None = None) -> dict[str, Any]:
        """The frame's header, signed if there is a `signer`."""
        header: dict[str, Any] = {
            "protocol": PROTOCOL, "ask": "release", "run": self.run, "round": self.round, "client": self.client,
            "plan": self.plan, "work": dict(self.work), "nonce": self.nonce,
        }  # fmt: skip
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
    def signed(cls, ledger: str, seq: int, head: str, signer: Ed25519PrivateKey) -> Position:
        """A position with the service's signature."""
        return cls(ledger, seq, head, sign(signer, "position", ledger, seq, head))

    @classmethod
    def of(cls, raw: Any) -> Position | None:
        """A position from plain values; None if they do not have its form."""
        types = {"ledger": str, "seq": int, "head": str, "signature": str}
        if not isinstance(raw, dict) or raw.keys() != types.keys():
            return None
        return cls(**raw) if all(type(raw[name]) is kind for name, kind in types.items()) else None

    @property
    def test(self) -> bool:
        """Whether the ledger belongs to a test, whose noise is known."""
        return self.ledger.startswith(TEST)

    def valid(self, key: Ed25519PublicKey) -> bool:
        """Whether the service that owns `key` has signed it."""
        return verify(key, self.signature, "position", self.ledger, self.seq, self.head)

    def values(self) -> dict[str, Any]:
        """Plain values."""
        return {"ledger": self.ledger, "seq": self.seq, "head": self.head, "signature": self.signature}


def answer_fields(question: str, client: int, seq: int, body: str, position: Position) -> tuple[str | int, ...]:
    """The signed fields of an answer: digests of question and body, client, release number, position."""
    return ("answer", question, client, seq, body, position.ledger, position.seq, position.head)


def sign(key: Ed25519PrivateKey, *fields: str | int) -> str:
    """Ed25519 signature of the fields' digest, as hexadecimal digits."""
    return key.sign(bytes.fromhex(digest(*fields))).hex()


def verify(key: Ed25519PublicKey, signature: str, *fields: str | int) -> bool:
    """Whether `signature` is that of the owner of `key` over the fields, as `sign` writes it.

    Spaces between the digits would let a sender make the signature arbitrarily long, and it may be passed on in a
    header.
    """
    try:
        key.verify(bytes.fromhex(signature), bytes.fromhex(digest(*fields)))
    except (InvalidSignature, ValueError, TypeError):
        return False
    return len(signature) == _SIGNATURE_DIGITS


def public_key(text: str) -> Ed25519PublicKey:
    """Ed25519 public key of 64 hexadecimal digits.

    Raises:
        ValueError: the text has another form.
    """
    return Ed25519PublicKey.from_public_bytes(bytes.fromhex(text))


def public_text(key: Ed25519PrivateKey) -> str:
    """Public half of a key, as 64 hexadecimal digits."""
    return key.public_key().public_bytes_raw().hex()
