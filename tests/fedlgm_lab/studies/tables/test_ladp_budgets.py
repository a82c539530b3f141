"""Equations 17 to 19 of the LaDP-FL paper, with known answers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from fedlgm_lab.studies.tables.ladp_budgets import charged_budgets

DELTA, REACHED = 0.02, 8.0
CONSTANT = math.sqrt(2 * math.log(1.25 / DELTA))


def row(sigma: Any, present: int = 10, clip: Any = 4.0, clients: Any = None) -> dict[str, Any]:
    made = {
        "sigma": np.atleast_1d(sigma).tolist(),
        "clip": np.atleast_1d(clip).tolist(),
        "present": present,
    }
    return made if clients is None else {**made, "clients": {"sigma": clients}}


def budgets(
    rows: list[dict[str, Any]], layers: int, share: float = 0.1, reached: float | None = REACHED
) -> list[float]:
    return charged_budgets(rows, layers, share, DELTA, reached)  # type: ignore[arg-type]


def test_full_dp_has_the_slope_of_the_paper() -> None:
    """q = 50 / 500, epsilon = 0.2, 10 of 100 clients in each round, and the 18 layers of
    ResNet-18."""
    assert budgets([row(CONSTANT * REACHED / 0.2)] * 3, layers=18) == pytest.approx(
        [3.6, 7.2, 10.8]
    )


def test_a_layer_without_noise_costs_nothing_and_more_noise_costs_less() -> None:
    noise = CONSTANT * REACHED / 0.2
    uploads = [[noise, 0.0, 2 * noise, noise], [0.0, 0.0, 0.0, 0.0]]
    assert budgets([row(noise, 2, clients=uploads)], layers=4) == pytest.approx([0.1 * 0.2 * 2.5])


def test_noise_that_follows_a_layers_bound_costs_the_same_for_every_bound() -> None:
    bounds = np.array([0.5, 2.0])
    noise = CONSTANT * 2 * bounds / 0.2
    assert budgets([row(noise, 1, clip=bounds)], layers=2, reached=None) == pytest.approx(
        [0.1 * 0.2 * 2]
    )
    assert budgets([row(noise, 1, clip=bounds)], layers=2)[0] > 0.1
