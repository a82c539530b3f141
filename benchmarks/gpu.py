"""What the private step costs on a GPU: checks first, then times. Needs torch, numpy and scipy; Triton for the kernels.

    python -m benchmarks.gpu [--json] [--sweep]

Without a GPU it runs the checks on small sizes (in Triton's interpreter, if Triton is installed) and says so.

Times are medians over repetitions with a flushed L2 cache. `device_ms` is what the GPU needs: a spinning kernel in
front keeps it busy until everything is queued. `elapsed_ms` includes waiting for the host to launch.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from scipy import stats
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from fedlgm import kernels
from fedlgm.kernels import torch_kernels
from fedlgm.kernels.layout import layout_of
from fedlgm.kernels.spec import Noise
from fedlgm.noise import Family

KEY = (0x9E3779B9, 0x01234567)
CLIENTS = (1, 32)
COPY_TARGET = 1.3  # private step over a copy that moves the same bytes, from 11 M parameters
LOOP_TARGET = 4.0  # loop over layers over private step, ResNet-152 and one client


# ------------------------------------------------------------------------------------------------------------- tables


def cnn_layers() -> list[int]:
    """The two-convolution network on 28 x 28 images: 26,010 parameters."""
    return [1040, 8224, 16416, 330]


def resnet_layers(blocks: tuple[int, ...], bottleneck: bool, classes: int) -> list[int]:
    """Module sizes of torchvision's ResNets in order (convolution weight; norm weight and bias; linear layer)."""
    expansion = 4 if bottleneck else 1
    sizes = [3 * 64 * 49, 2 * 64]
    channels = 64
    for stage, count in enumerate(blocks):
        width = 64 * 2**stage
        for block in range(count):
            if bottleneck:
                convolutions = [(channels, width, 1), (width, width, 3), (width, 4 * width, 1)]
            else:
                convolutions = [(channels, width, 3), (width, width, 3)]
            if block == 0 and channels != width * expansion:
                convolutions.append((channels, width * expansion, 1))
            for inputs, outputs, kernel in convolutions:
                sizes += [inputs * outputs * kernel**2, 2 * outputs]
            channels = width * expansion
    return [*sizes, channels * classes + classes]


def models() -> dict[str, list[int]]:
    return {
        "cnn": cnn_layers(),
        "resnet18": resnet_layers((2, 2, 2, 2), False, 10),
        "resnet152": resnet_layers((3, 8, 36, 3), True, 1000),
    }


def offsets_of(sizes: list[int]) -> Tensor:
    return torch.tensor([0, *np.cumsum(sizes)])


# ------------------------------------------------------------------------------------------------------------- checks


def check_all(device: torch.device, backend: kernels.Backend, sizes: list[int]) -> dict[str, bool]:
    """Kernels against references on `device`; every value must be True."""
    generator = torch.Generator().manual_seed(0)
    updates = torch.randn(3, sum(sizes), generator=generator)
    factors = torch.rand(3, len(sizes), generator=generator)
    scale = 0.5 + torch.rand(len(sizes), generator=generator)
    offsets, streams = offsets_of(sizes), torch.tensor([5, 1, 2**32 - 2])
    there = [t.to(device) for t in (updates, factors, scale, streams)]
    return {
        **_check_sums(updates, factors, offsets, sizes, there, backend),
        **_check_noise(updates, factors, scale, streams, offsets, there, backend),
        **_check_statistics(sizes, device, backend),
    }


def _check_sums(
    updates: Tensor, factors: Tensor, offsets: Tensor, sizes: list[int], there: list[Tensor], backend: kernels.Backend
) -> dict[str, bool]:
    squared, _ = kernels.squared_norms(there[0], offsets, backend=backend)
    expected = torch.stack([part.double().square().sum(1) for part in updates.split(sizes, 1)], 1)
    out = torch.zeros(sum(sizes), device=there[0].device)
    kernels.clip_scale_sum(there[0], offsets, there[1], out, backend=backend)
    exact = torch.zeros(sum(sizes))
    for client in range(3):
        exact += factors[client].repeat_interleave(torch.tensor(sizes)) * updates[client]
    damaged = there[0].clone()
    damaged[1, 3] = math.nan
    bounded = kernels.private_step(damaged, offsets, torch.ones_like(there[2]), backend=backend)
    return {
        "norms within 1e-6 of float64": bool(((squared.cpu() - expected).abs() <= 1e-6 * expected).all()),
        "sum has the bits of the plain loop": torch.equal(out.cpu(), exact),
        "a client with NaN contributes zero": bounded.nonfinite.tolist() == [0, 1, 0]
        and bool(bounded.total.isfinite().all()),
    }


