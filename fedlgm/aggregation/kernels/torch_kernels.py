"""The kernels in plain torch, for CPUs and for accelerators without Triton.

The operations are the same as in the Triton kernels, in the same order. Sums without noise and
Philox words agree bit for bit; noise agrees up to float32 rounding.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from fedlgm.aggregation.kernels.layout import Layout, Segment
from fedlgm.aggregation.kernels.philox import TAIL, UNIFORM_MAX, UNIFORM_STEP, philox4x32
from fedlgm.aggregation.kernels.spec import Noise, widest
from fedlgm.noise.draws import GRID_BITS, Family
from fedlgm.planning.layers import SAFETY

_LEAST_FACTOR = torch.finfo(torch.float32).tiny
"""Smallest factor above 0. Smaller numbers are subnormal, and are rounded so coarsely that a layer
could exceed its bound.
"""


def _chunk(device: torch.device) -> int:
    """Return the number of elements that are handled at once: few enough for a CPU's cache, or
    enough to keep an accelerator busy.
    """
    return 1 << (16 if device.type == "cpu" else 22)


def layer_moments(
    updates: Tensor, layout: Layout, power: int, clip: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the sums of |u|^power over each client's layers, and the factors that bound the
    layers.

    Args:
        updates: [B, D] float32 or bfloat16.
        layout: layer boundaries.
        power: 2 (squared l2 norms) or 1 (l1 norms).
        clip: bound of each layer's norm, [K] float32.

    Returns:
        Moments [B, K] float32; number of each client's elements whose |u|^power is NaN or
        overflows, [B] int64; factors min(1, bound / norm) [B, K] float32 (0 for a client with an
        overflow).
    """
    clients, device = updates.shape[0], updates.device
    wide = widest(device)  # so that the order of the sum hardly matters
    sums = torch.zeros(clients, layout.layers, dtype=wide, device=device)
    nonfinite = torch.zeros(clients, dtype=torch.int64, device=device)
    # Small layers are also handled one by one, because adding by index has no fixed order on a GPU.
    chunk = _chunk(device)
    for layer, (begin, end) in enumerate(pairwise(layout.offsets.tolist())):
        for start in range(begin, end, chunk):
            piece = updates[:, start : min(start + chunk, end)].float()
            terms = piece.square() if power == 2 else piece.abs()
            nonfinite += (~(terms < math.inf)).sum(dim=1)
            sums[:, layer] += terms.sum(dim=1, dtype=wide)
    moments = sums.float()
    return moments, nonfinite, _factors(moments, nonfinite, clip, power)


def _factors(moments: Tensor, nonfinite: Tensor, clip: Tensor, power: int) -> Tensor:
    norms = moments.sqrt() if power == 2 else moments
    limit = clip * SAFETY
    # The floor of the divisor only avoids a division by zero in the branch that is not taken.
    factors = torch.where(norms > limit, limit / norms.clamp(min=_LEAST_FACTOR), limit.sign())
    counted = (nonfinite[:, None] == 0) & (norms < math.inf) & (factors >= _LEAST_FACTOR)
    return torch.where(counted, factors, 0.0)


def accumulate(
    out: Tensor,
    layout: Layout,
    updates: Tensor | None = None,
    factors: Tensor | None = None,
    noise: Noise | None = None,
    chunk: int | None = None,
) -> None:
    """Add sum_b factors[b, layer] * updates[b] and noise to `out`, in client order; the terms are
    float32.

    Args:
        out: [D] float32 or float64, changed in place.
        layout: layer boundaries.
        updates: [B, D] float32 or bfloat16, or None for no clients.
        factors: [B, K] float32.
        noise: noise of one party, or None.
        chunk: number of elements that are handled at once, a multiple of 4, at least 2048; by
            default chosen for the device. It affects no bit of the result.
    """
    for segment in layout.segments(chunk or _chunk(out.device), out.device):
        target = out[segment.start : segment.stop]
        if updates is not None and factors is not None:
            for client in range(updates.shape[0]):
                factor = factors[client, segment.layer]
                term = updates[client, segment.start : segment.stop].float() * factor
                target += torch.where(factor != 0, term, 0.0)
        if noise is not None:
            scale = noise.scale[segment.layer]
            target += unit_noise(
                segment, noise.family, noise.key, noise.stream, target.device
            ).mul_(scale)
            if noise.grid:
                snap_(target, scale)


