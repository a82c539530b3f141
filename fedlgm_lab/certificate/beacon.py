"""The commitment to a run's noise, the beacon that an auditor draws after the commitment, and the
root of the noise keys, which follows from both.
"""

from __future__ import annotations

import hashlib

from fedlgm.privacy.chain import digest


def commitment_of(root: bytes, nonce: bytes) -> str:
    """Compute the public commitment to a secret root, in hexadecimal. The commitment is published
    before the beacon is drawn.

    Args:
        root: 32 secret bytes.
        nonce: 32 secret bytes, which prevent others from finding the root by trial.

    Example:
        >>> commitment_of(bytes(32), bytes(32))[:8]
        '8f890782'
    """
    return digest("root", root, nonce)


def noise_root(root: bytes, beacon: bytes) -> int:
    """Compute the root of a run's keys, which is BLAKE2b of the secret root and the beacon, 128
    bits. Neither the operator nor the auditor can choose it alone.

    Example:
        >>> noise_root(bytes(32), bytes(32)) == noise_root(bytes(32), b"1" * 32)
        False
    """
    return int.from_bytes(hashlib.blake2b(root + beacon, digest_size=16).digest(), "big")


def beacon_text(commitment: str, beacon: str) -> bytes:
    r"""Return the bytes by whose signature an auditor confirms that it drew this beacon after it
    saw the commitment.

    Example:
        >>> beacon_text("ab", "cd")
        b'fedlgm beacon v1\nab\ncd\n'
    """
    return f"fedlgm beacon v1\n{commitment}\n{beacon}\n".encode()
