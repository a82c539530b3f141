"""Conversion of Philox words to Gaussian or Laplace values in registers, as
`fedlgm.aggregation.kernels.philox` defines it.

Logarithm, sine and cosine are minimax polynomials with explicit fused multiply-adds. Each
polynomial takes about fifteen instructions and is the same on every GPU. The functions of the
device library take thirty instructions, and they branch. Relative errors of the polynomials stay
below 4e-7.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs
# Triton gives the parameters of a kernel their types at launch.

from __future__ import annotations

import triton
import triton.language as tl

from fedlgm.aggregation.kernels.philox import TAIL
from fedlgm.noise.draws import GRID_BITS

_TAIL = tl.constexpr(TAIL)
_STEPS = tl.constexpr((23 - GRID_BITS) << 23)  # added to an exponent: 2^23 steps of the grid


@triton.jit
def _philox(group, layer, stream, depth: tl.constexpr, key0, key1):
    """Compute four words for each counter (group, layer, stream, depth). Counter words that are the
    same for the whole tile stay scalars for as long as possible.
    """
    c0, c1, c2 = group, layer, stream
    c3 = layer * 0 + depth
    for _ in tl.static_range(10):
        # 64-bit products compile to one wide multiplication that gives both halves.
        p0 = c0.to(tl.uint64) * 0xD2511F53
        p1 = c2.to(tl.uint64) * 0xCD9E8D57
        c0 = (p1 >> 32).to(tl.uint32) ^ c1 ^ key0
        c1 = p1.to(tl.uint32)
        c2 = (p0 >> 32).to(tl.uint32) ^ c3 ^ key1
        c3 = p0.to(tl.uint32)
        key0 = key0 + 0x9E3779B9
        key1 = key1 + 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _horner(acc, x, coefficient: tl.constexpr):
    return tl.fma(acc, x, tl.full(x.shape, coefficient, tl.float32))


@triton.jit
def _uniform(word):
    # 2^-32, 1 - 2^-24
    return tl.minimum((word | 1).to(tl.float32) * 2.3283064365386963e-10, 0.99999994)


@triton.jit
def _extend(u, word, more):
    """Extend the uniform u of `word` by the bits of `more` if `word` is in the tail."""
    fine = (word & 0xFFFFFFFE).to(tl.float32) + (
        more.to(tl.float32) + 0.5
    ) * 4.656612873077393e-10  # 2^-31
    return tl.where(word < _TAIL, fine * 2.3283064365386963e-10, u)


@triton.jit
def _minus_two_log(u):
    """Compute -2 ln u. With u = m 2^e and m in [sqrt(1/2), sqrt(2)), it is -2 e ln 2 + t P(t),
    where t = m - 1.
    """
    bits = u.to(tl.int32, bitcast=True)
    shifted = bits - 0x3F3504F3  # bits of sqrt(1/2)
    exponent = (shifted >> 23).to(tl.float32)
    t = (bits - (shifted & -0x800000)).to(tl.float32, bitcast=True) - 1.0
    p = tl.full(t.shape, 0.20213790237903595, tl.float32)
    p = _horner(p, t, -0.32445159554481506)
    p = _horner(p, t, 0.34501659870147705)
    p = _horner(p, t, -0.39800330996513367)
    p = _horner(p, t, 0.4993981719017029)
    p = _horner(p, t, -0.6667011976242065)
    p = _horner(p, t, 1.0000072717666626)
    p = _horner(p, t, -1.9999998807907104)
    return tl.fma(exponent, tl.full(t.shape, -1.3862943611198906, tl.float32), p * t)


@triton.jit
def _flip(value, sign):
    """Flip the sign of a value where the top bit of `sign` is set."""
    return (value.to(tl.uint32, bitcast=True) ^ (sign & 0x80000000)).to(tl.float32, bitcast=True)


@triton.jit
def _gaussian_pair(u, y, scale):
    radius = _flip(tl.sqrt(_minus_two_log(u)) * scale, y)
    v = ((y << 2) | 2).to(tl.int32, bitcast=True).to(tl.float32) * 4.656612873077393e-10  # 2^-31
    q = v * v
    sine = tl.full(v.shape, -3.59504520019982e-05, tl.float32)
    sine = _horner(sine, q, 0.00249000103212893)
    sine = _horner(sine, q, -0.08074543625116348)
    sine = _horner(sine, q, 0.7853981852531433) * v
    cosine = tl.full(v.shape, -0.00031916017178446054, tl.float32)
    cosine = _horner(cosine, q, 0.01585039682686329)
    cosine = _horner(cosine, q, -0.3084245026111603)
    cosine = _horner(cosine, q, 1.0)
    swap = (y & 0x40000000) != 0
    return radius * tl.where(swap, sine, cosine), radius * tl.where(swap, cosine, sine)


@triton.jit
def _laplace(u, x, scale):
    return _flip(_minus_two_log(u) * (0.5 * scale), x << 31)


@triton.jit
def noise_tile(group, layer, stream, key0, key1, scale, LAPLACE: tl.constexpr, TILE: tl.constexpr):
    """Draw the noise of one tile.

    Args:
        group: element // 4 of the tile's groups of four, [TILE // 4] uint32.
        layer: number of the layer, uint32.
        stream: number of the party that adds the noise, uint32.
        key0: first word of the Philox key, uint32.
        key1: second word of the Philox key, uint32.
        scale: std (Gaussian) or b (Laplace) of the noise, float32.
        LAPLACE: whether the noise is Laplace; otherwise it is Gaussian.
        TILE: number of elements of the tile.

    Returns:
        [TILE] float32; the four values of a group lie side by side, so they stay in the thread that
        drew them.
    """
    w0, w1, w2, w3 = _philox(group, layer, stream, 0, key0, key1)
    u0, u2 = _uniform(w0), _uniform(w2)
    lowest = tl.minimum(w0, w2)
    if LAPLACE:
        u1, u3 = _uniform(w1), _uniform(w3)
        lowest = tl.minimum(lowest, tl.minimum(w1, w3))
    if tl.min(lowest) < _TAIL:  # rare: one tile of 2048 elements in 64 (Gaussian) or 32 (Laplace)
        m0, m1, m2, m3 = _philox(group, layer, stream, 1, key0, key1)
        u0, u2 = _extend(u0, w0, m0), _extend(u2, w2, m2)
        if LAPLACE:
            u1, u3 = _extend(u1, w1, m1), _extend(u3, w3, m3)
    if LAPLACE:
        z0, z1 = _laplace(u0, w0, scale), _laplace(u1, w1, scale)
        z2, z3 = _laplace(u2, w2, scale), _laplace(u3, w3, scale)
    else:
        z0, z1 = _gaussian_pair(u0, w1, scale)
        z2, z3 = _gaussian_pair(u2, w3, scale)
    return tl.reshape(tl.join(tl.join(z0, z2), tl.join(z1, z3)), (TILE,))


@triton.jit
def snap(values, scale):
    """Round values to multiples of 2^(floor(log2 scale) - 10), ties to even; values with scale 0 do
    not change.
    """
    exponent = scale.to(tl.int32, bitcast=True) & 0x7F800000
    limit = tl.where(scale > 0, (exponent + _STEPS).to(tl.float32, bitcast=True), 0.0)
    if values.dtype == tl.float64:
        limit = limit.to(tl.float64) * 536870912.0  # 2^29
    magnitude = tl.abs(values)
    # Adding 2^23 steps (float64: 2^52) rounds to a multiple of the step; larger values are already
    # multiples.
    rounded = (magnitude + limit) - limit
    return tl.where(magnitude < limit, tl.where(values < 0, -rounded, rounded), values)
