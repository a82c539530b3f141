"""Public functions on blocks of updates and on sums. Each function checks its arguments and runs on
the backend that fits the tensors.

No function waits for the device: the functions check shapes, types and the layer boundaries, which
are on the host, but not values on the device. Only the first call with given `offsets` and device
copies a small table to the device.
"""

from __future__ import annotations

import importlib.util
import os
from functools import lru_cache
from typing import Literal, NamedTuple, Protocol, cast, get_args

import torch
from torch import Tensor

from fedlgm.aggregation.kernels import torch_kernels
from fedlgm.aggregation.kernels.layout import Layout, layout_of
from fedlgm.aggregation.kernels.philox import SERVER_STREAM
from fedlgm.aggregation.kernels.spec import Noise
from fedlgm.checks import check_known
from fedlgm.errors import ConfigError
from fedlgm.noise.draws import Family

Backend = Literal["triton", "torch"]

_WORD = 2**32
_FLOAT32 = (torch.float32,)
_TOTALS = (torch.float32, torch.float64)


class _Kernels(Protocol):
    def layer_moments(
        self, updates: Tensor, layout: Layout, power: int, clip: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]: ...

    def accumulate(
        self,
        out: Tensor,
        layout: Layout,
        updates: Tensor | None = None,
        factors: Tensor | None = None,
        noise: Noise | None = None,
    ) -> None: ...


class ClipFactors(NamedTuple):
    """Result of `clip_factors`.

    Attributes:
        moments: sum of |u|^p over each layer (p = 2 for Gaussian, 1 for Laplace noise), [B, K]
            float32; not protected by noise.
        factors: factor by which each layer must be multiplied, [B, K] float32; 0 for a client with
            NaN or Inf; not protected by noise.
        nonfinite: number of each client's elements that count as not finite, [B] int64; not
            protected by noise.
    """

    moments: Tensor
    factors: Tensor
    nonfinite: Tensor


def backend_for(tensor: Tensor) -> Backend:
    """Return the backend for a tensor: "triton" on a CUDA or ROCm device if Triton is installed,
    and "torch" otherwise.
    """
    return "triton" if tensor.is_cuda and has_triton() else "torch"


def clip_factors(
    updates: Tensor,
    offsets: Tensor,
    clip: Tensor,
    family: Family = "gaussian",
    *,
    backend: Backend | None = None,
) -> ClipFactors:
    """Compute the factors min(1, bound / norm) that bound every client's layers, for
    `clip_scale_sum`.

    A layer's norm is l2 for Gaussian and l1 for Laplace noise. Bounds are reduced by the factor 1 -
    2^-16, so that no norm exceeds its bound because of float32 rounding. Adding or removing one
    client then changes layer k of the sum by at most clip[k], up to the rounding of the sum itself.
    In a float64 sum this rounding is smaller than the reduction of the bounds.

    Args:
        updates: [B, D] float32 or bfloat16; the elements of a row must be contiguous.
        offsets: layer boundaries [K + 1] int64 on the CPU.
        clip: bound of each layer's norm, [K] float32, non-negative; `inf` bounds nothing.
        family: "gaussian" to bound l2 norms, "laplace" to bound l1 norms.
        backend: overrides `backend_for(updates)`.

    Raises:
        ConfigError: tensors have another shape, type or device, or the family is unknown.
    """
    layout = _check_updates(updates, offsets)
    _check("clip", clip, (layout.layers,), _FLOAT32, updates)
    check_known("noise family", family, Family)
    power = 2 if family == "gaussian" else 1
    moments, nonfinite, factors = _kernels(backend, updates).layer_moments(
        updates, layout, power, clip
    )
    return ClipFactors(moments, factors, nonfinite)


def clip_scale_sum(
    updates: Tensor,
    offsets: Tensor,
    factors: Tensor,
    out: Tensor,
    *,
    backend: Backend | None = None,
) -> None:
    """Add sum_b factors[b, layer] * updates[b] to `out`, in client order.

    Products are float32; the sum has the type of `out`. In float64, the rounding of the sum does
    not affect the sensitivity. The result has the same bits on every backend. A factor of 0 gives
    exactly 0, even for NaN and Inf.

    Args:
        updates: [B, D] float32 or bfloat16; elements of a row side by side.
        offsets: layer boundaries [K + 1] int64 on the CPU.
        factors: [B, K] float32.
        out: [D] float32 or float64, changed in place.
        backend: overrides `backend_for(updates)`.

    Raises:
        ConfigError: tensors have another shape, type or device.
    """
    layout = _check_updates(updates, offsets)
    _check("factors", factors, (updates.shape[0], layout.layers), _FLOAT32, updates)
    _check("out", out, (layout.size,), _TOTALS, updates)
    _kernels(backend, out).accumulate(out, layout, updates, factors)


