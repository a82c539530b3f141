"""Three Triton kernels, which compute the moments of each tile, the clip factors of each layer, and
the scaled sum with noise.

Every program handles one tile of elements within one layer. It reads the tile's limits from a table
in device memory, so one launch covers all layers. Rows of a block begin at multiples of 16 elements
(other blocks are copied first). The width of a program's reads, and therefore the order in which it
adds up a norm, is then the same for one client and for many. Full tiles are read without a mask and
with wide accesses. Contraction to fused multiply-adds is off, so no bit of the sum or of the noise
depends on the launch configuration.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs
# Triton gives the parameters of a kernel their types at launch.

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fedlgm.aggregation.kernels.layout import Layout, align_rows
from fedlgm.aggregation.kernels.spec import Noise
from fedlgm.aggregation.kernels.triton_noise import noise_tile, snap
from fedlgm.planning.layers import SAFETY

MOMENT_TILE = 8192
SUM_TILE = 2048
_MOMENT_WARPS = 8
_SUM_WARPS = 4
_CHUNK = 1024  # tile moments added by one step of the second reduction
_SAFETY = tl.constexpr(SAFETY)
_LEAST_FACTOR = tl.constexpr(1.1754943508222875e-38)  # as in `torch_kernels`


@triton.jit
def _load(pointer, index, length, FULL: tl.constexpr):
    if FULL:
        return tl.load(pointer + index).to(tl.float32)
    else:
        return tl.load(pointer + index, mask=index < length, other=0.0).to(tl.float32)


@triton.jit
def _moment_tile(pointer, length, TILE: tl.constexpr, POWER: tl.constexpr, FULL: tl.constexpr):
    values = _load(pointer, tl.arange(0, TILE), length, FULL)
    terms = values * values if POWER == 2 else tl.abs(values)
    return tl.sum(terms), tl.sum(tl.where(terms < float("inf"), 0, 1))


@triton.jit(do_not_specialize=["tiles", "row"])
def _moment_kernel(
    updates,
    table,
    partials,
    nonfinite,
    tiles,
    row,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
    POWER: tl.constexpr,
):
    program = tl.program_id(0)
    client = program // tiles
    entry = table + 4 * (program % tiles)
    length = tl.load(entry + 2)
    pointer = updates + tl.multiple_of(client.to(tl.int64) * row + tl.load(entry + 3), ALIGN)
    if length == TILE:
        moment, overflows = _moment_tile(pointer, length, TILE, POWER, True)
    else:
        moment, overflows = _moment_tile(pointer, length, TILE, POWER, False)
    tl.store(partials + program, moment)
    tl.atomic_add(nonfinite + client, overflows.to(tl.int64), mask=overflows > 0)


@triton.jit(do_not_specialize=["tiles", "layers"])
def _factor_kernel(
    partials,
    first,
    nonfinite,
    clip,
    moments,
    factors,
    tiles,
    layers,
    CHUNK: tl.constexpr,
    POWER: tl.constexpr,
):
    program = tl.program_id(0)
    client = program // layers
    layer = program % layers
    stop = tl.load(first + layer + 1)
    sums = tl.zeros((CHUNK,), tl.float32)
    for low in range(tl.load(first + layer), stop, CHUNK):
        index = low + tl.arange(0, CHUNK)
        sums += tl.load(
            partials + client.to(tl.int64) * tiles + index, mask=index < stop, other=0.0
        )
    moment = tl.sum(sums)
    tl.store(moments + program, moment)
    norm = tl.sqrt_rn(moment) if POWER == 2 else moment
    limit = tl.load(clip + layer) * _SAFETY
    # The floor of the divisor only avoids a division by zero in the branch that is not taken.
    factor = tl.where(norm > limit, tl.div_rn(limit, tl.maximum(norm, _LEAST_FACTOR)), 1.0)
    factor = tl.where((limit > 0) & (factor >= _LEAST_FACTOR), factor, 0.0)
    accepted = (norm < float("inf")) & (tl.load(nonfinite + client) == 0)
    tl.store(factors + program, tl.where(accepted, factor, 0.0))


@triton.jit
def _sum_tile(
    updates,
    factors,
    out,
    clients,
    layers,
    row,
    stream,
    key0,
    key1,
    layer,
    start,
    length,
    position,
    scale,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
    NOISE: tl.constexpr,
    LAPLACE: tl.constexpr,
    GRID: tl.constexpr,
    FULL: tl.constexpr,
):
    index = tl.arange(0, TILE)
    group = (start // 4).to(tl.uint32) + tl.arange(0, TILE // 4).to(tl.uint32)
    if FULL:
        total = tl.load(out + position + index)
    else:
        total = tl.load(out + position + index, mask=index < length, other=0.0)
    if updates is not None:
        for client in range(clients):
            factor = tl.load(factors + client * layers + layer)
            pointer = updates + tl.multiple_of(position + client * row.to(tl.int64), ALIGN)
            # With a factor of 0 nothing is read, so NaN and Inf cannot enter the sum.
            readable = tl.where(factor != 0, length, 0)
            if FULL:
                values = tl.load(
                    pointer + index, mask=tl.zeros((TILE,), tl.int64) < readable, other=0.0
                )
            else:
                values = tl.load(pointer + index, mask=index < readable, other=0.0)
            total += values.to(tl.float32) * factor
    if NOISE:
        total += noise_tile(group, layer, stream, key0, key1, scale, LAPLACE, TILE)
        if GRID:
            total = snap(total, scale)
    if FULL:
        tl.store(out + position + index, total)
    else:
        tl.store(out + position + index, total, mask=index < length)


@triton.jit(do_not_specialize=["clients", "layers", "row", "stream", "key0", "key1"])
def _sum_kernel(
    updates,
    factors,
    out,
    table,
    scales,
    clients,
    layers,
    row,
    stream,
    key0,
    key1,
    TILE: tl.constexpr,
    ALIGN: tl.constexpr,
    NOISE: tl.constexpr,
    LAPLACE: tl.constexpr,
    GRID: tl.constexpr,
):
    entry = table + 4 * tl.program_id(0)
    layer = tl.load(entry).to(tl.uint32)
    start = tl.load(entry + 1)
    length = tl.load(entry + 2)
    position = tl.multiple_of(tl.load(entry + 3), ALIGN)
    stream = stream.to(tl.uint32, bitcast=True)
    key0 = key0.to(tl.uint32, bitcast=True)
    key1 = key1.to(tl.uint32, bitcast=True)
    scale = 0.0
    if NOISE:
        scale = tl.load(scales + layer)
    if length == TILE:
        _sum_tile(
            updates,
            factors,
            out,
            clients,
            layers,
            row,
            stream,
            key0,
            key1,
            layer,
            start,
            length,
            position,
            scale,
            TILE,
            ALIGN,
            NOISE,
            LAPLACE,
            GRID,
            True,
        )
    else:
        _sum_tile(
            updates,
            factors,
            out,
            clients,
            layers,
            row,
            stream,
            key0,
            key1,
            layer,
            start,
            length,
            position,
            scale,
            TILE,
            ALIGN,
            NOISE,
            LAPLACE,
            GRID,
            False,
        )


def layer_moments(
    updates: Tensor, layout: Layout, power: int, clip: Tensor, tile: int = MOMENT_TILE
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute layer moments, overflow counts and clip factors; see `torch_kernels.layer_moments`.

    Args:
        updates: [B, D] float32 or bfloat16, unit stride along D.
        layout: layer boundaries.
        power: 2 or 1.
        clip: [K] float32.
        tile: elements of one program, a multiple of 16; the last bits of the moments depend on it.
    """
    clients, device = updates.shape[0], updates.device
    tiles = layout.tiles(tile, device)
    moments = torch.empty(clients, layout.layers, dtype=torch.float32, device=device)
    factors = torch.empty_like(moments)
    nonfinite = torch.zeros(clients, dtype=torch.int64, device=device)
    if clients:
        updates = align_rows(updates)
        partials = torch.empty(clients, tiles.count, dtype=torch.float32, device=device)
        row = updates.stride(0)
        with _on(device):
            _moment_kernel[(tiles.count * clients,)](
                updates,
                tiles.table,
                partials,
                nonfinite,
                tiles.count,
                row,
                TILE=tile,
                ALIGN=tiles.alignment,
                POWER=power,
                num_warps=_MOMENT_WARPS,
                enable_fp_fusion=False,
            )
            _factor_kernel[(layout.layers * clients,)](
                partials,
                tiles.first,
                nonfinite,
                clip,
                moments,
                factors,
                tiles.count,
                layout.layers,
                CHUNK=_CHUNK,
                POWER=power,
                enable_fp_fusion=False,
            )
    return moments, nonfinite, factors


