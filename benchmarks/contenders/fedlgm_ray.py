"""fedlgm's own Ray engine: plan, bounds, ledger on disk and noise of a real run, without its evaluation and files.

With the argument "two-nodes" it runs on a cluster of two nodes with one core each.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contenders import work
from benchmarks.contenders.cluster import one_core_nodes
from fedlgm.keys import KeyRing
from fedlgm.privacy import Ledger
from fedlgm.transcript import Transcript
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly
from simulations.engines import ray as ray_engine
from simulations.launch import prepared
from strategies import AnyNode, CohortSampler, LayerwiseFedAvg, Releaser, ServerOptimizer


class _Cohorts(CohortSampler):
    """The cohorts of a work module."""

    job: Any = work

    def cohort(self, round: int, exclude: frozenset[int] = frozenset()) -> np.ndarray:
        return np.asarray(self.job.cohort(round - 1))


def serve(
    grid: ray_engine.RayGrid,
    assembly: Assembly,
    keys: KeyRing,
    job: Any = work,
    figures: Callable[[], dict[str, float]] = dict,
) -> None:
    """Serve private rounds of the work module `job` over `grid`; each answer holds the `figures` of its round."""
    sampler = _Cohorts(assembly.facts.sampling, keys)
    sampler.job = job
    with tempfile.TemporaryDirectory() as directory, Ledger(Path(directory) / "ledger.sqlite", "benchmark") as ledger:
        strategy = LayerwiseFedAvg(
            assembly.method, assembly.start(), sampler, ServerOptimizer("sgd", 1.0),
            Releaser(keys, ledger, assembly.numerics), AnyNode(assembly.sizes),
        )  # fmt: skip

        arrays = strategy.initial_arrays()

        def do_round(number: int) -> dict[str, float]:
            nonlocal arrays
            strategy.transcript = Transcript(number, strategy.transcript.models)
            arrays = strategy.start(grid, arrays, num_rounds=1).arrays
            return figures()

        work.serve(do_round)


def main() -> None:
    with one_core_nodes(2) if sys.argv[1:] == ["two-nodes"] else contextlib.nullcontext() as address:
        assembly, keys = Assembly(recipes.load("fashion-mnist")), KeyRing.from_seed(1)
        with prepared(assembly, "ray", work.WORKERS, address) as actors:
            assert actors is not None
            serve(actors.serving(assembly, keys), assembly, keys)


if __name__ == "__main__":
    main()
