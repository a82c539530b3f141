"""Signed statements about runs and ledgers: the envelopes of statements, and the heads of chains
that witnesses sign.
"""

from __future__ import annotations

import base64
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
NODE_PREDICATE = "urn:fedlgm:node-certificate:v1"
"""Predicate type of the statement in which a node describes its own ledger."""
ANCHOR_EVERY = 5
"""Largest number of rounds between two heads that witnesses sign."""


def signed_bytes(payload: bytes) -> bytes:
    """The bytes that a signature covers (pre-authentication encoding of DSSE).

    Example:
        >>> signed_bytes(b"{}")
        b'DSSEv1 28 application/vnd.in-toto+json 2 {}'
    """
    kind = PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def envelope_of(statement: dict[str, Any], key: Ed25519PrivateKey) -> bytes:
    """A signed statement, as a line of canonical JSON (RFC 8785).

    Args:
        statement: an in-toto statement.
        key: key that signs it.

    Example:
        >>> envelope_of({}, Ed25519PrivateKey.generate())[:17]
        b'{"payload":"e30="'
    """
    import rfc8785

    payload = rfc8785.dumps(statement)
    signature = key.sign(signed_bytes(payload))
    signer = key.public_key().public_bytes_raw().hex()
    envelope: dict[str, Any] = {
        "payload": base64.b64encode(payload).decode(),
        "payloadType": PAYLOAD_TYPE,
        "signatures": [{"keyid": signer, "sig": base64.b64encode(signature).decode()}],
    }
    return bytes(rfc8785.dumps(envelope)) + b"\n"


def anchor_text(round: int, head: str) -> bytes:
    r"""The bytes that a witness signs to confirm that it has seen this head of a chain of releases.

    Example:
        >>> anchor_text(5, "ab")
        b'fedlgm anchor v1\n5:ab\n'
    """
    return f"fedlgm anchor v1\n{round}:{head}\n".encode()
