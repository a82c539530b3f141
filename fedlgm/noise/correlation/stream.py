"""Makes correlated noise w_t with C w = z round by round, from independent z_t and the state of
earlier rounds.

The state must stay as secret as the noise, because together with the releases it reveals the exact
sums.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.noise.correlation.correlation import Correlation

# number of coordinates that a thread handles at a time; they fit into the thread's cache, and no
# result depends on this number
_PIECE = 1 << 15


class CorrelatedStream:
    """Turns independent noise into correlated noise, round by round and in place.

    Banded strategies store the last b - 1 vectors w in one float32 buffer of shape [b - 1, n],
    which takes 4 (b - 1) n bytes. A round's noise is rounded to float32 before it is used. The
    stored values therefore equal the added values, and rounding errors do not accumulate over
    rounds. "blt" stores its m buffers, [m, n], in float64, because they are not themselves added to
    releases, and their rounding errors would accumulate. Arithmetic is in double precision and the
    same for every coordinate. The results do not depend on the number of threads or on how a vector
    is cut into pieces.

    Example:
        >>> import fedlgm.noise.correlation as correlation
        >>> stream = CorrelatedStream(correlation.get("square-root", 3, bands=2), 1)
        >>> tuple(round(stream.next(torch.ones(1, dtype=torch.float64)).item(), 4) for _ in range(3))
        (1.118, 0.559, 0.8385)

    Args:
        correlation: strategy and planned number of rounds.
        size: number n of coordinates of a release.
        device: device of the vectors.

    Attributes:
        round: number of rounds whose noise has been made.
    """

    def __init__(
        self, correlation: Correlation, size: int, device: torch.device | str = "cpu"
    ) -> None:
        self.correlation = correlation
        self.size = int(size)
        self.round = 0
        bands = correlation.bands
        # On the CPU, memory is allocated row by row, when a row is first written.
        self._kept = torch.empty(
            (len(correlation.decays) if bands is None else bands - 1, self.size),
            dtype=torch.float64 if bands is None else torch.float32,
            device=device,
        )

    def next(self, z: Tensor) -> Tensor:
        """Noise of the next round.

        Args:
            z: independent N(0, 1) values that were used for no other round, [n] float64 (or
                float32); overwritten.

        Returns:
            `z`, which now holds w_t. Its standard deviation is `correlation.noise_std()[t]`, not 1.

        Raises:
            ConfigError: the vector has another shape, type or device.
            PrivacyError: there would be more rounds than planned; the sensitivity covers only
                planned rounds.
        """
        if z.shape != (self.size,) or z.dtype not in (torch.float64, torch.float32):
            raise ConfigError(
                f"z must be a float64 or float32 vector [{self.size}], got {z.dtype} "
                f"{list(z.shape)}"
            )
        if z.device != self._kept.device:
            raise ConfigError(
                f"z is on {z.device}, but the noise of earlier rounds is on {self._kept.device}"
            )
        if self.round >= self.correlation.rounds:
            raise PrivacyError(
                f"noise was planned for {self.correlation.rounds} rounds, and sensitivities cover "
                "no further rounds"
            )
        if not self.correlation.is_independent:
            step = self._apply_buffers if self.correlation.decays else self._apply_bands
            piece = (
                _PIECE * torch.get_num_threads() if z.device.type == "cpu" else max(1, self.size)
            )
            for start in range(0, self.size, piece):
                step(z[start : start + piece], self._kept[:, start : start + piece])
        self.round += 1
        return z

    def replay(self, draw: Callable[[int], Tensor], rounds: int) -> None:
        """Advance to round `rounds` by drawing the noise of the rounds before it again.

        A key and a round number are therefore a complete state; the state kept between rounds only
        saves time.

        Args:
            draw: a function that returns z of round t, counted from 0, with the same bits as in the
                original round.
            rounds: number of finished rounds.

        Raises:
            ConfigError: the stream is already past this round.
            PrivacyError: there would be more rounds than were planned.
        """
        if rounds < self.round:
            raise ConfigError(
                f"the stream is already at round {self.round} and cannot go back to round {rounds}"
            )
        for t in range(self.round, rounds):
            self.next(draw(t))

    def _apply_bands(self, z: Tensor, state: Tensor) -> None:
        first, *rest = self.correlation.coefficients.tolist()
        sum_ = z.double()  # this is z itself if z is float64
        if rest:
            for lag, coefficient in enumerate(rest[: self.round], start=1):
                sum_.add_(state[(self.round - lag) % len(rest)], alpha=-coefficient)
        sum_.div_(first)
        w = state[self.round % len(rest)] if rest else torch.empty_like(sum_, dtype=torch.float32)
        z.copy_(w.copy_(sum_))

    def _apply_buffers(self, z: Tensor, state: Tensor) -> None:
        w = z.double()
        if self.round == 0:
            state.zero_()
        for scale, buffer in zip(self.correlation.scales, state, strict=True):
            w.sub_(buffer, alpha=scale)
        for decay, buffer in zip(self.correlation.decays, state, strict=True):
            buffer.mul_(decay).add_(w)
        z.copy_(w)
