"""Noise correlated over a run's rounds: which keys drew it, and how the next round's follows from all so far.

The noise of round t is w_t, row t of C^-1 z, with z_r independent and drawn by the ring of round r. So the rings of the
rounds so far are the whole state: replaying them gives the same bits as never having stopped. Whoever holds them and
the releases holds the sums: they are as secret as the sums themselves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedlgm.errors import PrivacyError, RunError
from fedlgm.keys import KeyRing

if TYPE_CHECKING:
    from fedlgm.correlation import CorrelatedStream, Correlation


@dataclass(frozen=True)
class Draw:
    """How the independent noise of a round is drawn.

    Attributes:
        of: (ring, round) -> z of that round, N(0, 1), float64 [size]; equal arguments give equal bits.
        device: where it is drawn.

    Example:
        >>> from fedlgm.keys import Purpose
        >>> def standard_normal(ring, round):
        ...     generator = ring.torch_generator(Purpose.NOISE, round)
        ...     return torch.randn(3, dtype=torch.float64, generator=generator)
        >>> draw, ring = Draw(standard_normal, torch.device("cpu")), KeyRing.from_seed(1)
        >>> torch.equal(draw(ring, 1), draw(ring, 1)), torch.equal(draw(ring, 1), draw(ring, 2))
        (True, False)
    """

    of: Callable[[KeyRing, int], Tensor]
    device: torch.device

    def __call__(self, ring: KeyRing, round: int) -> Tensor:
        """`of`."""
        return self.of(ring, round)


class NoiseRings:
    """The secret ring of each round's noise, in memory; a run that must survive its process keeps them in a file.

    A round that is released again with other noise replaces its ring: what comes after follows from the last release.

    Example:
        >>> rings = NoiseRings()
        >>> rings.keep(1, KeyRing.from_seed(None))
        >>> len(rings.first(1)), len(rings.digest(1))
        (1, 64)
    """

    def __init__(self) -> None:
        self._rings: dict[int, KeyRing] = {}

    def keep(self, round: int, ring: KeyRing) -> None:
        """Remember the ring of a round (from 1) before that round is released."""
        self._rings[round] = ring

    def first(self, rounds: int) -> list[KeyRing]:
        """Rings of the rounds 1 to `rounds`.

        Raises:
            RunError: one of them is not known.
        """
        missing = [round for round in range(1, rounds + 1) if round not in self._rings]
        if missing:
            raise RunError(
                f"the noise of round {missing[0]} cannot be drawn again, and the noise of later rounds depends on it: "
                "restore the run's private files from a backup, or start a new run"
            )
        return [self._rings[round] for round in range(1, rounds + 1)]

    def digest(self, rounds: int) -> str:
        """Hash of the rings of the rounds 1 to `rounds`, hexadecimal; it tells nothing of them.

        Raises:
            RunError: one of them is not known.
        """
        named = hashlib.sha256(b"noise of a run")
        for ring in self.first(rounds):
            named.update(ring.root.to_bytes(16, "little"))
        return named.hexdigest()


class RunNoise:
    """Draws a run's correlated noise, one round after the other, or from any round on by drawing what came before.

    Args:
        rings: where secret rings are kept; the ring of a public seed is the same in every round.

    Example:
        >>> from fedlgm import correlation
        >>> noise, ring = correlation.get("square-root", 3, bands=2), KeyRing.from_seed(1)
        >>> ones = Draw(lambda ring, round: torch.ones(1, dtype=torch.float64), torch.device("cpu"))
        >>> run = RunNoise()
        >>> [round(run.next(noise, 1, t, ring, ones).item(), 4) for t in (1, 2, 3)]
        [1.118, 0.559, 0.8385]
        >>> round(RunNoise().next(noise, 1, 3, ring, ones).item(), 4)  # a process that starts at round 3
        0.8385
    """

    def __init__(self, rings: NoiseRings | None = None) -> None:
        self._rings = NoiseRings() if rings is None else rings
        self._stream: tuple[Correlation, int, CorrelatedStream] | None = None
        self._done = 0

    def following(self, keys: KeyRing, round: int) -> KeyRing:
        """The run's ring for a round's noise, which a secret ring makes another one after every other past.

        The same sum after other earlier releases is another release: with the same z, the difference of the two would
        be that of the earlier sums, without noise.

        Raises:
            RunError: the ring of an earlier round is not known.
        """
        return keys.derive(b"after", self._rings.digest(round - 1).encode()) if keys.secret else keys

    def next(self, noise: Correlation, size: int, round: int, ring: KeyRing, draw: Draw) -> Tensor:
        """Noise w_t of a round for z of standard deviation 1, float64 [size]; keeps the ring first.

        Args:
            noise: C of the run.
            size: numbers drawn in every round.
            round: from 1.
            ring: of this round's z.
            draw: draws the z of a round.

        Raises:
            PrivacyError: another C or size than in the rounds before, or a round that C was not made for.
            RunError: the ring of an earlier round is not known.
        """
        if not 1 <= round <= noise.rounds:
            raise PrivacyError(f"the noise was correlated over {noise.rounds} rounds: there is none for round {round}")
        if self._stream is not None and self._stream[:2] != (noise, size):
            raise PrivacyError("correlated noise needs the same C and as many numbers in every round of a run")
        self._catch_up(noise, size, round, ring, draw)
        assert self._stream is not None
        if ring.secret:
            self._rings.keep(round, ring)
        self._done = -1  # until the stream has it: after an error in between it is made again
        w = self._stream[2].next(draw(ring, round))
        self._done = round
        return w

    def skip(self, round: int, ring: KeyRing) -> None:
        """Leave out a round that releases nothing; its noise is drawn when a later round's follows from it.

        A round without queries, say, does not tell how many numbers the others have.

        Args:
            round: from 1.
            ring: of this round's z.

        Raises:
            RunError: the ring of an earlier round is not known.
        """
        if ring.secret:
            self._rings.first(round - 1)
            self._rings.keep(round, ring)
        if round <= self._done:
            self._done = -1  # what was made after it followed from another ring

    def _catch_up(self, noise: Correlation, size: int, round: int, ring: KeyRing, draw: Draw) -> None:
        """Have the stream made all rounds before this one, and no other."""
        from fedlgm.correlation import CorrelatedStream

        if self._stream is None or not 0 <= self._done < round:
            self._stream, self._done = (noise, size, CorrelatedStream(noise, size, draw.device)), 0
        if self._done == round - 1:
            return
        past = self._rings.first(round - 1) if ring.secret else [ring] * (round - 1)
        self._done = -1
        self._stream[2].replay(lambda t: draw(past[t], t + 1), round - 1)
