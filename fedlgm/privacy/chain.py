"""Hash chain of a ledger's rows. A row's head covers the row and, through the previous head, every earlier row."""

from __future__ import annotations

import hashlib


def next_head(head: str, *fields: str) -> str:
    """Head after one more row: SHA-256 over the lengths and bytes of `head` and of every field, in hexadecimal.

    Example:
        >>> next_head("", "owner")[:8]
        '126c8dcf'

    Args:
        head: the previous head, "" for the first row.
        fields: the row's values as text. Their lengths are hashed with them, so no two rows share their bytes.
    """
    digest = hashlib.sha256()
    for field in (head, *fields):
        data = field.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
