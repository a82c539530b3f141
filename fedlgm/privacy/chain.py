"""Digest of a sequence of values, which chains the rows of a ledger and names messages."""

from __future__ import annotations

import hashlib


def digest(*fields: str | bytes | int) -> str:
    """SHA-256 over the lengths and bytes of the fields, in hexadecimal. Sequences that differ in
    the bytes of a field have different digests.

    In a ledger the first field is the previous row's digest, so that a row's digest covers every
    earlier row.

    Example:
        >>> digest("", "owner")[:8]
        '126c8dcf'
    """
    total = hashlib.sha256()
    for field in fields:
        data = field if isinstance(field, bytes) else str(field).encode()
        total.update(len(data).to_bytes(8, "little") + data)
    return total.hexdigest()
