"""fedlgm's own Ray engine, with the private step, the ledger and everything else that a real run does."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from benchmarks.contenders import work
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
    assembly = Assembly(recipes.load("fashion-mnist"))
    keys = KeyRing.from_seed(1)
    ray_engine.connect(None, work.WORKERS)
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
