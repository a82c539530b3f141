"""The random words behind all kernel noise: Philox4x32-10, its counter, and the map from words to
noise.

Every backend reproduces these integers bit for bit, so a noise value depends only on (key, layer,
element, stream), not on the backend, the block of clients, the tile size or the number of GPU
threads.

    key      two words of `KeyRing.words(2, Purpose.NOISE, round)` (`noise_key`): the round is in
             the key
    counter  (element // 4, layer, stream, depth)
             element: index within its layer; layer: position in `offsets`; stream: client id or
             SERVER_STREAM; depth: 0, or 1 for the words x' that extend a tail
    output   four words x_0 .. x_3, for the elements 4 i .. 4 i + 3 of counter word i

    uniform  u(x) = min((x | 1) 2^-32, 1 - 2^-24): odd multiples of 2^-32; without the minimum,
             float32 would round the largest to 1
    tail     where x < 2^16 (one word in 65,536) 32 more bits x' make
             u = (x - x mod 2 + (x' + 1/2) 2^-31) 2^-32, in float32, never below 2^-64. Without
             these bits the noise would end at 6.7 standard deviations and be coarse just below. In
             large models this would cost more than a usual delta
    Gaussian Box and Muller (1958), one pair from (x_0, x_1) and one from (x_2, x_3): with radius
             sqrt(-2 ln u) of x and v = the low 30 bits of y, doubled and made odd as a signed
             fraction in (-1, 1), the pair is (cos(v pi / 4), sin(v pi / 4)), swapped if bit 30 of y
             is set, both negated if bit 31 is set. 2.5e-13 <= |z| <= sqrt(128 ln 2) = 9.42
    Laplace  inverse transform: magnitude -ln u, negative if bit 0 of x is set (which u does not
             depend on). 6.0e-8 <= |z| <= 64 ln 2 = 44.4

Philox passes batteries of statistical tests (Salmon et al. 2011) but is not a cipher. Take the key
from the operating system and keep it secret. Never release two different quantities under the same
(key, layer, stream).
"""

from __future__ import annotations

from typing import Any

from fedlgm.noise.keys import KeyRing, Purpose

SERVER_STREAM = 0xFFFFFFFF
"""Stream of the noise that the server adds; the numbers of clients are below it."""

UNIFORM_STEP = 2.0**-32
UNIFORM_MAX = 1.0 - 2.0**-24
TAIL = 2**16
"""Words below this number are extended by 32 more bits."""

_WORD = 0xFFFFFFFF
_MULTIPLIER = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def noise_key(ring: KeyRing, round: int) -> tuple[int, int]:
    """Return the Philox key of one round's noise.

    Args:
        ring: the secret key ring of the party that adds the noise.
        round: number of the round, 0 <= round < 2**32.

    Returns:
        Two 32-bit words.
    """
    first, second = ring.words(2, Purpose.NOISE, round)
    return int(first), int(second)


def philox4x32(
    counter: tuple[Any, Any, Any, Any], key: tuple[int, int]
) -> tuple[Any, Any, Any, Any]:
    """Compute Philox4x32-10 (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3",
    Section 3.3).

    Args:
        counter: four words in [0, 2**32), each a Python int, a NumPy int64 or uint64 array or a
            torch int64 tensor. They broadcast. A word that is an int becomes an array only where it
            is combined with an array.
        key: two words in [0, 2**32).

    Returns:
        Four output words in [0, 2**32), of the broadcast type.
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # Products keep all 64 bits. Signed products may wrap: their low halves are right, and a
        # mask corrects their high halves.
        p0, p1 = c0 * _MULTIPLIER[0], c2 * _MULTIPLIER[1]
        c0, c1 = ((p1 >> 32) ^ c1 ^ k0) & _WORD, p1
        c2, c3 = ((p0 >> 32) ^ c3 ^ k1) & _WORD, p0
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return c0, c1 & _WORD, c2, c3 & _WORD