def _check_noise(
    updates: Tensor,
    factors: Tensor,
    scale: Tensor,
    streams: Tensor,
    offsets: Tensor,
    there: list[Tensor],
    backend: kernels.Backend,
) -> dict[str, bool]:
    layout, results = layout_of(offsets), {}
    families: tuple[Family, ...] = get_args(Family)
    for family in families:
        for trust, own, theirs in (("central", None, None), ("local", streams, there[3])):
            expected = torch.zeros(layout.size)
            spec = Noise(scale, family, KEY, False, own)
            torch_kernels.accumulate(expected, layout, updates, factors, spec)
            spec = Noise(there[2], family, KEY, False, theirs)
            outputs = []
            for launch in _launches(backend):
                out = torch.zeros(layout.size, device=there[0].device)
                _accumulate(backend)(out, layout, there[0], there[1], spec, **launch)
                outputs.append(out.cpu())
            name = f"{family} noise, {trust}"
            results[f"{name}: as the reference"] = bool(torch.allclose(outputs[0], expected, rtol=1e-5, atol=2e-5))
            results[f"{name}: no bit depends on the launch"] = all(torch.equal(outputs[0], o) for o in outputs[1:])
    return results


def _accumulate(backend: kernels.Backend) -> Callable[..., None]:
    if backend == "torch":
        return torch_kernels.accumulate
    from fedlgm.kernels import triton_kernels

    return triton_kernels.accumulate


def _launches(backend: kernels.Backend) -> list[dict[str, int]]:
    if backend == "torch":
        return [{"chunk": 2048}, {"chunk": 32768}]
    return [{"tile": 2048, "warps": 4}, {"tile": 1024, "warps": 8}, {"tile": 256, "warps": 1}]


def _check_statistics(sizes: list[int], device: torch.device, backend: kernels.Backend) -> dict[str, bool]:
    large = [k for k, size in enumerate(sizes) if size >= 1000]
    results = {}
    laws: dict[Family, Any] = {"gaussian": stats.norm, "laplace": stats.laplace}
    for family, law in laws.items():
        scale = torch.linspace(0.1, 10, len(sizes))
        vector = torch.zeros(sum(sizes), device=device)
        kernels.add_noise_(vector, offsets_of(sizes), scale.to(device), family, KEY, backend=backend)
        parts = vector.cpu().split(sizes)
        fits = {
            factor: [
                stats.kstest(parts[k][:20_000].numpy(), law(scale=factor * scale[k].item()).cdf).pvalue for k in large
            ]
            for factor in (1.0, 2 / 3, 3 / 2)
        }
        results[f"{family} layers have their own scale (Kolmogorov-Smirnov)"] = bool(min(fits[1.0]) > 1e-3 / len(large))
        results[f"{family} test rejects 2/3 and 3/2 of it"] = bool(max(fits[2 / 3] + fits[3 / 2]) < 1e-4)
        unit = torch.cat([part / b for part, b in zip(parts, scale.tolist(), strict=True)]).double()
        for bound in (3.0, 5.0):
            expected = 2 * law.sf(bound) * len(unit)
            count = int((unit.abs() > bound).sum())
            results[f"{family} tail beyond {bound:.0f} scales"] = bool(
                abs(count - expected) <= 5 * math.sqrt(expected) + 1
            )
    return results


# -------------------------------------------------------------------------------------------------------------- times