def unit_noise(
    segment: Segment,
    family: Family,
    key: tuple[int, int],
    stream: int | Tensor,
    device: torch.device,
) -> Tensor:
    """Draw noise of scale 1 for a segment's elements, [stop - start] float32 (see `philox`)."""
    length = segment.stop - segment.start
    group = segment.group
    if isinstance(group, int):
        group = torch.arange(group, group + -(-length // 4), device=device)
    counter = (group, segment.group_layer, stream)
    words = philox4x32((*counter, 0), key)
    values = torch.empty(len(group), 4, dtype=torch.float32, device=device)
    if family == "gaussian":
        u0, u2 = _uniforms(words, (0, 2), counter, key)
        values[:, 0], values[:, 1] = gaussian_pair(u0, words[1])
        values[:, 2], values[:, 3] = gaussian_pair(u2, words[3])
    else:
        for i, u in enumerate(_uniforms(words, (0, 1, 2, 3), counter, key)):
            values[:, i] = laplace(u, words[i])
    flat = values.view(-1)
    return flat[:length] if segment.pick is None else flat[segment.pick]


def _uniforms(
    words: tuple[Tensor, ...],
    picked: tuple[int, ...],
    counter: tuple[Tensor, int | Tensor, int | Tensor],
    key: tuple[int, int],
) -> list[Tensor]:
    """Convert the picked words to uniforms, with extra bits in the tail."""
    if words[0].device.type != "cpu":
        # Selecting only the few words in the tail would make the host wait until the device has
        # counted them.
        more = philox4x32((*counter, 1), key)
        return [
            torch.where(words[i] < TAIL, tail_uniform(words[i], more[i]), uniform(words[i]))
            for i in picked
        ]
    uniforms = []
    for i in picked:
        u = uniform(words[i])
        tail = torch.from_numpy(np.flatnonzero(words[i].numpy() < TAIL))
        if len(tail):
            group, layer, stream = counter
            layer = layer if isinstance(layer, int) else layer[tail]
            u[tail] = tail_uniform(
                words[i][tail], philox4x32((group[tail], layer, stream, 1), key)[i]
            )
        uniforms.append(u)
    return uniforms


def uniform(word: Tensor) -> Tensor:
    """Convert 32-bit words to uniforms in (0, 1), float32."""
    return (word | 1).float().mul_(UNIFORM_STEP).clamp_(max=UNIFORM_MAX)


def tail_uniform(word: Tensor, more: Tensor) -> Tensor:
    """Convert words below `TAIL`, with 32 more bits each, to uniforms in (0, 2^-16), float32."""
    fine = more.float().add_(0.5).mul_(2 * UNIFORM_STEP)
    return fine.add_((word & ~1).float()).mul_(UNIFORM_STEP)


def gaussian_pair(u: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Compute two standard normal vectors from a vector of uniforms and a vector of 32-bit words,
    float32.
    """
    bits = y.to(torch.int32)  # wraps: the same 32 bits, signed
    radius = u.log().mul_(-2.0).sqrt_()
    radius.view(torch.int32).bitwise_xor_(bits & -(1 << 31))
    angle = (bits << 2).bitwise_or_(2).float().mul_(math.pi / 4 * 2.0**-31)
    cosine, sine = angle.cos().mul_(radius), angle.sin().mul_(radius)
    swap = (bits & (1 << 30)) != 0
    return torch.where(swap, sine, cosine), torch.where(swap, cosine, sine)


def laplace(u: Tensor, x: Tensor) -> Tensor:
    """Compute Laplace values of scale 1 from uniforms and from words whose bit 0 is the sign,
    float32.
    """
    magnitude = u.log()
    return torch.where((x & 1) != 0, magnitude, -magnitude)


def snap_(values: Tensor, scale: Tensor) -> None:
    """Round values in place to multiples of 2^(floor(log2 scale) - GRID_BITS), ties to even; values
    with scale 0 do not change.

    Adding and subtracting 2^23 steps (2^52 steps in float64) rounds a value to a multiple of the
    step. Larger values are already multiples.
    """
    limit = ((scale.view(torch.int32) & 0x7F800000) + ((23 - GRID_BITS) << 23)).view(torch.float32)
    limit = torch.where(scale > 0, limit, 0.0).to(values.dtype)
    if values.dtype == torch.float64:
        limit = limit * 2.0**29
    magnitude = values.abs()
    rounded = ((magnitude + limit) - limit).copysign_(values)
    values.copy_(torch.where(magnitude < limit, rounded, values))
