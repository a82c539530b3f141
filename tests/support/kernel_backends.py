"""Shared by the tests of the kernels: backends that can run here, layouts, blocks of clients.

Triton runs compiled where there is a GPU, and otherwise in its interpreter. The interpreter must be
chosen before Triton is first imported, so `test_kernel_triton.py` runs these tests again in a
process of its own."""

from __future__ import annotations

import importlib.util
import os

import numpy as np
import pytest
import torch

from fedlgm.aggregation.kernels import (
    SERVER_STREAM,
    ClipFactors,
    add_noise_,
    clip_factors,
    clip_scale_sum,
)

torch.set_num_threads(1)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TRITON = importlib.util.find_spec("triton") is not None
GPU = torch.cuda.is_available() and not INTERPRETED
if INTERPRETED:
    BACKENDS = ["triton"]
elif GPU and TRITON:
    BACKENDS = ["torch", pytest.param("triton", marks=pytest.mark.gpu)]
else:
    BACKENDS = ["torch"]

KEY = (0x12345678, 0xFEDCBA98)
SIZES = {
    "odd": [7, 1, 1030, 3, 517, 2048, 1, 61],
    "one layer": [3001],
    "one element": [1],
    "aligned": [64, 2048, 4096, 16],
    "many": [1, 2, 3, 5] * 8,
}


def on(tensor: torch.Tensor, backend: str) -> torch.Tensor:
    return tensor.cuda() if backend == "triton" and GPU else tensor


def offsets_of(sizes) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(sizes)])


def block(clients: int, size: int, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(clients, size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def per_layer(values: torch.Tensor, sizes) -> list[np.ndarray]:
    return [part.double().cpu().numpy() for part in values.split(list(sizes), dim=-1)]


def noise(
    backend, sizes, scale, family="gaussian", key=KEY, stream=SERVER_STREAM, grid=False
) -> torch.Tensor:
    vector = on(torch.zeros(sum(sizes)), backend)
    scale = on(torch.as_tensor(scale, dtype=torch.float32).expand(len(sizes)).contiguous(), backend)
    return add_noise_(
        vector, offsets_of(sizes), scale, family, key, stream, grid=grid, backend=backend
    ).cpu()


def bounded_sum(
    updates, offsets, clip, scale=None, *, family="gaussian", backend=None, out=None
) -> tuple[torch.Tensor, ClipFactors]:
    """What a round does with a block: bound every layer, add up, add noise."""
    bounds = clip_factors(updates, offsets, clip, family, backend=backend)
    total = torch.zeros(updates.shape[1], device=updates.device) if out is None else out
    clip_scale_sum(updates, offsets, bounds.factors, total, backend=backend)
    if scale is not None:
        add_noise_(total, offsets, scale, family, KEY, backend=backend)
    return total, bounds
