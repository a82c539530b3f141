"""fedlgm's own Ray engine, with the private step, the ledger and everything else that a real run does.

With the argument "two-nodes" it runs on a cluster of two nodes with one core each.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.contenders import work
from benchmarks.contenders.cluster import one_core_nodes
from fedlgm.keys import KeyRing
from fedlgm.privacy import Ledger
from fedlgm.transcript import Transcript
from simulations import recipe as recipes
from simulations.assembly import Assembly
from simulations.engines import ray as ray_engine
from strategies import CohortSampler, LayerwiseFedAvg, ServerOptimizer


class _Cohorts(CohortSampler):
    """The benchmark's cohorts."""

    def cohort(self, round: int, exclude: frozenset[int] = frozenset()) -> np.ndarray:
        return work.cohort(round - 1)


def main() -> None:
    with one_core_nodes(2) if sys.argv[1:] == ["two-nodes"] else contextlib.nullcontext() as address:
        run(address)


def run(address: str | None) -> None:
    """Serve rounds on this machine, or on the cluster at `address`."""
    assembly = Assembly(recipes.load("fashion-mnist"))
    keys = KeyRing.from_seed(1)
    ray_engine.connect(address, work.WORKERS)
    grid = ray_engine.RayGrid(assembly, keys, work.WORKERS)
    sampler = _Cohorts(assembly.budget.sampling, keys)
    with tempfile.TemporaryDirectory() as directory, Ledger(Path(directory) / "ledger.sqlite", "benchmark") as ledger:
        strategy = LayerwiseFedAvg(
            assembly.mechanism, assembly.layers, assembly.budget, assembly.start(), sampler,
            ServerOptimizer("sgd", 1.0), keys, ledger, block_size=assembly.recipe.run.block_size, work=assembly.sizes,
        )  # fmt: skip

        def do_round(number: int) -> None:
            strategy.transcript = Transcript(number, strategy.transcript.models)
            strategy.start(grid, strategy.initial_arrays(), num_rounds=1)

        work.serve(do_round)
    ray_engine.shutdown()


if __name__ == "__main__":
    main()
