"""Noise drawn on the CPU; `fedlgm.aggregation.kernels` draws it on any device, and `fedlgm.release` chooses.

`draw` is for small NumPy vectors (applications, closed-form checks) and `add_noise_` for model updates. Every draw
takes a named stream of `fedlgm.keys`; no function reads a global generator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.extension import named_arguments

Family = Literal["gaussian", "laplace"]
NoiseBackend = Literal["cpu", "torch", "triton"]
"""Generator of noise: this module ("cpu"), or the kernels in torch (any device) or in Triton (GPUs)."""
LEAST_SCALE = 2.0**-100
"""Smallest noise scale above 0; its inverse is the largest."""
GRID_BITS = 10
"""Released values are multiples of 2^(floor(log2 scale) - GRID_BITS)."""


def draw(
    family: Family, scale: npt.ArrayLike, rng: np.random.Generator, size: tuple[int, ...] | None = None
) -> np.ndarray:
    """Independent zero-mean noise in float64.

    Args:
        family: "gaussian" (`scale` is the standard deviation) or "laplace" (`scale` is the parameter b, std sqrt(2) b).
        scale: non-negative scales, broadcast against `size`; a zero scale gives exactly zero.
        rng: stream to draw from.
        size: shape of the result; by default that of `scale`.

    Returns:
        Array of shape `size`.
    """
    scale = np.asarray(scale, dtype=np.float64)
    shape = scale.shape if size is None else size
    unit = rng.standard_normal(shape) if family == "gaussian" else rng.laplace(size=shape)
    return unit * scale


@named_arguments
def add_noise_(
    total: Tensor,
    parts: Sequence[tuple[int, float]],
    streams: Sequence[torch.Generator],
    family: Family = "gaussian",
) -> Tensor:
    """Add independent noise to each part of a flat vector, in place.

    The result is rounded to a grid of 2^-10 of the part's noise scale (a power of two), because the low bits of a
    floating-point sum would otherwise reveal the summand (see docs/decisions.md, section Floating point).

    Args:
        total: float32 or float64 vector [sum of sizes] on the CPU.
        parts: (size, scale) of each part in order; scale is the std (Gaussian) or b (Laplace); 0 adds nothing.
        streams: one generator for each part.
        family: "gaussian" or "laplace".

    Returns:
        `total`.
    """
    if total.numel() != sum(size for size, _ in parts) or len(parts) != len(streams):
        raise ConfigError(f"{total.numel()} coordinates, {len(parts)} parts and {len(streams)} streams do not fit")
    buffer, start = torch.empty(min(_CHUNK, total.numel())), 0
    for (size, scale), stream in zip(parts, streams, strict=True):
        if scale > 0:
            for piece, noise in _drawn(total[start : start + size], family, stream, buffer):
                add_scaled_(piece, noise, scale)
        start += size
    return total


def unit_noise(sizes: Sequence[int], streams: Sequence[torch.Generator]) -> Tensor:
    """Independent standard normal noise for each part of a flat vector, not rounded, float64 [sum of sizes].

    Args:
        sizes: coordinates of each part.
        streams: one generator for each part.
    """
    out = torch.empty(sum(sizes), dtype=torch.float64)
    buffer = torch.empty(min(_CHUNK, out.numel()))
    for part, stream in zip(out.split(list(sizes)), streams, strict=True):
        for piece, noise in _drawn(part, "gaussian", stream, buffer):
            piece.copy_(noise)
    return out


def add_scaled_(piece: Tensor, noise: Tensor, scale: float) -> None:
    """Add `scale` times given noise to a vector, in place, and round to the grid of the scale (see `add_noise_`)."""
    if scale > 0:
        if not LEAST_SCALE <= scale <= 1 / LEAST_SCALE:  # as the kernels: nearer the ends noise or its grid vanish
            raise PrivacyError(f"a noise scale must be 0 or lie in [2^-100, 2^100], got {scale:g}")
        step = grid_step(scale)
        piece.add_(noise.to(piece), alpha=scale).mul_(1 / step).round_().mul_(step)


def grid_step(scale: float) -> float:
    """Grid step of released values: the power of two in (scale / 2048, scale / 1024]."""
    return 2.0 ** (math.floor(math.log2(scale)) - GRID_BITS)


_CHUNK = 1 << 18


def _drawn(part: Tensor, family: Family, stream: torch.Generator, buffer: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces of a part with their unit noise; they stay in the cache, and redrawing their tails is little overhead."""
    for piece in part.split(_CHUNK):
        noise = buffer[: piece.numel()]
        _fill(noise, family, stream)
        yield piece, noise


def _fill(out: Tensor, family: Family, stream: torch.Generator) -> None:
    """Unit noise in single precision, with the tail redrawn in double precision.

    Single-precision uniforms end a normal at 5.77 standard deviations and an exponential at 16.6, and are coarse
    shortly before. One client's change moves many coordinates, so in a large model that edge alone would cost more than
    a usual delta. A value beyond `_TAIL` is therefore replaced by a draw from the exact conditional law: about one
    value in two or three thousand, at hardly any cost.
    """
    if family == "gaussian":
        values = out.normal_(generator=stream).numpy()
        tail = _beyond(values, _TAIL_NORMAL)
        if len(tail):
            uniform = torch.from_numpy(_positive_uniform(len(tail), stream) * _TAIL_PROBABILITY)
            values[tail] = np.copysign(torch.special.ndtri(uniform).numpy(), values[tail])
        return
    out.exponential_(generator=stream)
    tail = _beyond(out.numpy(), _TAIL_EXPONENTIAL)
    uniform = torch.from_numpy(_positive_uniform(len(tail), stream))
    out[tail] = (_TAIL_EXPONENTIAL - uniform.log()).to(out.dtype)
    # The fair sign comes from a separate draw.
    out.mul_(torch.randint(0, 2, out.shape, generator=stream, dtype=out.dtype).mul_(2).sub_(1))


_TAIL_NORMAL = 3.5
_TAIL_PROBABILITY = float(torch.special.ndtr(torch.tensor(-_TAIL_NORMAL, dtype=torch.float64)))
_TAIL_EXPONENTIAL = 8.0


def _beyond(values: np.ndarray, limit: float) -> np.ndarray:
    """Indices of values larger than `limit` in magnitude (NumPy searches three times as fast as torch here)."""
    return (np.abs(values) > limit).nonzero()[0]


def _positive_uniform(count: int, stream: torch.Generator) -> np.ndarray:
    """Uniform on multiples of 2^-53 in (0, 1], float64 [count]."""
    return 1.0 - torch.rand(count, generator=stream, dtype=torch.float64).numpy()
