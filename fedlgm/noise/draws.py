"""Noise drawn on the CPU. `fedlgm.aggregation.kernels` draws noise on any device, and
`fedlgm.noise.release` chooses between the two.

`draw` is for small NumPy vectors (applications, closed-form checks) and `add_noise_` for model
updates. Every draw uses a named stream of `fedlgm.noise.keys`; no function reads a global
generator.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Literal

import numpy as np
import numpy.typing as npt

from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.libraries import Tensor, torch

Family = Literal["gaussian", "laplace"]
NoiseBackend = Literal["cpu", "torch", "triton"]
"""Generator of noise: "cpu" is this module, and "torch" (any device) and "triton" (GPUs) are the
kernels.
"""
LEAST_SCALE = 2.0**-100
"""Smallest noise scale above 0; its inverse is the largest scale."""
GRID_BITS = 10
"""Released values are multiples of 2^(floor(log2 scale) - GRID_BITS)."""


def draw(
    family: Family,
    scale: npt.ArrayLike,
    rng: np.random.Generator,
    size: tuple[int, ...] | None = None,
) -> np.ndarray:
    """Independent zero-mean noise in float64.

    Args:
        family: "gaussian" (`scale` is the standard deviation) or "laplace" (`scale` is the
            parameter b, std sqrt(2) b).
        scale: non-negative scales, broadcast to `size`; a zero scale gives exactly zero.
        rng: stream to draw from.
        size: shape of the result; by default the shape of `scale`.

    Returns:
        Array of shape `size`.
    """
    scale = np.asarray(scale, dtype=np.float64)
    shape = scale.shape if size is None else size
    unit = rng.standard_normal(shape) if family == "gaussian" else rng.laplace(size=shape)
    return unit * scale


def add_noise_(
    total: Tensor,
    parts: Sequence[tuple[int, float]],
    streams: Sequence[torch.Generator],
    family: Family = "gaussian",
) -> Tensor:
    """Add independent noise to each part of a flat vector, in place.

    The result is rounded to a grid whose step is a power of two, about 2^-10 of the part's noise
    scale, because the low bits of a floating-point sum could otherwise reveal the summand (see
    docs/decisions/training.md, section Floating point).

    Args:
        total: float32 or float64 vector [sum of sizes] on the CPU, or several vectors [rows, sum of
            sizes]. The result of a vector does not depend on the other vectors.
        parts: pair (size, scale) of each part, in order. The scale is the std (Gaussian) or b
            (Laplace); a scale of 0 adds nothing.
        streams: one generator for each part of each vector, one vector after another.
        family: "gaussian" or "laplace".

    Returns:
        `total`.

    Raises:
        ConfigError: vector, parts and streams do not fit each other.
        PrivacyError: a noise scale is outside [2^-100, 2^100] and not 0.
    """
    rows = total if total.ndim == 2 else total[None]
    count, coordinates = rows.shape
    if coordinates != sum(size for size, _ in parts) or count * len(parts) != len(streams):
        raise ConfigError(
            f"{coordinates} coordinates, {len(parts)} parts and {len(streams)} streams do not fit"
        )
    buffer, start = torch.empty(count, min(_CHUNK, coordinates), dtype=torch.float32), 0
    for place, (size, scale) in enumerate(parts):
        if scale > 0:
            for piece, noise in _draw_pieces(
                rows[:, start : start + size], family, streams[place :: len(parts)], buffer
            ):
                add_scaled_(piece, noise, scale)
        start += size
    return total


def unit_noise(sizes: Sequence[int], streams: Sequence[torch.Generator]) -> Tensor:
    """Independent standard normal noise for each part of a flat vector, not rounded, float64 [sum
    of sizes].

    Args:
        sizes: number of coordinates of each part.
        streams: one generator for each part.
    """
    out = torch.empty(sum(sizes), dtype=torch.float64)
    buffer = torch.empty(1, min(_CHUNK, out.numel()), dtype=torch.float32)
    for part, stream in zip(out.split(list(sizes)), streams, strict=True):
        for piece, noise in _draw_pieces(part[None], "gaussian", [stream], buffer):
            piece.copy_(noise)
    return out


def check_scale(scale: float) -> None:
    """Refuse a noise scale at which noise or its grid would vanish (PrivacyError), as the kernels
    do.
    """
    if scale != 0 and not LEAST_SCALE <= scale <= 1 / LEAST_SCALE:
        raise PrivacyError(f"a noise scale must be 0 or lie in [2^-100, 2^100], got {scale:g}")


def add_scaled_(piece: Tensor, noise: Tensor, scale: float) -> None:
    """Add `scale` times given noise to a vector or to rows, in place, and round to the grid of the
    scale.

    See `add_noise_`. Noise is added row by row, so that a row's result does not depend on other
    rows. PyTorch may round the last numbers of a tensor, which do not fill a register, differently.
    """
    check_scale(scale)
    if scale > 0:
        step = grid_step(scale)
        wide = noise.to(piece)
        for row, row_noise in (
            [(piece, wide)] if piece.ndim == 1 else zip(piece.unbind(), wide.unbind(), strict=True)
        ):
            row.add_(row_noise, alpha=scale)
        piece.mul_(1 / step).round_().mul_(step)


def grid_step(scale: float) -> float:
    """Grid step of released values: the power of two in (scale / 2048, scale / 1024]."""
    return 2.0 ** (math.floor(math.log2(scale)) - GRID_BITS)


_CHUNK = 1 << 18


def _draw_pieces(
    part: Tensor, family: Family, streams: Sequence[torch.Generator], buffer: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the pieces of a part [rows, size], each with its unit noise.

    The pieces are small enough for the cache and large enough that redrawing their tails adds
    little overhead.
    """
    for piece in part.split(_CHUNK, dim=1):
        noise = buffer[:, : piece.shape[1]]
        _fill(noise, family, streams)
        yield piece, noise


