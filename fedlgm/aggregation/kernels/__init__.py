"""Kernels for blocks of updates (norms, clip factors, scaled sum) and for noise, in Triton on GPUs
and in torch elsewhere.

`backend_for(tensor)` picks the backend. This package can be imported without Triton and without a
GPU.
"""

from __future__ import annotations

from fedlgm.aggregation.kernels.layout import empty_block
from fedlgm.aggregation.kernels.ops import (
    Backend,
    ClipFactors,
    add_noise_,
    backend_for,
    clip_factors,
    clip_scale_sum,
    has_triton,
    triton_interprets,
)
from fedlgm.aggregation.kernels.philox import SERVER_STREAM, noise_key, philox4x32
from fedlgm.aggregation.kernels.spec import widest

__all__ = [
    "SERVER_STREAM",
    "Backend",
    "ClipFactors",
    "add_noise_",
    "backend_for",
    "clip_factors",
    "clip_scale_sum",
    "empty_block",
    "has_triton",
    "noise_key",
    "philox4x32",
    "triton_interprets",
    "widest",
]
