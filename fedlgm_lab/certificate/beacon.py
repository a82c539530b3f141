"""The commitment to a run's noise, the beacon that answers it, and the root that follows from
both.
"""

from __future__ import annotations

import hashlib

from fedlgm.privacy.chain import digest


def commitment_of(root: bytes, nonce: bytes) -> str:
    """The public commitment to a secret root, in hexadecimal; it is published before the beacon.

    Args:
        root: 32 secret bytes.
        nonce: 32 secret bytes, without which nobody can try roots.

    Example:
        >>> commitment_of(bytes(32), bytes(32))[:8]
        '8f890782'
    """
    return digest("root", root, nonce)


def noise_root(root: bytes, beacon: bytes) -> int:
    """The root of a run's keys: BLAKE2b of root and beacon, 128 bits. Neither the operator nor the
    auditor can pick this root alone.

    Example:
        >>> noise_root(bytes(32), bytes(32)) == noise_root(bytes(32), b"1" * 32)
        False
    """
    return int.from_bytes(hashlib.blake2b(root + beacon, digest_size=16).digest(), "big")


def beacon_text(commitment: str, beacon: str) -> bytes:
    r"""The bytes that an auditor signs to say that it drew this beacon after it saw the commitment.

    Example:
        >>> beacon_text("ab", "cd")
        b'fedlgm beacon v1\nab\ncd\n'
    """
    return f"fedlgm beacon v1\n{commitment}\n{beacon}\n".encode()
