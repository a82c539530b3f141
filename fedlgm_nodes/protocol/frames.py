"""Frames between a node's processes, and the records of Flower's messages that carry the body of a
frame.

A frame is `uint32 header length | uint64 body length | header | body`, little-endian. The header is
a JSON object; the body is one array in the .npy format, version 1, or empty. Nothing in a frame is
executed or unpickled. Processes that only forward frames need neither torch nor flwr.
"""

from __future__ import annotations

import json
import math
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from fedlgm import wire
from fedlgm.errors import RunError
from fedlgm.files import explain_failure
from fedlgm.wire import npy as npy  # bodies of messages are written by it
from fedlgm.wire import view

HEADER_BYTES = 1 << 19  # enough for a plan with a few thousand layers
_LARGEST_ANSWER = 1 << 33  # largest number of bytes in an answer's body
_PREFIX = struct.Struct("<IQ")
PREFIX_BYTES = _PREFIX.size

# keys in Flower's messages between `fedlgm_nodes.server.link` and `fedlgm_nodes.service.relay`
HEADER = "node.header"
BODY = "node.body"
MASK = "node.mask"
# largest number of a body's bytes in one record, the same as in Flower's own parts of an array
RECORD_BYTES = 5 << 20


class FrameError(RunError):
    """Bytes that are not a frame of this protocol."""


class NoService(RunError):
    """No service listens on the socket, or the service ended before it answered."""


def encode(header: Mapping[str, Any], body: bytes | memoryview = b"") -> bytes:
    """The bytes of one frame."""
    return encode_header(header, len(body)) + body


def encode_header(header: Mapping[str, Any] | str, size: int) -> bytes:
    """The bytes of a frame that come before its body of `size` bytes. A header that is given as
    text is not changed.
    """
    text = (header if isinstance(header, str) else json.dumps(header, allow_nan=False)).encode()
    return _PREFIX.pack(len(text), size) + text


def decode(frame: bytes) -> tuple[dict[str, Any], memoryview]:
    """Header and body of one frame.

    Raises:
        FrameError: the bytes are not a frame.
    """
    head, _ = lengths(frame[:PREFIX_BYTES], _LARGEST_ANSWER)
    rest = memoryview(frame)[PREFIX_BYTES:]
    return parse_header(bytes(rest[:head])), rest[head:]


def lengths(prefix: bytes, largest_body: int) -> tuple[int, int]:
    """The lengths of header and body that the first `PREFIX_BYTES` bytes of a frame announce.

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
    """Parse the JSON object of a header.

    Raises:
        FrameError: the bytes are not a JSON object, or hold NaN, Infinity or numbers beyond
            float64.
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
        NoService: no service listens on the socket, or the service ended before it answered.
        RunError: this user may not connect to the socket, or the answer is late or not a frame.
    """
    deadline = time.monotonic() + timeout
    first = encode_header(header, len(body))
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(timeout)
            link.connect(path)
            try:
                link.sendall(first)
                link.sendall(body)
            except (BrokenPipeError, ConnectionResetError):
                # the service refused the question before it had read all of it; its answer gives
                # the reason
                pass
            head, size = lengths(bytes(_receive(link, PREFIX_BYTES, deadline)), _LARGEST_ANSWER)
            return parse_header(bytes(_receive(link, head, deadline))), _receive(
                link, size, deadline
            )
    except TimeoutError as error:
        raise RunError(
            f"the release service at {path} did not answer within {timeout:g} s"
        ) from error
    except OSError as error:
        ended = FileNotFoundError | ConnectionRefusedError | ConnectionResetError
        kind = NoService if isinstance(error, ended) else RunError
        what = f"the release service at {path} cannot be reached"
        raise kind(explain_failure(what, error, "see its log")) from error


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
    """View the one-dimensional array in `data`, read-only and without a copy.

    Args:
        data: bytes in the .npy format, version 1, with one array and nothing after it.
        kinds: accepted dtypes, for example ("<f4",).

    Raises:
        FrameError: the data are not such an array, for example because they hold Python objects or
            a pickle.
    """
    try:
        values = view(data)
    except RunError as error:
        raise FrameError(f"not an array in the .npy format, version 1: {error}") from error
    if values.dtype.str not in kinds or values.ndim != 1:
        raise FrameError(
            f"an array of {values.dtype} and shape {values.shape}; expected one dimension of "
            f"{' or '.join(kinds)}"
        )
    return values


def mask_bytes(data: bytes | memoryview, key: int) -> memoryview:
    """XOR bytes with a repeated 32-bit key, so that equal bodies differ in Flower's messages.
    Masking twice with the same key restores the bytes.

    Flower stores objects by their content. If a run ends after a node has received a message, some
    announced objects are never fetched, and every later message with the same content waits for
    them forever. A resumed run sends the same model again, so without masking its messages would
    wait.

    Raises:
        FrameError: the length is not a multiple of four bytes, or the key is not a number of 32
            bits.
    """
    if len(data) % 4 or not 0 <= key < 2**32:
        raise FrameError(f"{len(data)} bytes cannot be masked with {key}")
    return (np.frombuffer(data, "<u4") ^ np.uint32(key)).view(np.uint8).data


def body_records(body: bytes | memoryview, key: int) -> dict[str, dict[str, bytes]]:
    """Name -> values of the configuration records that hold a body, masked with `key`, in a Flower
    message.

    Flower transfers each record as one object, which costs several requests. An array would be
    transferred as three objects.

    Raises:
        FrameError: see `mask_bytes`.

    Example:
        >>> records = body_records(b"a model.", 7)
        >>> list(records), bytes(body_of(records, 7))
        (['node.body.0'], b'a model.')
    """
    data = mask_bytes(body, key)
    starts = range(0, len(data), RECORD_BYTES)
    return {
        f"{BODY}.{number}": {BODY: bytes(data[low : low + RECORD_BYTES])}
        for number, low in enumerate(starts)
    }


def body_of(records: Mapping[str, Mapping[str, Any]], key: int) -> memoryview:
    """The unmasked body that a message's records hold. The first part of the body may be in the
    record of the header.

    Raises:
        FrameError: the records hold something else, or the body has a length that `mask_bytes`
            refuses.
    """
    parts = [records[wire.CONFIG][BODY]] if BODY in records.get(wire.CONFIG, ()) else []
    while BODY in records.get(f"{BODY}.{len(parts)}", ()):
        parts.append(records[f"{BODY}.{len(parts)}"][BODY])
    if not all(isinstance(part, bytes) for part in parts):
        raise FrameError("the body of a message must be bytes")
    return mask_bytes(parts[0] if len(parts) == 1 else b"".join(parts), key)
