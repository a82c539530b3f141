"""Plans whose layers differ in size and noise, and the laws of their noise."""

from __future__ import annotations

import numpy as np
from scipy import stats

from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan, RunFacts, Sampling
from fedlgm.privacy.guarantee import Guarantee

SIZES = {"a": 20_000, "b": 7, "c": 40_000, "d": 20_001}
SIGMA = np.array([0.3, 5.0, 1.0, 40.0])
LAWS = {"gaussian": stats.norm, "laplace": stats.laplace}


def plan(
    family: str = "gaussian", sigma: np.ndarray = SIGMA, sizes: dict[str, int] = SIZES
) -> ReleasePlan:
    layers = LayerTable.from_sizes(sizes)
    facts = RunFacts(1.0, Sampling("poisson", 10, 0.5))
    return ReleasePlan(
        layers, np.ones(len(layers)), sigma, facts, Guarantee("proven", "test"), family=family
    )
