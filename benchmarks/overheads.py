"""fedlgm's own costs, as ratios: `python -m benchmarks.overheads --json`.

* wall seconds of `import fedlgm` and of `fedlgm --help` (fresh processes, medians);
* milliseconds to plan ResNet-152's layers;
* time to clip an update of 11.2 million parameters and add noise to it on one core, divided by the
  time of `torch.randn` of the same size;
* time of a private round divided by the time of the same round without privacy, with the same
  engine and clients;
* seconds to divide 60,000 samples among 500 clients, and a million samples among 100,000 clients.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedlgm import data, mechanisms
from fedlgm.aggregation import BoundedSum
from fedlgm.noise.keys import KeyRing
from fedlgm.noise.release import release
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import RunFacts, Sampling
from fedlgm.planning.transcript import Transcript
from fedlgm.training import models
from fedlgm.training.devices import torch_threads

FACTS = RunFacts(1.6747, Sampling("poisson", 500, 0.1))


def processes(repeats: int) -> dict[str, float]:
    command = str(Path(sys.executable).parent / "fedlgm")
    jobs = {
        "import_seconds": [sys.executable, "-c", "import fedlgm"],
        "help_seconds": [command, "--help"],
    }
    jobs["import_everything_seconds"] = [
        sys.executable,
        "-c",
        "import fedlgm.mechanisms, fedlgm.planning.plan, fedlgm.training",
    ]
    return {
        name: statistics.median(_wall(job) for _ in range(repeats)) for name, job in jobs.items()
    }


def plan_milliseconds(repeats: int) -> float:
    with torch.device("meta"):
        layers = LayerTable.from_module(models.build("resnet152", in_shape=(3, 32, 32), classes=10))
    transcript = Transcript.start(torch.zeros(1))
    mechanism = mechanisms.get("snr-consistent")
    return 1e3 * statistics.median(
        _timed(lambda: mechanism.plan(layers, FACTS, transcript)) for _ in range(repeats)
    )


def bound_and_release(repeats: int) -> dict[str, float]:
    layers = LayerTable.from_module(models.build("resnet18", in_shape=(3, 32, 32), classes=10))
    plan = mechanisms.get("snr-consistent").plan(layers, FACTS, Transcript.start(torch.zeros(1)))
    update, keys = torch.randn(layers.size), KeyRing(1)

    total = BoundedSum.empty(plan)

    def step() -> None:
        # The sum already exists, as it does for every client of a round except the first.
        total.add(update)
        release(total.total, plan, keys, 1)

    scratch = torch.empty(layers.size)
    jobs = [step, lambda: torch.randn(layers.size), scratch.normal_, lambda: BoundedSum.empty(plan)]
    with torch_threads(1):
        ours, randn, in_place, fresh = interleaved(jobs, repeats)
    return {
        "milliseconds": 1e3 * ours,
        "randn_milliseconds": 1e3 * randn,
        "randn_in_place_milliseconds": 1e3 * in_place,
        "fresh_sum_milliseconds": 1e3 * fresh,
        "ratio": ours / randn,
        "ratio_to_in_place": ours / in_place,
    }


def private_round(repeats: int) -> dict[str, float]:
    from flwr.app import ConfigRecord

    from benchmarks.in_process import served
    from simulations.config import recipe as recipes
    from simulations.config.assembly import Assembly

    def runner(name: str, directory: Path) -> Callable[[], None]:
        overrides = [f"mechanism={{name = '{name}'}}"] if name == "none" else []
        assembly = Assembly(recipes.load("fashion-mnist", overrides))
        strategy, grid = served(assembly, directory / f"{name}.sqlite")
        start = strategy.transcript

        def one_round() -> None:
            strategy.transcript = start  # every round has the same cohort and the same batches
            replies = grid.send_and_receive(
                strategy.configure_train(1, strategy.initial_arrays(), ConfigRecord(), grid)
            )
            strategy.aggregate_train(1, replies)

        return one_round

    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        private, plain = interleaved(
            [runner(n, Path(directory)) for n in ("snr-consistent", "none")], repeats
        )
    return {"private_seconds": private, "plain_seconds": plain, "ratio": private / plain}


def partitions(repeats: int) -> dict[str, float]:
    draw = np.random.default_rng(0)
    few, many = draw.integers(0, 10, 60_000), draw.integers(0, 10, 1_000_000)
    jobs = {
        "500_dirichlet": lambda: data.partition(few, 500, "dirichlet", alpha=0.5),
        "100000_dirichlet_large": lambda: data.partition(
            many, 100_000, "dirichlet-large", alpha=0.1
        ),
    }
    return dict(zip(jobs, interleaved(list(jobs.values()), min(repeats, 3)), strict=True))


def interleaved(jobs: list[Callable[[], Any]], repeats: int) -> list[float]:
    """Return the median seconds of each job. The jobs run in turn, after one run of each that warms
    up.
    """
    times: list[list[float]] = [[] for _ in jobs]
    for turn in range(repeats + 1):
        for job, own in zip(jobs, times, strict=True):
            seconds = _timed(job)
            if turn > 0:
                own.append(seconds)
    return [float(np.median(own)) for own in times]


def _timed(job: Callable[[], Any]) -> float:
    started = time.perf_counter()
    job()
    return time.perf_counter() - started


def _wall(command: list[str]) -> float:
    return _timed(lambda: subprocess.run(command, check=True, capture_output=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--json", action="store_true", help="print JSON (always done; kept for symmetry)"
    )
    parser.add_argument("--repeats", type=int, default=9)
    repeats = parser.parse_args().repeats
    result = processes(repeats) | {
        "resnet152_plan_milliseconds": plan_milliseconds(repeats),
        "bound_and_release_resnet18": bound_and_release(repeats),
        "private_round_fashion_mnist": private_round(repeats),
        "partition_seconds": partitions(repeats),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
