"""Keyed randomness: every stream is named by (root, purpose, round, client, layer, ...).

The values of a stream depend only on its name, not on the number of workers, the order of calls or
the launcher. `numpy.random.SeedSequence` hashes names to 128 bits, so different names have
different streams unless their hashes collide.
"""

from __future__ import annotations

import hashlib
import secrets
import struct
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

import numpy as np

from fedlgm.errors import ConfigError
from fedlgm.libraries import torch

_ROOT_LIMIT = 2**128  # a root has four words of 32 bits, after which SeedSequence mixes the path


class Purpose(IntEnum):
    """Purpose of a stream, as a part of the stream's name. Runs store these numbers, so never
    change a number, and only append new ones.

    Example:
        >>> keys = KeyRing.from_seed(7)
        >>> int(keys.words(1, Purpose.COHORT, 1)[0]) == int(keys.words(1, Purpose.NOISE, 1)[0])
        False
    """

    MODEL = 1
    PARTITION = 2
    COHORT = 3
    TRAIN = 4
    NOISE = 5
    DROPOUT = 6
    PROBE = 7
    GROUP = 8
    SELECTION = 9
    ROUNDING = 10


@dataclass(frozen=True)
class KeyRing:
    """Source of named random streams.

    Example:
        >>> keys = KeyRing.from_seed(7)
        >>> int(keys.numpy_generator(Purpose.COHORT, 1).integers(100)) == int(
        ...     keys.numpy_generator(Purpose.COHORT, 1).integers(100)
        ... )
        True

    Attributes:
        root: secret (or public seed) from which all streams derive, 0 <= root < 2**128.
        secret: whether the root came from the operating system; False for seeds, which are public.

    Raises:
        ConfigError: the root is outside its range.
    """

    root: int
    secret: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.root < _ROOT_LIMIT:
            raise ConfigError(f"seed must be an integer in [0, 2**128), got {self.root}")

    def __repr__(self) -> str:
        """Text that omits a secret root, because logs and tracebacks show the fields of objects."""
        return "KeyRing(<secret>)" if self.secret else f"KeyRing(root={self.root})"

    @classmethod
    def from_seed(cls, seed: int | None) -> KeyRing:
        """Ring of a public seed, or of 128 bits from the operating system when `seed` is None."""
        return cls(secrets.randbits(128), secret=True) if seed is None else cls(int(seed))

    def derive(self, *facts: bytes | memoryview) -> KeyRing:
        """A different ring for each sequence of `facts`. The new ring is secret if this ring is
        secret.
        """
        digest = hashlib.blake2b(digest_size=16, key=self.root.to_bytes(16, "little"))
        for fact in facts:
            digest.update(len(fact).to_bytes(8, "little"))
            digest.update(fact)
        return KeyRing(int.from_bytes(digest.digest(), "little"), self.secret)

    def sequence(self, purpose: Purpose, *path: int) -> np.random.SeedSequence:
        """Seed sequence named by `purpose` and `path` (integers in [0, 2**32)).

        Raises:
            ConfigError: a path entry is outside this range.
        """
        # This equals SeedSequence(self.root, spawn_key=(purpose, *path)), which takes longer
        # because it turns every number into words.
        try:
            named = self.root.to_bytes(16, "little") + struct.pack(
                f"<{1 + len(path)}I", purpose, *path
            )
        except struct.error as error:
            raise ConfigError(f"path entries must lie in [0, 2**32), got {path}") from error
        return np.random.SeedSequence(np.frombuffer(named, "<u4").astype(np.uint32, copy=False))

    def words(self, count: int, purpose: Purpose, *path: int) -> np.ndarray:
        """Draw `count` 32-bit words from the named stream, for generators that take a key (uint32,
        shape [count]).
        """
        return _state(self.sequence(purpose, *path), count)

    def numpy_generator(self, purpose: Purpose, *path: int) -> np.random.Generator:
        """NumPy generator (Philox) of the named stream."""
        return np.random.Generator(np.random.Philox(self.sequence(purpose, *path)))

    def torch_generator(self, purpose: Purpose, *path: int) -> torch.Generator:
        """CPU torch generator of the named stream. The name determines its whole 19,968-bit state.

        For the CPU generator, `Generator.manual_seed` uses only 32 bits of a seed, so two of forty
        thousand layers would share a stream with probability 0.17. The state is therefore written
        directly.
        """
        generator = torch.Generator()
        generator.set_state(mt19937_state(self.words(_MT_WORDS, purpose, *path)))
        return generator


def _state(sequence: np.random.SeedSequence, count: int) -> np.ndarray:
    """The result of `sequence.generate_state(count)`, with all words computed at once. NumPy
    computes them one after the other, which takes longer.
    """
    before, after = _hash_constants(count)
    words = sequence.pool ^ before
    words *= after
    words ^= words >> 16
    return words.reshape(-1)[:count]


@lru_cache(maxsize=8)
def _hash_constants(count: int) -> tuple[np.ndarray, np.ndarray]:
    """The constants that turn the pool of a `SeedSequence` into words, uint32 [count / 4, 4]. Each
    row holds the constants for the four words of the pool.
    """
    full = -(-count // 4) * 4
    powers = np.cumprod(
        np.concatenate([[0x8B51F9DD], np.full(full, 0x58F38DED)]).astype(np.uint32), dtype=np.uint32
    )
    powers.setflags(write=False)
    return powers[:-1].reshape(-1, 4), powers[1:].reshape(-1, 4)


_MT_WORDS = 624
_MT_OFFSET = 24  # bytes of the legacy header (seed, left, seeded, next) before the state words


@lru_cache(maxsize=1)
def _fresh_state() -> np.ndarray:
    return torch.Generator().manual_seed(0).get_state().numpy()


def mt19937_state(words: np.ndarray) -> torch.Tensor:
    """Torch CPU generator state (uint8) that holds `words` (uint32, shape [624]) as its Mersenne
    Twister state.
    """
    state = _fresh_state().copy()
    state[_MT_OFFSET : _MT_OFFSET + 8 * _MT_WORDS].view(np.uint64)[:] = words
    return torch.from_numpy(state)
