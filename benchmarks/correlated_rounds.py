"""Times of correlated noise: `python -m benchmarks.correlated_rounds` (a section of
docs/results/data/correlated.md).

All times are processor time on one core.

* Milliseconds of a round's noise: independent noise, noise with 10 bands, and their ratio. The
  memory that the correlated noise uses is also reported.
* For comparison, milliseconds of one batch of 32 examples on a client. The time of a whole round is
  computed from these times, for ten clients with ten batches each.
* Seconds of whole rounds of `fashion-mnist` with independent and with correlated noise (`--rounds
  0` skips them).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord

from fedlgm import mechanisms
from fedlgm.mechanisms.method import Method
from fedlgm.noise import correlation
from fedlgm.noise.correlation import Correlation
from fedlgm.noise.correlation.stream import CorrelatedStream
from fedlgm.noise.keys import KeyRing
from fedlgm.noise.release import release
from fedlgm.noise.run_noise import RunNoise
from fedlgm.planning.facts import RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.transcript import Transcript
from fedlgm.training import models
from fedlgm.training.devices import torch_threads
from fedlgm_lab.studies.tables.pages import table
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly

BANDS, ROUNDS = 10, 300
MODELS = {
    "CNN, FashionMNIST": ("cnn", (1, 28, 28)),
    "CNN, CIFAR-10": ("cifar-cnn", (3, 32, 32)),
    "ResNet-18": ("resnet18", (3, 32, 32)),
}

Row = dict[str, Any]


def noise_cost(repeats: int) -> list[Row]:
    """Measure the cost of a round's release: drawing, correlating, adding and rounding the noise.

    The timed rounds come after `BANDS` rounds, when the buffer of past noise is full.
    """
    rows = []
    for name, (kind, shape) in MODELS.items():
        module = models.build(kind, in_shape=shape, classes=10)
        layers = LayerTable.from_module(module)
        jobs = [
            _releases(layers, noise)
            for noise in (None, correlation.get("banded", ROUNDS, bands=BANDS))
        ]
        with torch_threads(1):
            for _ in range(BANDS):
                jobs[1]()
            independent, correlated = interleaved(jobs, repeats)
            batch = interleaved(
                [lambda module=module, shape=shape: step(module, shape)], max(1, repeats // 5)
            )[0]
        stream = CorrelatedStream(correlation.get("banded", ROUNDS, bands=BANDS), layers.size)
        memory = sum(
            value.nbytes for value in vars(stream).values() if isinstance(value, torch.Tensor)
        )
        rows.append(
            {
                "model": name,
                "parameters": layers.size,
                "independent_ms": 1e3 * independent,
                "correlated_ms": 1e3 * correlated,
                "ratio": correlated / independent,
                "batch_ms": 1e3 * batch,
                "round_ratio": (correlated + 100 * batch) / (independent + 100 * batch),
                "memory_mb": memory / 1e6,
                "vectors": memory / (4 * layers.size),
            }
        )
    return rows


def step(module: torch.nn.Module, shape: tuple[int, ...]) -> None:
    """Run the forward and backward pass of one batch of 32 examples."""
    x, y = torch.zeros(32, *shape), torch.zeros(32, dtype=torch.long)
    torch.nn.functional.cross_entropy(module(x), y).backward()


def _releases(layers: LayerTable, noise: Correlation | None) -> Callable[[], None]:
    facts = RunFacts(1.5, Sampling("poisson", 500, 0.1), rounds=ROUNDS)
    if noise is not None:
        facts = replace(facts, sampling=Sampling("cyclic", 500, 0.1, BANDS), noise=noise)
    method = Method(mechanisms.get("snr-consistent"), layers, facts)
    plan = method.plan(Transcript.start(torch.zeros(layers.size)))
    total, keys, run_noise, round = (
        torch.zeros(plan.size, dtype=torch.float64),
        KeyRing(1),
        RunNoise(),
        0,
    )

    def one() -> None:
        nonlocal round
        own = plan if noise is None else replace(plan, position=round)
        round += 1
        release(total, own, keys, round, run_noise=run_noise)

    return one


def whole_rounds(rounds: int) -> Row:
    """Measure the seconds of rounds of `fashion-mnist` with independent and with correlated noise,
    in this process.

    A run has 500 clients in groups that take turns, and 50 clients in each round. The rounds of the
    two runs alternate.
    """
    from fedlgm_lab.studies.tables.in_process import served

    def runner(noise: str, directory: Path) -> Callable[[], None]:
        assembly = Assembly(
            recipes.load("fashion-mnist", ["federation.sampling=cyclic", f"privacy.noise={noise}"])
        )
        strategy, grid = served(assembly, directory / f"{noise}.sqlite")
        number, arrays = 0, strategy.initial_arrays()

        def one() -> None:
            nonlocal number, arrays
            number += 1
            replies = grid.send_and_receive(
                strategy.configure_train(number, arrays, ConfigRecord(), grid)
            )
            arrays = strategy.aggregate_train(number, replies)[0] or arrays

        return one

    with tempfile.TemporaryDirectory() as directory:
        jobs = [runner(noise, Path(directory)) for noise in ("independent", "banded")]
        with torch_threads(1):
            independent, correlated = interleaved(jobs, rounds)
    return {
        "rounds": rounds,
        "independent_seconds": independent,
        "correlated_seconds": correlated,
        "ratio": correlated / independent,
    }


def interleaved(jobs: list[Callable[[], Any]], repeats: int) -> list[float]:
    """Return the median seconds of this process's time for each job. The jobs run in turn, after
    one run of each that warms up.

    Wall time would also measure other processes.
    """
    times: list[list[float]] = [[] for _ in jobs]
    for turn in range(repeats + 1):
        for job, own in zip(jobs, times, strict=True):
            started = time.process_time()
            job()
            if turn > 0:
                own.append(time.process_time() - started)
    return [float(np.median(own)) for own in times]


def main() -> None:
    """Run the benchmark that the module describes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15, help="releases to time (default 15)")
    parser.add_argument("--rounds", type=int, default=8, help="whole rounds to time (default 8)")
    options = parser.parse_args()
    whole = [[whole_rounds(options.rounds)]] if options.rounds else []
    for rows in [noise_cost(options.repeats), *whole]:
        cells = (
            [f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()] for row in rows
        )
        print(f"{table(list(rows[0]), cells)}\n")


if __name__ == "__main__":
    main()
