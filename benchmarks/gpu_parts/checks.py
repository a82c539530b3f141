"""Checks of the kernels against references on a device: sums, noise, statistics, no host
synchronisation.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, get_args

import torch
from scipy import stats
from torch import Tensor

from benchmarks.gpu_parts.tables import KEY, offsets_of
from fedlgm.aggregation import kernels
from fedlgm.aggregation.kernels import torch_kernels
from fedlgm.aggregation.kernels.layout import layout_of
from fedlgm.aggregation.kernels.spec import Noise
from fedlgm.noise.draws import Family


def check_all(device: torch.device, backend: kernels.Backend, sizes: list[int]) -> dict[str, bool]:
    """Check the kernels against references on `device`; every value of the result must be True."""
    generator = torch.Generator().manual_seed(0)
    updates = torch.randn(3, sum(sizes), generator=generator)
    factors = torch.rand(3, len(sizes), generator=generator)
    scale = 0.5 + torch.rand(len(sizes), generator=generator)
    offsets = offsets_of(sizes)
    there = [t.to(device) for t in (updates, factors, scale)]
    return {
        **_check_sums(updates, factors, offsets, sizes, there, backend),
        **_check_noise(updates, factors, scale, offsets, there, backend),
        **_check_statistics(sizes, device, backend),
    }


def _check_sums(
    updates: Tensor,
    factors: Tensor,
    offsets: Tensor,
    sizes: list[int],
    there: list[Tensor],
    backend: kernels.Backend,
) -> dict[str, bool]:
    clip = torch.ones_like(there[2])
    squared = kernels.clip_factors(there[0], offsets, clip, backend=backend).moments
    expected = torch.stack([part.double().square().sum(1) for part in updates.split(sizes, 1)], 1)
    out = torch.zeros(sum(sizes), device=there[0].device)
    kernels.clip_scale_sum(there[0], offsets, there[1], out, backend=backend)
    exact = torch.zeros(sum(sizes))
    for client in range(3):
        exact += factors[client].repeat_interleave(torch.tensor(sizes)) * updates[client]
    damaged = there[0].clone()
    damaged[1, 3] = math.nan
    bounds = kernels.clip_factors(damaged, offsets, clip, backend=backend)
    bounded = torch.zeros(sum(sizes), device=damaged.device)
    kernels.clip_scale_sum(damaged, offsets, bounds.factors, bounded, backend=backend)
    return {
        "norms within 1e-6 of float64": bool(
            ((squared.cpu() - expected).abs() <= 1e-6 * expected).all()
        ),
        "sum has the bits of the plain loop": torch.equal(out.cpu(), exact),
        "a client with NaN contributes zero": bounds.nonfinite.tolist() == [0, 1, 0]
        and bool(bounded.isfinite().all()),
    }


def _check_noise(
    updates: Tensor,
    factors: Tensor,
    scale: Tensor,
    offsets: Tensor,
    there: list[Tensor],
    backend: kernels.Backend,
) -> dict[str, bool]:
    layout, results = layout_of(offsets), {}
    families: tuple[Family, ...] = get_args(Family)
    for family in families:
        expected = torch.zeros(layout.size)
        torch_kernels.accumulate(
            expected, layout, updates, factors, Noise(scale, family, KEY, False)
        )
        outputs = []
        for launch in _launches(backend):
            out = torch.zeros(layout.size, device=there[0].device)
            _accumulate(backend)(
                out, layout, there[0], there[1], Noise(there[2], family, KEY, False), **launch
            )
            outputs.append(out.cpu())
        results[f"{family} noise: as the reference"] = bool(
            torch.allclose(outputs[0], expected, rtol=1e-5, atol=2e-5)
        )
        results[f"{family} noise: no bit depends on the launch"] = all(
            torch.equal(outputs[0], o) for o in outputs[1:]
        )
    return results


def _accumulate(backend: kernels.Backend) -> Callable[..., None]:
    if backend == "torch":
        return torch_kernels.accumulate
    from fedlgm.aggregation.kernels import triton_kernels

    return triton_kernels.accumulate


def _launches(backend: kernels.Backend) -> list[dict[str, int]]:
    if backend == "torch":
        return [{"chunk": 2048}, {"chunk": 32768}]
    return [{"tile": 2048, "warps": 4}, {"tile": 1024, "warps": 8}, {"tile": 256, "warps": 1}]


def _check_statistics(
    sizes: list[int], device: torch.device, backend: kernels.Backend
) -> dict[str, bool]:
    large = [k for k, size in enumerate(sizes) if size >= 1000]
    results = {}
    laws: dict[Family, Any] = {"gaussian": stats.norm, "laplace": stats.laplace}
    for family, law in laws.items():
        scale = torch.linspace(0.1, 10, len(sizes))
        vector = torch.zeros(sum(sizes), device=device)
        kernels.add_noise_(
            vector, offsets_of(sizes), scale.to(device), family, KEY, backend=backend
        )
        parts = vector.cpu().split(sizes)
        fits = {
            factor: [
                stats.kstest(
                    parts[k][:20_000].numpy(), law(scale=factor * scale[k].item()).cdf
                ).pvalue
                for k in large
            ]
            for factor in (1.0, 2 / 3, 3 / 2)
        }
        results[f"{family} layers have their own scale (Kolmogorov-Smirnov)"] = bool(
            min(fits[1.0]) > 1e-3 / len(large)
        )
        results[f"{family} test rejects 2/3 and 3/2 of it"] = bool(
            max(fits[2 / 3] + fits[3 / 2]) < 1e-4
        )
        unit = torch.cat([part / b for part, b in zip(parts, scale.tolist(), strict=True)]).double()
        for bound in (3.0, 5.0):
            expected = 2 * law.sf(bound) * len(unit)
            count = int((unit.abs() > bound).sum())
            results[f"{family} tail beyond {bound:.0f} scales"] = bool(
                abs(count - expected) <= 5 * math.sqrt(expected) + 1
            )
    return results


def check_no_sync() -> dict[str, bool]:
    ones, updates = torch.ones(2, device="cuda"), torch.randn(2, 5000, device="cuda")
    offsets, total = offsets_of([1, 4999]), torch.zeros(5000, device="cuda", dtype=torch.float64)
    bounded_step(updates, offsets, ones, ones, total)
    torch.cuda.set_sync_debug_mode("error")
    try:
        bounded_step(updates, offsets, ones, ones, total)
    except RuntimeError:
        return {"bounded sum with noise": False}
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {"bounded sum with noise": True}


def bounded_step(
    updates: Tensor, offsets: Tensor, clip: Tensor, scale: Tensor, total: Tensor
) -> None:
    """Do a round's work on its only block: bound, sum and add noise."""
    kernels.clip_scale_sum(
        updates, offsets, kernels.clip_factors(updates, offsets, clip).factors, total
    )
    kernels.add_noise_(total, offsets, scale, "gaussian", KEY)
