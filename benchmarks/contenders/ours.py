"""fedlgm: plan, bounds, ledger on disk and noise of a real run, without its evaluation and files.

Without an argument, the contender runs the recipe `fashion-mnist` as its users get it, with the
engine `auto` and, if the machine has it, the compiled kernel. The argument "torch" trains with
PyTorch. "ray" uses Ray on this machine. "two-nodes" uses Ray on a cluster of two nodes with one
core each.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flwr.serverapp import Grid

from benchmarks.contenders import work
from benchmarks.contenders.cluster import one_core_nodes
from fedlgm.noise.keys import KeyRing
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy import Ledger
from simulations import engines
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly
from simulations.config.decided import resolve_auto, resolve_hardware
from simulations.engines import EngineOptions
from simulations.engines.base import GridEngine
from strategies import AnyNode, CohortSampler, LayerwiseFedAvg, Releaser, ServerOptimizer


class _Cohorts(CohortSampler):
    """Draws the cohorts of a work module."""

    job: Any = work

    def cohort(self, round: int, exclude: frozenset[int] = frozenset()) -> np.ndarray:
        return np.asarray(self.job.cohort(round - 1))


def serve(
    grid: Grid,
    assembly: Assembly,
    keys: KeyRing,
    job: Any = work,
    figures: Callable[[], dict[str, float]] = dict,
) -> None:
    """Serve private rounds of the work module `job` over `grid`; each answer holds the `figures` of
    its round.
    """
    sampler = _Cohorts(assembly.privacy.facts.sampling, keys)
    sampler.job = job
    with (
        tempfile.TemporaryDirectory() as directory,
        Ledger(Path(directory) / "ledger.sqlite", "benchmark") as ledger,
    ):
        strategy = LayerwiseFedAvg(
            assembly.privacy.method, assembly.privacy.start(), sampler, ServerOptimizer("sgd", 1.0),
            Releaser(keys, ledger, assembly.model.numerics), AnyNode(assembly.data.sizes),
        )  # fmt: skip

        arrays = strategy.initial_arrays()

        def do_round(number: int) -> dict[str, float]:
            nonlocal arrays
            strategy.transcript = Transcript(number, strategy.transcript.models)
            arrays = strategy.start(grid, arrays, num_rounds=1).arrays
            return figures()

        work.serve(do_round)


def main() -> None:
    how = set(sys.argv[1:])
    with one_core_nodes(2) if "two-nodes" in how else contextlib.nullcontext() as address:
        changes = ["training.kernel=torch"] if "torch" in how else []
        if work.DEVICE.type != "cpu":
            changes.append(f"training.device={work.DEVICE}")
        recipe = resolve_hardware(recipes.load("fashion-mnist", changes))
        assembly, keys = Assembly(recipe), KeyRing.from_seed(1)
        options = EngineOptions(workers=work.WORKERS, ray_address=address)
        engine = engines.get(
            "ray" if "ray" in how else "auto", options, device=recipe.training.device
        )
        assert isinstance(engine, GridEngine)
        with engine.start(assembly):
            assembly.check()
            engine.wait()
            assembly = resolve_auto(assembly, work.WORKERS)
            with engine.grid(assembly, keys) as grid:
                serve(grid, assembly, keys)


if __name__ == "__main__":
    main()
