"""Draws a release's noise, which is independent or correlated with the noise of all rounds so far.

Correlated noise of round t is w_t, row t of C^-1 z, where each z_r is independent and drawn with
the ring of round r. The key rings of the past rounds are therefore the complete state, and a
resumed run draws the same bits as an uninterrupted run. Rings and releases together reveal the
sums, so the rings must stay as secret as the sums.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

import fedlgm  # `fedlgm.correlation` is loaded only when used, because it loads SciPy
from fedlgm.aggregation import kernels, part_offsets
from fedlgm.checks import check_count
from fedlgm.errors import ConfigError, PrivacyError, RunError
from fedlgm.noise.draws import LEAST_SCALE, NoiseBackend, add_noise_, add_scaled_, unit_noise
from fedlgm.noise.keys import KeyRing, Purpose
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.views import NoiseSource
from fedlgm.privacy.ledger import SERVER


class Independent(NoiseSource[ReleasePlan]):
    """Independent noise, which depends only on the ring of its release.

    Example:
        >>> ring = KeyRing.from_seed(1)
        >>> Independent().following(ring, round=3) is ring
        True
    """

    def following(self, keys: KeyRing, round: int) -> KeyRing:
        """The same keys, because earlier rounds do not matter."""
        return keys

    @override
    def add_(
        self,
        total: Tensor,
        plan: ReleasePlan,
        ring: KeyRing,
        round: int,
        party: int,
        backend: NoiseBackend,
    ) -> Tensor:
        if plan.facts.noise is not None:
            raise PrivacyError("correlated noise is made by Noising.of")
        if backend == "cpu":
            self.add_rows_(total[None], plan, [ring], round, [party])
            return total
        if plan.size == 0:
            return total
        stream = kernels.SERVER_STREAM if party == SERVER else _stream(party)
        scale = kernel_scale([part.sigma for part in plan.parts]).to(total.device)
        key = kernels.noise_key(ring, round)
        return kernels.add_noise_(
            total, part_offsets(plan), scale, plan.family, key, stream, backend=backend
        )

    def add_rows_(
        self,
        totals: Tensor,
        plan: ReleasePlan,
        rings: Sequence[KeyRing],
        round: int,
        parties: Sequence[int],
    ) -> None:
        """Add noise to several sums [rows, plan.size] on the CPU, in place. Each sum gets the noise
        that `add_` would add to it.

        Raises:
            PrivacyError: the plan's noise is correlated over rounds.
            ConfigError: the sums are not on the CPU.
        """
        if plan.facts.noise is not None:
            raise PrivacyError("correlated noise is made by Noising.of")
        check_cpu(totals)
        streams = [
            ring.torch_generator(Purpose.NOISE, round, party + 1, place)
            for ring, party in zip(rings, parties, strict=True)
            for place in plan.streams
        ]
        add_noise_(totals, [(part.size, part.sigma) for part in plan.parts], streams, plan.family)


INDEPENDENT = Independent()


def noise_source(plan: ReleasePlan, run_noise: RunNoise | None) -> NoiseSource[ReleasePlan]:
    """The source of a plan's noise.

    Raises:
        PrivacyError: noise is correlated, and the noise of the run so far is missing.
    """
    if plan.facts.noise is None:
        return plan.facts.noised_by.source() or INDEPENDENT
    if run_noise is None:
        raise PrivacyError(
            "this round's noise depends on the noise of earlier rounds: pass the run's noise "
            "(run_noise)"
        )
    return run_noise


Draw = Callable[[KeyRing, int], Tensor]
"""A function from a ring and a round to z of that round, N(0, 1), float64 [size]. Equal arguments
give equal bits.
"""


class NoiseRings:
    """The secret ring of each round's noise, in memory. A run that must survive its process stores
    the rings in a file instead.

    If a round is released again with other noise, its ring is replaced, because later noise depends
    on the last release.

    Example:
        >>> rings = NoiseRings()
        >>> rings.keep(1, KeyRing.from_seed(None))
        >>> len(rings.first(1)), len(rings.digest(1))
        (1, 64)
    """

    def __init__(self) -> None:
        self._rings: dict[int, KeyRing] = {}

    def keep(self, round: int, ring: KeyRing) -> None:
        """Store the ring of a round (from 1) before that round is released."""
        self._rings[round] = ring

    def first(self, rounds: int) -> list[KeyRing]:
        """Rings of the rounds 1 to `rounds`.

        Raises:
            RunError: the ring of one of these rounds is unknown.
        """
        missing = [round for round in range(1, rounds + 1) if round not in self._rings]
        if missing:
            raise RunError(
                f"the noise of round {missing[0]} cannot be drawn again, and the noise of later "
                "rounds depends on it: restore the run's private files from a backup, or start a "
                "new run"
            )
        return [self._rings[round] for round in range(1, rounds + 1)]

    def digest(self, rounds: int) -> str:
        """Hash of the rings of the rounds 1 to `rounds`, in hexadecimal. The hash reveals nothing
        about the rings.

        Raises:
            RunError: the ring of one of these rounds is unknown.
        """
        named = hashlib.sha256(b"noise of a run")
        for ring in self.first(rounds):
            named.update(ring.root.to_bytes(16, "little"))
        return named.hexdigest()


class RunNoise:
    """Draws a run's correlated noise round by round. If it starts at a later round, it first draws
    the noise of the earlier rounds again.

    Args:
        rings: store of the secret rings. The ring of a public seed is not stored, because it is the
            same in every round.

    Example:
        >>> from fedlgm import correlation
        >>> noise, ring = correlation.get("square-root", 3, bands=2), KeyRing.from_seed(1)
        >>> def ones(ring, round):
        ...     return torch.ones(1, dtype=torch.float64)
        >>> run = RunNoise()
        >>> [round(run.next(noise, 1, t, ring, ones).item(), 4) for t in (1, 2, 3)]
        [1.118, 0.559, 0.8385]
        >>> round(RunNoise().next(noise, 1, 3, ring, ones).item(), 4)  # a process that starts at round 3
        0.8385
    """

    def __init__(self, rings: NoiseRings | None = None) -> None:
        self._rings = NoiseRings() if rings is None else rings
        self._stream: tuple[fedlgm.correlation.Correlation, int, Any] | None = None
        self._done = 0

    def following(self, keys: KeyRing, round: int) -> KeyRing:
        """The ring from which a round's noise is drawn. If `keys` are secret, the ring also depends
        on the rings of all earlier rounds.

        The same sum after different earlier releases is a different release. With the same z, the
        difference of two such releases would reveal the difference of the earlier sums without
        noise.

        Raises:
            RunError: the ring of an earlier round is not known.
        """
        return (
            keys.derive(b"after", self._rings.digest(round - 1).encode()) if keys.secret else keys
        )

    def next(
        self,
        noise: fedlgm.correlation.Correlation,
        size: int,
        round: int,
        ring: KeyRing,
        draw: Draw,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """Noise w_t of a round for z of standard deviation 1, float64 [size]. The ring is stored
        before the noise is drawn.

        Args:
            noise: the correlation C of the run.
            size: number of values that are drawn in every round.
            round: number of the round, from 1.
            ring: ring of this round's z.
            draw: function that draws a round's z.
            device: device on which the noise is computed.

        Raises:
            PrivacyError: C or the size differs from earlier rounds, or C does not cover this round.
            RunError: the ring of an earlier round is not known.
        """
        if not 1 <= round <= noise.rounds:
            raise PrivacyError(
                f"the noise was correlated over {noise.rounds} rounds: there is none for round "
                f"{round}"
            )
        if self._stream is not None and self._stream[:2] != (noise, size):
            raise PrivacyError(
                "correlated noise needs the same C and the same number of values in every round of "
                "a run"
            )
        if self._stream is None or not 0 <= self._done < round:
            from fedlgm.noise.correlation.stream import CorrelatedStream

            self._stream, self._done = (noise, size, CorrelatedStream(noise, size, device)), 0
        stream = self._stream[2]
        if self._done < round - 1:
            past = self._rings.first(round - 1) if ring.secret else [ring] * (round - 1)
            self._done = -1
            stream.replay(lambda t: draw(past[t], t + 1), round - 1)
        if ring.secret:
            self._rings.keep(round, ring)
        self._done = -1  # after an error in the next line, the stream must be made again
        w = stream.next(draw(ring, round))
        self._done = round
        return w

    def skip(self, round: int, ring: KeyRing) -> None:
        """Skip a round that releases nothing. Its noise is drawn when a later round depends on it.

        At this point, the number of values in other rounds may be unknown, for example if this
        round has no queries.

        Args:
            round: number of the round, from 1.
            ring: ring of this round's z.

        Raises:
            RunError: the ring of an earlier round is not known.
        """
        if ring.secret:
            self._rings.first(round - 1)
            self._rings.keep(round, ring)
        if round <= self._done:
            self._done = -1  # the noise that was drawn for later rounds depends on another ring

    def add_(
        self,
        total: Tensor,
        plan: ReleasePlan,
        ring: KeyRing,
        round: int,
        party: int,
        backend: NoiseBackend,
    ) -> Tensor:
        """Add sigma_j w_t to every part; see `NoiseSource.add_`.

        In every round, z is drawn for all layers and queries, including those that are not
        released, because the noise of a layer continues while the layer is not released.

        Raises:
            PrivacyError: the plan belongs to another round.
        """
        noise = plan.facts.noise
        if noise is None or plan.position != round - 1:
            raise PrivacyError(f"this plan is not for round {round}: make plans with Method.plan")
        if plan.size == 0:
            self.skip(round, ring)
            return total
        if backend == "cpu":
            check_cpu(total)
        sizes = [
            *(int(size) for size in plan.layers.sizes),
            *(noisy.size for noisy in plan.queries),
        ]
        ends = np.cumsum([0, *sizes])

        def draw_round(ring: KeyRing, number: int) -> Tensor:
            if backend == "cpu":
                return unit_noise(
                    sizes,
                    [
                        ring.torch_generator(Purpose.NOISE, number, SERVER + 1, j)
                        for j in range(len(sizes))
                    ],
                )
            values = torch.zeros(
                sum(sizes), dtype=kernels.widest(total.device), device=total.device
            )
            scale = torch.ones(len(sizes), dtype=torch.float32, device=total.device)
            key = kernels.noise_key(ring, number)
            offsets, stream = torch.from_numpy(ends), kernels.SERVER_STREAM
            kernels.add_noise_(
                values, offsets, scale, "gaussian", key, stream, grid=False, backend=backend
            )
            return values.to(where)

        # Metal has no double precision
        where = torch.device("cpu") if total.device.type == "mps" else total.device
        w = self.next(noise, sum(sizes), round, ring, draw_round, where)
        pieces = total.split([part.size for part in plan.parts])
        for place, part, piece in zip(plan.streams, plan.parts, pieces, strict=True):
            add_scaled_(piece, w[ends[place] : ends[place + 1]], part.sigma)
        return total


def check_cpu(tensor: Tensor) -> None:
    """Refuse to draw on the CPU for a tensor on another device (ConfigError)."""
    if tensor.device.type != "cpu":
        raise ConfigError(
            "noise backend 'cpu' draws only for tensors on the CPU, but these are on "
            f"{tensor.device}: use 'torch' or 'triton'"
        )


def _stream(client: int) -> int:
    return check_count("client", client, least=0, most=kernels.SERVER_STREAM - 1)


def kernel_scale(sigma: list[float]) -> Tensor:
    """Noise scales as float32, never below the plan's scales.

    Raises:
        PrivacyError: a scale is outside [2^-100, 2^100] and not 0.
    """
    exact = np.array(sigma)
    if (exact[exact > 0] < LEAST_SCALE).any() or (exact > 1 / LEAST_SCALE).any():
        raise PrivacyError(
            f"the kernels draw noise of scale 0 or in [2^-100, 2^100], got {exact.tolist()}"
        )
    scale = exact.astype(np.float32)
    return torch.from_numpy(np.where(scale < exact, np.nextafter(scale, np.float32(np.inf)), scale))
