"""Hashes and texts by which others can check a run: commitment, beacon, chain of releases, code.

A run that keeps its releases writes them, the certificate states them, and its verifier computes
them again. The text of an anchor is in
`fedlgm.privacy.signed`, since nodes sign it too.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from fedlgm.privacy.chain import digest

CODE = ("clients", "fedlgm", "fedlgm_lab", "fedlgm_nodes", "simulations", "strategies")
"""Packages whose code a run executes."""


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
    """The root of a run's keys: BLAKE2b of root and beacon, 128 bits. Neither side can pick it
    alone.

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


def is_signed(by: Any, signature: Any, text: bytes) -> bool:
    """Whether an Ed25519 signature holds; both arguments in hexadecimal.

    Example:
        >>> is_signed("00" * 32, "00" * 64, b"a text"), is_signed("no key", "", b"")
        (False, False)
    """
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(by)).verify(bytes.fromhex(signature), text)
    except (InvalidSignature, ValueError, TypeError):
        return False
    return True


def first_head(start: bytes) -> str:
    """Head of a chain of releases before round 1.

    Args:
        start: canonical JSON of what is fixed before round 1: recipe, weights, code, commitment.

    Example:
        >>> len(first_head(b"{}"))
        64
    """
    return digest("fedlgm releases v1", start)


def next_head(before: str, round: int, ledger: str, plan: str, released: str) -> str:
    """Head of a chain after one more release.

    Args:
        before: the previous head.
        round: number of the round.
        ledger: the ledger's head after the row that charges the release.
        plan: SHA-256 of the plan's text.
        released: SHA-256 of the released vector.

    Example:
        >>> next_head("a", 1, "b", "c", "d") == next_head("a", 2, "b", "c", "d")
        False
    """
    return digest(before, round, ledger, plan, released)


def code_digest() -> str:
    """SHA-256 of the installed code of the packages of a run: every .py file, sorted by path.

    Example:
        >>> len(code_digest())
        64
    """
    base, fields = Path(__file__).parents[3], list[str | bytes]()
    for package in CODE:
        for path in sorted((base / package).rglob("*.py")):
            fields += [path.relative_to(base).as_posix(), path.read_bytes()]
    return digest(*fields)
