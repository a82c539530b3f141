"""Keys between two nodes, sealed shares and masks, all with primitives of the package
`cryptography`.
"""

from __future__ import annotations

import secrets

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.ciphers.algorithms import AES
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedlgm.errors import RunError
from fedlgm_nodes.secagg.shamir import SHARE_BYTES

KEY_BYTES = 32
_NONCE_BYTES = 12
_TAG_BYTES = 16
SEALED_DIGITS = 4 * -(-(_NONCE_BYTES + 2 * SHARE_BYTES + _TAG_BYTES) // 3)
"""Number of characters, in base 64, of two shares that are sealed together."""
_CHUNK = 1 << 18  # words of a mask that are made at once, few enough to stay in the cache


def new_secret() -> bytes:
    """32 random bytes from the operating system, for a private X25519 key or a seed."""
    return secrets.token_bytes(KEY_BYTES)


def public_of(private: bytes) -> str:
    """The public half of a private X25519 key, as 64 hexadecimal digits."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw().hex()


def derive_key(secret: bytes, *info: str | int) -> bytes:
    """Derive a key of 32 bytes for one purpose, by HKDF-SHA256."""
    purpose = "\0".join(map(str, ("fedlgm secagg", *info))).encode()
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=purpose).derive(secret)


def shared_secret(private: bytes, public: str) -> bytes:
    """The shared secret of a private and a public X25519 key.

    Raises:
        RunError: `public` is not a key, or no secret can be derived from it.
    """
    try:
        return X25519PrivateKey.from_private_bytes(private).exchange(
            X25519PublicKey.from_public_bytes(bytes.fromhex(public))
        )
    except ValueError as error:
        raise RunError(f"a public key that cannot be used: {error}") from error


def _share_key(private: bytes, public: str, cohort: str, sender: int, receiver: int) -> bytes:
    return derive_key(shared_secret(private, public), "share", cohort, sender, receiver)


def seal(
    private: bytes, public: str, cohort: str, sender: int, receiver: int, text: bytes
) -> bytes:
    """Encrypt `text` by AES-256-GCM so that only the receiver can read it. The key depends on
    cohort, sender and receiver, which are also authenticated.
    """
    nonce = secrets.token_bytes(_NONCE_BYTES)
    key = _share_key(private, public, cohort, sender, receiver)
    return nonce + AESGCM(key).encrypt(nonce, text, _associated_data(cohort, sender, receiver))


def unseal(
    private: bytes, public: str, cohort: str, sender: int, receiver: int, sealed: bytes
) -> bytes:
    """Decrypt and return the text that was given to `seal`.

    Raises:
        RunError: another node sealed the text, it was sealed for another node or cohort, or it was
            altered.
    """
    key = _share_key(private, public, cohort, sender, receiver)
    try:
        nonce, text = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
        return AESGCM(key).decrypt(nonce, text, _associated_data(cohort, sender, receiver))
    except (InvalidTag, ValueError) as error:
        raise RunError(f"the shares from {sender} to {receiver} are not authentic") from error


def _associated_data(cohort: str, sender: int, receiver: int) -> bytes:
    return f"{cohort} {sender} {receiver}".encode()


def self_mask_key(seed: bytes, cohort: str) -> bytes:
    """The key of a node's self mask, which is derived from its seed."""
    return derive_key(seed, "self", cohort)


def pair_mask_key(private: bytes, public: str, cohort: str, one: int, other: int) -> bytes:
    """The key of the mask that two nodes have in common, which each derives from its private key.

    The key depends on the numbers of both nodes, so a colluder who advertises a copy of another
    node's key does not get that node's masks.
    """
    return derive_key(
        shared_secret(private, public), "mask", cohort, min(one, other), max(one, other)
    )


def apply_mask(words: np.ndarray, key: bytes, *, subtract: bool = False) -> None:
    """Add a mask to uint32 words mod 2^32, or subtract it, in place. The mask is the AES-256-CTR
    stream of a key that is used for nothing else.

    Example:
        >>> words = np.arange(3, dtype="<u4")
        >>> apply_mask(words, b"k" * 32), apply_mask(words, b"k" * 32, subtract=True), words.tolist()
        (None, None, [0, 1, 2])
    """
    stream = Cipher(AES(key), CTR(bytes(16))).encryptor()
    zeros = bytes(4 * min(_CHUNK, max(len(words), 1)))
    change = np.subtract if subtract else np.add
    for low in range(0, len(words), _CHUNK):
        piece = words[low : low + _CHUNK]
        change(
            piece,
            np.frombuffer(stream.update(memoryview(zeros)[: 4 * len(piece)]), "<u4"),
            out=piece,
        )
