"""Local training of bundled recipes on a GPU beside a plain loop, and rounds with a cohort of
thousands.

The blocks of clients and the plain loop are those of `benchmarks.workloads`; every client's
examples are on the GPU before the loop starts. A turn ends when the GPU has done its work.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from benchmarks import scale, workloads
from fedlgm.aggregation.contributions import raw_updates
from fedlgm.training import inputs
from simulations.config.decided import resolve_auto

NAMES = (
    "ladp-cifar10-resnet18",
    "inid-resnet20-cifar10",
    "ladp-cifar10-cnn",
    "fashion-mnist",
    "text-gru",
    "text-transformer",
)
COHORT = {"clients": 50_000, "cohort": 5_000, "rounds": 10, "engine": "local"}


def cohorts(device: str = "cuda") -> dict[str, Any]:
    """Measure rounds with a linear model and 5,000 of 50,000 clients, on the GPU and on one core of
    the same machine.
    """
    runs = {place: scale.federation(**COHORT, device=place) for place in (device, "cpu")}  # type: ignore[arg-type]
    return {
        place: run | {"median": statistics.median(run["seconds"])} for place, run in runs.items()
    }


def beside_a_loop(name: str, turns: int, device: str) -> dict[str, Any]:
    """Measure one recipe."""
    block = workloads.Block.of(name, [f"training.device={device}"])
    assembly = resolve_auto(block.assembly, workers=1)
    section, model = assembly.recipe.training, assembly.model.initial()
    trainer = assembly.model.trainer()
    module = assembly.model.module().to(device)
    start = {key: value.clone() for key, value in module.state_dict().items()}
    block = block._replace(
        clients=[(inputs.to(x, torch.device(device)), y.to(device)) for x, y in block.clients]
    )

    def ours() -> None:
        for update in trainer.updates(model, block.tasks()):
            raw_updates(update)

    def loop() -> None:
        for task in block.tasks():
            workloads.plain(module, start, task, section.local, assembly.data.task)

    return {
        "recipe": name,
        "parameters": int(assembly.model.layers.size),
        "vectorize": section.vectorize,
        "clients": len(block.clients),
        "examples_per_client": [len(y) for _, y in block.clients],
        **workloads.compared(
            {"ours": partial(_timed, ours, device), "loop": partial(_timed, loop, device)}, turns
        ),
    }


def _timed(work: Callable[[], None], device: str) -> float:
    _wait(device)
    started = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - started


def _wait(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
