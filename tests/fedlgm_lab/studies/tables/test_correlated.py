from __future__ import annotations

import numpy as np
import pytest

from fedlgm.noise import correlation
from fedlgm_lab.studies.tables import correlated


def shared(name: str, share: float) -> float:
    """What one C costs two kinds of layers, and the more two C's taken from either kind would."""
    pair = correlated.DIFFERENT[name]
    costs = [correlated._cost(workload) for workload in pair]
    own = [
        correlation.get(
            "banded", correlated.ROUNDS, bands=correlated.BANDS, workload=w
        ).coefficients
        for w in pair
    ]
    least = [cost(c) for cost, c in zip(costs, own, strict=True)]
    found = correlated._cost_of_one_c(costs, least, own, share)
    for c in own:
        taken = np.array([cost(c) / best for cost, best in zip(costs, least, strict=True)]) @ [
            share,
            1 - share,
        ]
        assert found <= taken + 1e-9
    return found


def test_layers_that_are_treated_alike_want_one_matrix() -> None:
    assert shared("no difference", 0.3) == pytest.approx(1.0, abs=1e-9)


def test_matrices_of_their_own_would_gain_little() -> None:
    """The figures of docs/results/correlated.md: 1.7 % where layers differ most."""
    assert shared("momentum 0.9 / none", 0.65) == pytest.approx(1.017, abs=5e-4)
    assert shared("momentum 0.9 / 0.5", 0.65) == pytest.approx(1.006, abs=5e-4)
