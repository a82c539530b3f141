"""Masks and sealed shares: known answers of the standards, and who can open what."""

from __future__ import annotations

import numpy as np
import pytest

from fedlgm.errors import RunError
from fedlgm_nodes.secagg.keys import (
    apply_mask,
    new_secret,
    pair_mask_key,
    public_of,
    seal,
    shared_secret,
    unseal,
)

COHORT = "c" * 64


def test_masks_are_the_keystream_of_aes_256_in_counter_mode():
    """AES-256 of the zero block under the zero key, a value of NIST's AESAVS."""
    words = np.zeros(4, "<u4")
    apply_mask(words, bytes(32))
    assert words.tobytes().hex() == "dc95c078a2408989ad48a21492842087"


def test_long_masks_continue_over_pieces_and_cancel():
    rng, key = np.random.default_rng(0), new_secret()
    words = rng.integers(0, 2**32, (1 << 18) + 5, dtype=np.uint32)
    masked, short = words.copy(), words[:7].copy()
    apply_mask(masked, key)
    apply_mask(short, key)
    assert (masked[:7] == short).all()
    assert (masked != words).mean() > 0.99
    apply_mask(masked, key, subtract=True)
    assert (masked == words).all()


def test_two_nodes_agree_on_a_key():
    """The known answer is Bob's key pair of RFC 7748, section 6.1."""
    alice, bob = (
        new_secret(),
        bytes.fromhex("5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb"),
    )
    assert public_of(bob) == "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
    assert shared_secret(alice, public_of(bob)) == shared_secret(bob, public_of(alice))
    with pytest.raises(RunError, match="cannot be used"):
        shared_secret(alice, "00" * 32)  # a point of low order: the secret would be zero


def test_the_mask_of_two_nodes_is_theirs_alone():
    one, other = new_secret(), new_secret()
    key = pair_mask_key(one, public_of(other), COHORT, 1, 2)
    assert key == pair_mask_key(other, public_of(one), COHORT, 2, 1)
    # A third node that advertises a copy of the key shares no mask: it could cancel that of the
    # first two.
    assert key != pair_mask_key(one, public_of(other), COHORT, 1, 3)
    assert key != pair_mask_key(one, public_of(other), "d" * 64, 1, 2)


def test_shares_open_for_their_receiver_in_their_cohort_only():
    one, other = new_secret(), new_secret()
    sealed = seal(one, public_of(other), COHORT, 1, 2, b"shares")
    assert unseal(other, public_of(one), COHORT, 1, 2, sealed) == b"shares"
    for cohort, sender, receiver, text in (
        ("d" * 64, 1, 2, sealed), (COHORT, 2, 1, sealed), (COHORT, 3, 2, sealed), (COHORT, 1, 2, sealed[:-1]),
        (COHORT, 1, 2, b""),
    ):  # fmt: skip
        with pytest.raises(RunError, match="not authentic"):
            unseal(other, public_of(one), cohort, sender, receiver, text)
