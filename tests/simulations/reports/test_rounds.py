from __future__ import annotations

import math

import numpy as np
import pytest

from fedlgm import correlation
from fedlgm.correlation import Workload
from fedlgm.facts import RunFacts, Sampling
from simulations.reports.rounds import noise_over_rounds


def test_a_layer_that_is_not_released_has_no_noise_over_the_rounds() -> None:
    facts = RunFacts(
        1.0, Sampling("cyclic", 40, 0.25, 4), rounds=6, epsilon=8.0, delta=1e-5,
        noise=correlation.get("banded", 6, bands=4),
    )  # fmt: skip
    found = noise_over_rounds(facts, np.array([2.0, math.inf]), np.array([9, 4]), Workload())
    assert found is not None
    first, second = found.layer_rows(["a", "b"])
    assert first["norms"] == pytest.approx([row["single"] for row in found.rows()])
    assert second["norms"] == [None] * len(found.rows())
