"""Times of a bounded sum with noise and of noise alone, compared with copies and with a simple
loop.

Times are medians over repetitions with a flushed L2 cache. `device_ms` is the GPU's time: a
spinning kernel keeps the GPU busy until everything is queued. `elapsed_ms` includes waiting for the
host to launch.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_parts.checks import bounded_step
from benchmarks.gpu_parts.tables import KEY, models, offsets_of
from fedlgm.aggregation import kernels
from fedlgm.aggregation.kernels.layout import layout_of
from fedlgm.aggregation.kernels.spec import Noise
from fedlgm.noise.draws import Family

# Time of a bounded sum over the time of a copy that moves the same bytes, from 11 M parameters.
COPY_TARGET = 1.3
# Time of a loop over the layers, over the time of a bounded sum, for ResNet-152 and one client.
LOOP_TARGET = 4.0


class Timer:
    """Median times of GPU work with a cold L2 cache."""

    def __init__(self, repeats: int = 30) -> None:
        self.repeats = repeats
        self.flush = torch.empty(2**28, dtype=torch.uint8, device="cuda")
        # Clocks rise only under load, and a spin that is too short would let the host's launches
        # into `device_ms`.
        spins = [self._between(lambda: torch.cuda._sleep(20_000_000)) for _ in range(40)]
        self.cycles_per_ms = 2e7 / min(spins)

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
    """Run the simple loop: layer by layer, with all clients at once and noise from torch.randn."""
    out = torch.empty(updates.shape[1], device=updates.device)
    start = 0
    for k, size in enumerate(sizes):
        part = updates[:, start : start + size]
        factors = (clip[k] / torch.linalg.vector_norm(part, dim=1)).clamp(max=1.0)
        out[start : start + size] = factors @ part + scale[k] * torch.randn(
            size, device=updates.device
        )
        start += size
    return out


def opacus_noise() -> tuple[str, Callable[[float, Tensor], Tensor]]:
    """Return a label and Opacus's noise function, or an equal function if Opacus is not installed."""
    try:
        from opacus.optimizers.optimizer import _generate_noise

        return "opacus", _generate_noise
    except ImportError:

        def written_out(std: float, reference: Tensor) -> Tensor:
            return torch.normal(mean=0, std=std, size=reference.shape, device=reference.device)

        return "the operation of opacus, written out", written_out


def time_copy(timer: Timer, size: int) -> float:
    """Measure the device milliseconds of copying `size` bytes within the device's memory."""
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return timer(lambda: target.copy_(source))["device_ms"]


def time_bounded_sum(timer: Timer, name: str, sizes: list[int], clients: int) -> dict[str, Any]:
    """Time the bounding and summing of a block of clients and the addition of noise, as in a round."""
    size, offsets = sum(sizes), offsets_of(sizes)
    updates = kernels.empty_block(clients, size, "cuda").normal_()
    clip = torch.full((len(sizes),), 1.0, device="cuda")
    scale = torch.full((len(sizes),), 0.1, device="cuda")
    total = torch.zeros(size, device="cuda", dtype=torch.float64)
    step = timer(lambda: bounded_step(updates, offsets, clip, scale, total))
    # Two passes over the block, and the float64 sum read and written twice; a copy reads and writes
    # every byte it copies. If the block fits into the L2 cache (one ResNet-18 client just fits on
    # an H100), the second pass is faster than the memory's speed permits.
    moved = 4 * size * (2 * clients + 8)
    copy = time_copy(timer, moved // 2)
    block_copy = time_copy(timer, 4 * size * clients)
    row: dict[str, Any] = {
        "model": name,
        "parameters": size,
        "layers": len(sizes),
        "clients": clients,
        **step,
        "bytes_moved": moved,
        "copy_of_same_traffic_ms": copy,
        "over_copy": step["device_ms"] / copy,
        "over_copy_of_block": step["device_ms"] / block_copy,
        "tb_per_s": moved / step["device_ms"] / 1e9,
    }
    loop = timer(lambda: torch_loop(updates, sizes, clip, scale))
    row |= {
        # The loop's `device_ms` is left out: thousands of launches do not fit into the queue, so
        # the device waits for the host.
        "torch_loop_elapsed_ms": loop["elapsed_ms"],
        "speedup_over_torch_loop": loop["elapsed_ms"] / step["elapsed_ms"],
    }
    if size >= 11_000_000:
        row["meets_copy_target"] = row["over_copy"] <= COPY_TARGET
    if name == "resnet152" and clients == 1:
        row["meets_loop_target"] = row["speedup_over_torch_loop"] >= LOOP_TARGET
    return row


def time_noise(timer: Timer, name: str, sizes: list[int], family: Family) -> dict[str, Any]:
    """Time the noise alone on the summed update, compared with torch.randn and with noise that is
    added parameter by parameter.
    """
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
        }
    return row


def sweep(timer: Timer) -> list[dict[str, Any]]:
    """Time the sum with noise for ResNet-18 and one client, with several launch configurations."""
    from fedlgm.aggregation.kernels import triton_kernels

    sizes = models()["resnet18"]
    layout = layout_of(offsets_of(sizes))
    updates, out = (
        torch.randn(1, layout.size, device="cuda"),
        torch.empty(layout.size, device="cuda"),
    )
    ones = torch.ones(1, len(sizes), device="cuda")
    spec = Noise(ones[0], "gaussian", KEY)
    rows = []
    for launch in itertools.product((512, 1024, 2048, 4096, 8192), (2, 4, 8)):
        options = dict(zip(("tile", "warps"), launch, strict=True))
        run = partial(triton_kernels.accumulate, out, layout, updates, ones, spec, **options)
        rows.append({**options, **timer(run)})
    return rows


def time_cpu(sizes: list[int], repeats: int = 5) -> dict[str, float]:
    """Time the noise of the torch backend on one CPU thread, compared with torch.randn of the same
    size.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    vector, scale, offsets = (
        torch.zeros(sum(sizes)),
        torch.full((len(sizes),), 0.1),
        offsets_of(sizes),
    )

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
        "gaussian_ms": median_ms(
            lambda: kernels.add_noise_(vector, offsets, scale, "gaussian", KEY)
        ),
        "gaussian_without_grid_ms": median_ms(
            lambda: kernels.add_noise_(vector, offsets, scale, "gaussian", KEY, grid=False)
        ),
        "laplace_ms": median_ms(lambda: kernels.add_noise_(vector, offsets, scale, "laplace", KEY)),
    }
    torch.set_num_threads(threads)
    return report | {"gaussian_over_randn": report["gaussian_ms"] / report["randn_ms"]}
