"""Whole private rounds (train, bound, add up, noise, step): many clients at once, compared with one
after another.

The clients are those of the experiments: 26,010-parameter CNN, images of 28 x 28, about 120
examples per client (unequal, as a Dirichlet partition gives them), three epochs of Adam in batches
of 32. The images are synthetic, because the time does not depend on their content.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.gpu_parts.tables import KEY
from fedlgm.aggregation import kernels
from fedlgm.noise.keys import KeyRing, Purpose
from fedlgm.planning.layers import LayerTable
from fedlgm.training import (
    ClientTask,
    LocalTraining,
    SequentialTrainer,
    Trainer,
    VectorizedTrainer,
    models,
)

SHAPE, CLASSES = (1, 28, 28), 10
SETTINGS = LocalTraining("adam", lr=0.002, epochs=3, batch_size=32)
CLIP, NOISE = 0.5, 0.5
TARGET = 20.0  # ratio of clients per second, vectorised over sequential, on the same GPU


@dataclass(frozen=True)
class Scale:
    """Amount of work that is measured.

    Attributes:
        clients: number of clients of a round.
        examples: mean number of a client's examples.
        subset: number of clients of a sequential round; their sizes are spread evenly over all
            sizes.
        widths: numbers of clients that are trained at once.
        repeats: number of timed rounds, after one round that warms up.
    """

    clients: int
    examples: int
    subset: int
    widths: tuple[int, ...]
    repeats: int = 3


FULL = Scale(500, 120, 20, (8, 16, 32, 64, 128))
SMALL = Scale(12, 40, 12, (6,), 1)
TINY = Scale(4, 6, 2, (2, 4), 1)


class Round:
    """One round's clients and operations on a device."""

    def __init__(self, scale: Scale, device: torch.device) -> None:
        self.device = device
        rng = np.random.default_rng(0)
        shares = rng.dirichlet(np.full(scale.clients, 4.0))
        # The clients with the most examples come first, as in the blocks of a simulation.
        self.sizes = np.sort(
            np.maximum(1, np.round(shares * scale.clients * scale.examples)).astype(int)
        )[::-1]
        generator = torch.Generator().manual_seed(0)
        self.data = [
            (
                torch.rand(int(n), *SHAPE, generator=generator),
                torch.randint(CLASSES, (int(n),), generator=generator),
            )
            for n in self.sizes
        ]
        self.layers = LayerTable.from_module(self.module())
        self.model = self.layers.flatten(self.module()).to(device)
        self.offsets = torch.tensor(self.layers.offsets)
        self.clip = torch.full((len(self.layers),), CLIP, device=device)
        self.noise = torch.full((len(self.layers),), NOISE, device=device)

    @staticmethod
    def module() -> torch.nn.Module:
        return models.build("cnn", in_shape=SHAPE, classes=CLASSES, seed=0)

    def sequential(self) -> Trainer:
        return SequentialTrainer(self.module(), self.layers, SETTINGS, self.device)

    def vectorized(self, width: int, compiled: bool, products: bool = False) -> VectorizedTrainer:
        module = self.module()
        if products:
            _convolve_by_products_(module)
        return VectorizedTrainer(
            module, self.layers, SETTINGS, width=width, compile=compiled, device=self.device
        )

    def run(self, trainer: Trainer, clients: np.ndarray) -> Tensor:
        """Return the next model [D]."""
        keys = KeyRing(1)
        tasks = [
            ClientTask(x, y, keys.torch_generator(Purpose.TRAIN, 1, int(c)), SETTINGS.epochs)
            for c, (x, y) in ((c, self.data[c]) for c in clients)
        ]
        total = torch.zeros_like(self.model)
        for updates in trainer.updates(self.model, tasks):
            factors = kernels.clip_factors(updates, self.offsets, self.clip).factors
            kernels.clip_scale_sum(updates, self.offsets, factors, total)
        kernels.add_noise_(total, self.offsets, self.noise, "gaussian", KEY)
        return self.model + total / len(clients)


def _convolve_by_products_(module: torch.nn.Module) -> None:
    """Unfold images and multiply matrices, to measure the cost of the grouped convolutions of
    `vmap` on this device.
    """

    def forward(layer: torch.nn.Conv2d, images: Tensor) -> Tensor:
        (height, width), (down, right) = layer.padding, layer.stride
        padded = torch.nn.functional.pad(images, (width, width, height, height))
        rows = (padded.shape[2] - layer.kernel_size[0]) // down + 1
        columns = (padded.shape[3] - layer.kernel_size[1]) // right + 1
        # By slices: `vmap` has no rule for the gradient of Tensor.unfold.
        slices = [
            padded[:, :, i : i + down * rows : down, j : j + right * columns : right]
            for i in range(layer.kernel_size[0])
            for j in range(layer.kernel_size[1])
        ]
        examples = images.shape[0]
        flat = (
            torch.stack(slices, dim=2)
            .flatten(1, 2)
            .permute(0, 2, 3, 1)
            .reshape(examples * rows * columns, -1)
        )
        products = torch.addmm(layer.bias, flat, layer.weight.reshape(layer.out_channels, -1).t())
        return products.reshape(examples, rows, columns, -1).permute(0, 3, 1, 2)

    for layer in module.modules():
        if isinstance(layer, torch.nn.Conv2d):
            layer.forward = partial(forward, layer)