def add_noise_(
    vector: Tensor,
    offsets: Tensor,
    scale: Tensor,
    family: Family,
    key: tuple[int, int],
    stream: int = SERVER_STREAM,
    *,
    grid: bool = True,
    backend: Backend | None = None,
) -> Tensor:
    """Add independent noise to every layer of a flat vector, in place.

    Args:
        vector: [D] float32 or float64.
        offsets: layer boundaries [K + 1] int64 on the CPU.
        scale: std (Gaussian) or b (Laplace) of each layer's noise, [K] float32, 0 (adds nothing) or
            in [2^-100, 2^100].
        family: "gaussian" or "laplace".
        key: Philox key, from `noise_key`; one key serves one round. A CUDA graph that captured this
            call would replay the same noise.
        stream: number of the party that adds the noise, in [0, 2**32). Two calls with equal key and
            stream add equal noise.
        grid: whether to round the result to multiples of 2^(floor(log2 scale) - 10), against
            attacks on its low bits.
        backend: overrides `backend_for(vector)`.

    Returns:
        `vector`.

    Raises:
        ConfigError: tensors have another shape, type or device, the family is unknown, or a word of
            the key or the stream is outside [0, 2**32).
    """
    layout = layout_of(offsets)
    _check("vector", vector, (layout.size,), _TOTALS, vector)
    _check("scale", scale, (layout.layers,), _FLOAT32, vector)
    check_known("noise family", family, Family)
    if len(key) != 2 or any(not 0 <= word < _WORD for word in (*key, stream)):
        raise ConfigError("key must be two words in [0, 2**32) and stream a word in [0, 2**32)")
    _kernels(backend, vector).accumulate(
        vector, layout, noise=Noise(scale, family, key, grid, stream)
    )
    return vector


@lru_cache(maxsize=1)
def has_triton() -> bool:
    """Whether the package triton is installed."""
    return importlib.util.find_spec("triton") is not None


def triton_interprets() -> bool:
    """Whether Triton runs in its interpreter on the CPU, which is some 10,000 times slower and
    serves only tests.
    """
    return os.environ.get("TRITON_INTERPRET") == "1"


def _kernels(backend: Backend | None, tensor: Tensor) -> _Kernels:
    name = backend or backend_for(tensor)
    if name == "torch":
        return torch_kernels
    if name != "triton":
        raise ConfigError(f"unknown backend {name!r}; known: {', '.join(get_args(Backend))}")
    if not has_triton():
        raise ConfigError("backend 'triton' needs the package triton; use backend 'torch'")
    if tensor.device.type == "cpu" and not triton_interprets():
        raise ConfigError(
            "backend 'triton' needs tensors on a GPU (or TRITON_INTERPRET=1); use backend 'torch'"
        )
    return cast(_Kernels, importlib.import_module("fedlgm.aggregation.kernels.triton_kernels"))


def _check_updates(updates: Tensor, offsets: Tensor) -> Layout:
    layout = layout_of(offsets)
    if (
        updates.ndim != 2
        or updates.shape[1] != layout.size
        or updates.dtype not in (torch.float32, torch.bfloat16)
    ):
        raise ConfigError(
            f"updates must be float32 or bfloat16 [clients, {layout.size}], got {updates.dtype} "
            f"{tuple(updates.shape)}"
        )
    if layout.size > 1 and updates.stride(1) != 1:
        raise ConfigError(
            "the elements of each row of updates must lie side by side: call .contiguous()"
        )
    return layout


def _check(
    name: str, tensor: Tensor, shape: tuple[int, ...], types: tuple[torch.dtype, ...], like: Tensor
) -> None:
    if (
        tensor.shape != shape
        or tensor.dtype not in types
        or tensor.device != like.device
        or not tensor.is_contiguous()
    ):
        raise ConfigError(
            f"{name} must be contiguous {' or '.join(map(str, types))} {list(shape)} on "
            f"{like.device}, got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        )