def accumulate(
    out: Tensor,
    layout: Layout,
    updates: Tensor | None = None,
    factors: Tensor | None = None,
    noise: Noise | None = None,
    tile: int = SUM_TILE,
    warps: int = _SUM_WARPS,
) -> None:
    """Add sum_b factors[b, layer] * updates[b] and noise to `out`; see `torch_kernels.accumulate`.

    Args:
        out: [D] float32 or float64, changed in place.
        layout: layer boundaries.
        updates: [B, D] float32 or bfloat16, unit stride along D, or None for no clients.
        factors: [B, K] float32.
        noise: noise of one party, or None.
        tile: elements of one program, a multiple of 16; no bit of the result depends on it.
        warps: warps of one program; no bit of the result depends on it.
    """
    tiles = layout.tiles(tile, out.device)
    clients, row = 0, 0
    if updates is not None:
        updates = align_rows(updates)
        clients, row = updates.shape[0], updates.stride(0)
    scale, stream, key = (
        (None, 0, (0, 0)) if noise is None else (noise.scale, noise.stream, noise.key)
    )
    with _on(out.device):
        _sum_kernel[(tiles.count,)](
            updates,
            factors,
            out,
            tiles.table,
            scale,
            clients,
            layout.layers,
            row,
            _as_signed(stream),
            _as_signed(key[0]),
            _as_signed(key[1]),
            TILE=tile,
            # One Philox call serves four elements. Wider accesses would separate elements from
            # their noise.
            ALIGN=min(4, tiles.alignment),
            NOISE=noise is not None,
            LAPLACE=noise is not None and noise.family == "laplace",
            GRID=noise is not None and noise.grid,
            num_warps=warps,
            enable_fp_fusion=False,
        )


def _as_signed(word: int) -> int:
    """Convert a 32-bit word to a signed number, so that the type that Triton gives the argument
    never depends on its value.
    """
    return word - (1 << 32) if word >> 31 else word


def _on(device: torch.device) -> AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
