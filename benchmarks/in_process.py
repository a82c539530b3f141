"""A server and all of its clients in this process, for benchmarks of single rounds."""

from __future__ import annotations

from pathlib import Path

from clients import AnyClient
from fedlgm.noise.keys import KeyRing
from fedlgm.privacy import Ledger
from simulations.config.assembly import Assembly
from simulations.engines.local import LocalGrid
from strategies import AnyNode, CohortSampler, LayerwiseFedAvg, Releaser, ServerOptimizer


def served(assembly: Assembly, ledger: Path, seed: int = 1) -> tuple[LayerwiseFedAvg, LocalGrid]:
    """Make a strategy with a separate ledger, and the Grid that reaches the run's clients."""
    keys = KeyRing.from_seed(seed)
    strategy = LayerwiseFedAvg(
        assembly.privacy.method,
        assembly.privacy.start(),
        CohortSampler(assembly.privacy.facts.sampling, keys),
        ServerOptimizer("sgd", 1.0),
        Releaser(keys, Ledger(ledger, ledger.stem), assembly.model.numerics),
        AnyNode(assembly.data.sizes),
    )
    return strategy, LocalGrid.of(assembly.client(keys, AnyClient()))