def check(device: torch.device, scale: Scale) -> dict[str, bool]:
    """Check whether rounds are reproducible on the device and agree with rounds on the CPU."""
    here, cpu = Round(scale, device), Round(scale, torch.device("cpu"))
    everyone = np.arange(scale.clients)
    reference = cpu.run(cpu.sequential(), everyone)
    moved = (reference - cpu.model).norm()
    results = {}
    ways: dict[str, Callable[[], Trainer]] = {
        "sequential": here.sequential,
        "vectorized": lambda: here.vectorized(scale.widths[-1], False),
        "vectorized by matrix products": lambda: here.vectorized(
            scale.widths[-1], False, products=True
        ),
    }
    if device.type != "cpu":  # on a CPU compilation takes longer than everything else together
        ways["vectorized, compiled"] = lambda: here.vectorized(scale.widths[-1], True)
    for name, make in ways.items():
        first, second = (here.run(make(), everyone).cpu() for _ in range(2))
        results[f"{name}: two rounds have the same bits"] = torch.equal(first, second)
        results[f"{name}: as one by one on the CPU"] = bool(
            (first - reference).norm() < 1e-2 * moved
        )
    return results


def measure(device: torch.device, scale: Scale, compile_all: bool = False) -> dict[str, Any]:
    """Measure the clients trained per second, for each way of training.

    Compilation is measured only for the fastest number of clients at once, unless all are
    requested.
    """
    here, cpu = Round(scale, device), Round(scale, torch.device("cpu"))
    everyone = np.arange(scale.clients)
    few = np.linspace(0, scale.clients - 1, scale.subset).round().astype(int)
    rows = [_time("sequential", here, here.sequential(), few, scale)]
    if device.type != "cpu":
        rows.append(_time("sequential", cpu, cpu.sequential(), few, replace(scale, repeats=1)))
    plain = [_vectorized(here, width, False, everyone, scale) for width in scale.widths]
    fastest = max(plain, key=lambda row: row.get("clients_per_s", 0.0))
    compiled = scale.widths if compile_all else (fastest["width"],)
    if device.type != "cpu":
        plain += [_vectorized(here, width, True, everyone, scale) for width in compiled]
    kinds = (False, True) if device.type != "cpu" else (False,)
    products = [
        _vectorized(here, fastest["width"], kind, everyone, scale, products=True) for kind in kinds
    ]
    rows += plain + products
    best = max(row.get("clients_per_s", 0.0) for row in plain)
    ratio = best / rows[0]["clients_per_s"]
    summary = {
        "parameters": here.layers.size,
        "clients": scale.clients,
        "examples": int(here.sizes.sum()),
        "largest_client": int(here.sizes[0]),
        "vectorized_over_sequential": ratio,
        "by_matrix_products_over_sequential": max(row.get("clients_per_s", 0.0) for row in products)
        / rows[0]["clients_per_s"],
        "vectorized_over_cpu": best / rows[1]["clients_per_s"] if device.type != "cpu" else None,
        "meets_target": ratio >= TARGET if device.type != "cpu" else None,
    }
    return {"rows": rows, "summary": summary}


def _vectorized(
    here: Round,
    width: int,
    compiled: bool,
    clients: np.ndarray,
    scale: Scale,
    products: bool = False,
) -> dict[str, Any]:
    try:
        row = _time("vectorized", here, here.vectorized(width, compiled, products), clients, scale)
    except Exception as error:  # out of memory, or no compiler: other widths may still run
        row = {
            "trainer": "vectorized",
            "device": here.device.type,
            "failed": repr(error).splitlines()[0],
        }
    return row | {
        "width": width,
        "compiled": compiled,
        "convolutions": "products" if products else "grouped",
    }


def _time(
    name: str, here: Round, trainer: Trainer, clients: np.ndarray, scale: Scale
) -> dict[str, Any]:
    cuda = here.device.type == "cuda"
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    seconds, remarks = [], []
    for _ in range(scale.repeats + 1):
        began = time.perf_counter()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            here.run(trainer, clients).cpu()  # waits for the device
        seconds.append(time.perf_counter() - began)
        remarks += [str(w.message).splitlines()[0] for w in caught]
    median = statistics.median(seconds[1:])
    return {
        "trainer": name,
        "device": here.device.type,
        "clients": len(clients),
        "examples": int(here.sizes[clients].sum()),
        "first_s": seconds[0],
        "round_s": median,
        "clients_per_s": len(clients) / median,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
        "warnings": sorted(set(remarks)),
    }