class Timer:
    """Median times of GPU work with a cold L2 cache."""

    def __init__(self, repeats: int = 30) -> None:
        self.repeats = repeats
        self.flush = torch.empty(2**28, dtype=torch.uint8, device="cuda")
        torch.cuda._sleep(1000)
        self.cycles_per_ms = 1e7 / self._between(lambda: torch.cuda._sleep(10_000_000))

    def _between(self, run: Callable[[], object]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    def __call__(self, run: Callable[[], object]) -> dict[str, float]:
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        began = time.perf_counter()
        run()
        host_ms = 1e3 * (time.perf_counter() - began)
        elapsed, device = [], []
        for _ in range(self.repeats):
            self.flush.zero_()
            torch.cuda.synchronize()
            elapsed.append(self._between(run))
            self.flush.zero_()
            torch.cuda._sleep(int((2 * host_ms + 0.5) * self.cycles_per_ms))
            device.append(self._between(run))
        return {"device_ms": statistics.median(device), "elapsed_ms": statistics.median(elapsed)}


def torch_loop(updates: Tensor, sizes: list[int], clip: Tensor, scale: Tensor) -> Tensor:
    """The obvious way: layer by layer, all clients at once, noise from torch.randn."""
    out = torch.empty(updates.shape[1], device=updates.device)
    start = 0
    for k, size in enumerate(sizes):
        part = updates[:, start : start + size]
        factors = (clip[k] / torch.linalg.vector_norm(part, dim=1)).clamp(max=1.0)
        out[start : start + size] = factors @ part + scale[k] * torch.randn(size, device=updates.device)
        start += size
    return out


def opacus_noise() -> tuple[str, Callable[[float, Tensor], Tensor]]:
    """Opacus' noise for one parameter, or the same operation where Opacus is not installed."""
    try:
        from opacus.optimizers.optimizer import _generate_noise

        return "opacus", _generate_noise
    except ImportError:

        def written_out(std: float, reference: Tensor) -> Tensor:
            return torch.normal(mean=0, std=std, size=reference.shape, device=reference.device)

        return "the operation of opacus, written out", written_out


def time_copy(timer: Timer, size: int) -> float:
    """Device milliseconds of copying `size` bytes within the device's memory."""
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return timer(lambda: target.copy_(source))["device_ms"]


def time_private_step(timer: Timer, name: str, sizes: list[int], clients: int, local: bool) -> dict[str, Any]:
    size, offsets = sum(sizes), offsets_of(sizes)
    updates = torch.randn(clients, size, device="cuda")
    clip = torch.full((len(sizes),), 1.0, device="cuda")
    scale = torch.full((len(sizes),), 0.1, device="cuda")
    streams = torch.arange(clients, device="cuda") if local else None
    step = timer(lambda: kernels.private_step(updates, offsets, clip, scale, key=KEY, streams=streams))
    # Two passes over the block and one write of the sum; a copy reads and writes every byte it copies.
    moved = 4 * size * (2 * clients + 1)
    copy = time_copy(timer, moved // 2)
    block_copy = time_copy(timer, 4 * size * clients)
    row: dict[str, Any] = {
        "model": name,
        "parameters": size,
        "layers": len(sizes),
        "clients": clients,
        "trust": "local" if local else "central",
        **step,
        "bytes_moved": moved,
        "copy_of_same_traffic_ms": copy,
        "over_copy": step["device_ms"] / copy,
        "over_copy_of_block": step["device_ms"] / block_copy,
        "tb_per_s": moved / step["device_ms"] / 1e9,
    }
    if not local:
        loop = timer(lambda: torch_loop(updates, sizes, clip, scale))
        row |= {
            "torch_loop_device_ms": loop["device_ms"],
            "torch_loop_elapsed_ms": loop["elapsed_ms"],
            "speedup_over_torch_loop": loop["elapsed_ms"] / step["elapsed_ms"],
            "speedup_over_torch_loop_device": loop["device_ms"] / step["device_ms"],
        }
    if size >= 11_000_000:
        row["meets_copy_target"] = row["over_copy"] <= COPY_TARGET
    if name == "resnet152" and clients == 1 and not local:
        row["meets_loop_target"] = row["speedup_over_torch_loop"] >= LOOP_TARGET
    return row


def time_noise(timer: Timer, name: str, sizes: list[int], family: Family) -> dict[str, Any]:
    """Noise alone on the summed update, against torch.randn and against noise parameter by parameter."""
    vector, offsets = torch.zeros(sum(sizes), device="cuda"), offsets_of(sizes)
    scale = torch.full((len(sizes),), 0.1, device="cuda")
    ours = timer(lambda: kernels.add_noise_(vector, offsets, scale, family, KEY))
    fine = timer(lambda: kernels.add_noise_(vector, offsets, scale, family, KEY, grid=False))
    copy = time_copy(timer, 4 * len(vector))
    row: dict[str, Any] = {
        "model": name,
        "family": family,
        **ours,
        "without_grid_device_ms": fine["device_ms"],
        "over_copy": ours["device_ms"] / copy,
    }
    if family == "gaussian":
        label, draw = opacus_noise()
        parameters = list(vector.split(sizes))
        theirs = timer(lambda: [p.add_(draw(0.1, p)) for p in parameters])
        row |= {
            "per_parameter_noise": label,
            "per_parameter_elapsed_ms": theirs["elapsed_ms"],
            "speedup_over_per_parameter": theirs["elapsed_ms"] / ours["elapsed_ms"],
            "speedup_over_per_parameter_device": theirs["device_ms"] / ours["device_ms"],
        }
    return row


def sweep(timer: Timer) -> list[dict[str, Any]]:
    """Fused sum with central noise on ResNet-18, one client, for several launch configurations."""
    from fedlgm.kernels import triton_kernels

    sizes = models()["resnet18"]
    layout = layout_of(offsets_of(sizes))
    updates, out = torch.randn(1, layout.size, device="cuda"), torch.empty(layout.size, device="cuda")
    ones = torch.ones(1, len(sizes), device="cuda")
    spec = Noise(ones[0], "gaussian", KEY)
    rows = []
    for launch in itertools.product((512, 1024, 2048, 4096, 8192), (2, 4, 8)):
        options = dict(zip(("tile", "warps"), launch, strict=True))
        run = partial(triton_kernels.accumulate, out, layout, updates, ones, spec, fresh=True, **options)
        rows.append({**options, **timer(run)})
    return rows


def time_cpu(sizes: list[int], repeats: int = 5) -> dict[str, float]:
    """Noise of the torch backend on one CPU thread against torch.randn of the same size."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    vector, scale, offsets = torch.zeros(sum(sizes)), torch.full((len(sizes),), 0.1), offsets_of(sizes)

    def median_ms(run: Callable[[], object]) -> float:
        run()
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            run()
            times.append(1e3 * (time.perf_counter() - began))
        return statistics.median(times)

    report = {
        "parameters": len(vector),
        "randn_ms": median_ms(lambda: torch.randn(len(vector))),
        "gaussian_ms": median_ms(lambda: kernels.add_noise_(vector, offsets, scale, "gaussian", KEY)),
        "gaussian_without_grid_ms": median_ms(
            lambda: kernels.add_noise_(vector, offsets, scale, "gaussian", KEY, grid=False)
        ),
        "laplace_ms": median_ms(lambda: kernels.add_noise_(vector, offsets, scale, "laplace", KEY)),
    }
    torch.set_num_threads(threads)
    return report | {"gaussian_over_randn": report["gaussian_ms"] / report["randn_ms"]}


# ------------------------------------------------------------------------------------------------------------- report


def without_gpu() -> dict[str, Any]:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
    small = [7, 1030, 1, 1201, 61]
    checks = {"torch": check_all(torch.device("cpu"), "torch", small)}
    if kernels.doors.has_triton():
        checks["triton interpreter"] = check_all(torch.device("cpu"), "triton", small)
    return {
        "device": None,
        "reason": "torch finds no CUDA device: kernels were checked on the CPU, nothing was timed on a GPU",
        "checks": checks,
        "cpu": time_cpu(models()["resnet18"]),
    }


def with_gpu(run_sweep: bool) -> dict[str, Any]:
    device = torch.device("cuda")
    backend = kernels.backend_for(torch.empty(0, device=device))
    tables = models()
    checks = {
        backend: check_all(device, backend, tables["cnn"]),
        f"{backend}, odd sizes": check_all(device, backend, [7, 1030, 1, 70_001, 61]),
        f"{backend}, ResNet-18": check_all(device, backend, tables["resnet18"]),
        "no host synchronisation": _check_no_sync(),
    }
    timer = Timer()
    steps = []
    for name, sizes in tables.items():
        for clients in CLIENTS:
            needed = 4 * sum(sizes) * (3.5 * clients + 4)
            if torch.cuda.mem_get_info()[0] < needed:
                steps.append({"model": name, "clients": clients, "skipped": f"needs {needed / 2**30:.1f} GiB"})
                continue
            steps += [time_private_step(timer, name, sizes, clients, local) for local in (False, True)]
            torch.cuda.empty_cache()
    report = {
        "device": torch.cuda.get_device_name(),
        "backend": backend,
        "checks": checks,
        "private_step": steps,
        "noise": [time_noise(timer, name, s, f) for name, s in tables.items() for f in get_args(Family)],
        "cpu": time_cpu(tables["resnet18"]),
    }
    return report | ({"sweep": sweep(timer)} if run_sweep and backend == "triton" else {})


def _check_no_sync() -> dict[str, bool]:
    ones, updates = torch.ones(2, device="cuda"), torch.randn(2, 5000, device="cuda")
    offsets, streams = offsets_of([1, 4999]), torch.arange(2, device="cuda")
    kernels.private_step(updates, offsets, ones, ones, key=KEY, streams=streams)
    torch.cuda.set_sync_debug_mode("error")
    try:
        kernels.private_step(updates, offsets, ones, ones, key=KEY, streams=streams)
    except RuntimeError:
        return {"private step": False}
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {"private step": True}


def show(report: dict[str, Any]) -> None:
    print(report["device"] or report["reason"])
    for part, checks in report["checks"].items():
        failed = [name for name, passed in checks.items() if not passed]
        print(f"{part}: {len(checks)} checks, failed: {failed or 'none'}")
    for row in report.get("private_step", []) + report.get("noise", []) + report.get("sweep", []) + [report["cpu"]]:
        print("  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--sweep", action="store_true", help="also time other launch configurations")
    options = parser.parse_args()
    report = with_gpu(options.sweep) if torch.cuda.is_available() else without_gpu()
    report["versions"] = {"python": platform.python_version(), "torch": torch.__version__}
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        show(report)
    return 0 if all(passed for checks in report["checks"].values() for passed in checks.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
