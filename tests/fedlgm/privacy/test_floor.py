"""The least cost of a node's release."""

from __future__ import annotations

import pytest
from dp_accounting import dp_event

from fedlgm.privacy import composed_epsilon
from fedlgm.privacy.events import gaussian_event
from fedlgm.privacy.floor import at_least

EVENTS = {
    "nothing released": dp_event.NoOpDpEvent(),
    "much noise": dp_event.GaussianDpEvent(50.0),
    "little noise": dp_event.GaussianDpEvent(5.0),
    "sampled": dp_event.PoissonSampledDpEvent(0.1, dp_event.GaussianDpEvent(50.0)),
    "Laplace": dp_event.LaplaceDpEvent(50.0),
    "composed": dp_event.ComposedDpEvent(
        [dp_event.GaussianDpEvent(30.0), dp_event.GaussianDpEvent(40.0)]
    ),
}


@pytest.mark.parametrize("name", EVENTS)
def test_no_release_costs_less_than_the_floor_or_than_its_noise(name: str) -> None:
    event = EVENTS[name]
    charged, floor, cost = (
        composed_epsilon([(each, 1)], 1e-5)
        for each in (at_least(event, 10.0, 1e-5), gaussian_event(10.0), event)
    )
    assert charged >= max(floor, cost) * (1 - 1e-5)
    assert charged <= 2 * max(floor, cost)