def _fill(out: Tensor, family: Family, streams: Sequence[torch.Generator]) -> None:
    """Fill each row with unit noise from its stream, in single precision, and draw the tail again
    in double precision.

    With uniform numbers in single precision, normal numbers end at 5.77 standard deviations and
    exponential numbers at 16.6, and both are coarse shortly before their ends. One client's change
    moves many coordinates, so in a large model the coarse ends alone would exceed a usual delta. A
    value beyond `_TAIL_NORMAL` or `_TAIL_EXPONENTIAL` is therefore replaced by a draw from the
    exact conditional distribution. This concerns about one value in two or three thousand and takes
    hardly any time.
    """
    if family == "gaussian":
        for row, stream in zip(out.unbind(), streams, strict=True):
            row.normal_(generator=stream)
        values = out.numpy()
        at, column = np.divmod(_beyond(values, _TAIL_NORMAL), out.shape[1])
        if len(at):
            counts = np.bincount(at, minlength=len(streams)).tolist()
            drawn = [
                _positive_uniform(count, generator)
                for count, generator in zip(counts, streams, strict=True)
                if count
            ]
            uniform = torch.from_numpy(np.concatenate(drawn) * _tail_probability())
            values[at, column] = np.copysign(
                torch.special.ndtri(uniform).numpy(), values[at, column]
            )
        return
    for row, stream in zip(out.unbind(), streams, strict=True):
        row.exponential_(generator=stream)
        tail = _beyond(row.numpy(), _TAIL_EXPONENTIAL)
        uniform = torch.from_numpy(_positive_uniform(len(tail), stream))
        row[tail] = (_TAIL_EXPONENTIAL - uniform.log()).to(row.dtype)
        # The sign is drawn separately.
        row.mul_(torch.randint(0, 2, row.shape, generator=stream, dtype=row.dtype).mul_(2).sub_(1))


_TAIL_NORMAL = 3.5
_TAIL_EXPONENTIAL = 8.0


@cache
def _tail_probability() -> float:
    return float(torch.special.ndtr(torch.tensor(-_TAIL_NORMAL, dtype=torch.float64)))


def _beyond(values: np.ndarray, limit: float) -> np.ndarray:
    """Flat indices of the values whose magnitude exceeds `limit`. NumPy finds these indices three
    times as fast as torch.
    """
    return np.flatnonzero(np.abs(values) > limit)


def _positive_uniform(count: int, stream: torch.Generator) -> np.ndarray:
    """Uniform draws from the multiples of 2^-53 in (0, 1], float64 [count]."""
    return 1.0 - torch.rand(count, generator=stream, dtype=torch.float64).numpy()
