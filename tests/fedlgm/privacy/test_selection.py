"""The cost of publishing the best of a random number of runs: known answers and refusals."""

from __future__ import annotations

import math

import pytest
from dp_accounting import dp_event
from dp_accounting.rdp import RdpAccountant

from fedlgm.errors import ConfigError
from fedlgm.privacy import Ledger, selection_epsilon
from fedlgm.privacy.accountants import ORDERS
from fedlgm.privacy.events import gaussian_event, repeat_event
from fedlgm.privacy.selection import selection_event

RATE, STEPS, DELTA = 0.1, 100, 1e-5
LAWS = ("logarithmic", "geometric", "poisson")
# One run's epsilon: for 5, 10, 30 and 100 expected runs, the cost under each law.
TABLE = {
    0.5: ((0.84, 1.00, 0.85), (0.91, 1.11, 1.17), (1.01, 1.26, 2.23), (1.10, 1.41, 3.86)),
    1: ((1.62, 1.90, 1.67), (1.76, 2.11, 2.27), (1.94, 2.40, 4.36), (2.11, 2.68, 8.01)),
    2: ((3.11, 3.57, 3.23), (3.36, 3.96, 4.35), (3.70, 4.51, 8.40), (4.03, 5.03, 16.97)),
    4: ((5.86, 6.53, 6.18), (6.33, 7.25, 8.14), (6.97, 8.24, 15.48), (7.60, 9.21, 35.52)),
    8: ((10.91, 11.95, 12.59), (11.70, 13.05, 16.74), (12.89, 14.65, 32.16), (14.04, 16.35, 75.65)),
}


def one_run(multiplier: float) -> float:
    event = repeat_event(gaussian_event(multiplier, RATE), STEPS)
    return float(RdpAccountant(orders=ORDERS).compose(event).get_epsilon(DELTA))


NOISE = {0.5: 7.872358, 1: 4.277611, 2: 2.422433, 4: 1.481676, 8: 0.994253}
"""Noise multiplier at which one run has this epsilon."""


@pytest.mark.parametrize("epsilon", TABLE)
def test_costs_of_searches(epsilon):
    z = NOISE[epsilon]
    assert one_run(z) == pytest.approx(epsilon, rel=2e-6)
    found = [
        [selection_epsilon(z, RATE, STEPS, DELTA, runs, law) for law in LAWS]
        for runs in (5, 10, 30, 100)
    ]
    assert [[round(value, 2) for value in row] for row in found] == [
        list(row) for row in TABLE[epsilon]
    ]


@pytest.mark.parametrize(
    ("epsilon", "z"), [(0.5, 13.9177), (1, 7.2161), (2, 3.8088), (4, 2.0999), (8, 1.2625)]
)
def test_noise_at_which_a_search_costs_what_one_run_did(epsilon, z):
    assert selection_epsilon(z, RATE, STEPS, DELTA, 10) == pytest.approx(epsilon, abs=1e-4)


def test_a_search_costs_more_than_one_run_and_less_than_all_runs():
    search, single = selection_epsilon(2.0, RATE, STEPS, DELTA, 10), one_run(2.0)
    everything = (
        RdpAccountant(orders=ORDERS)
        .compose(gaussian_event(2.0, RATE), 10 * STEPS)
        .get_epsilon(DELTA)
    )
    assert single < search < everything


def test_other_events_compose_beside_a_search():
    event = dp_event.RepeatAndSelectDpEvent(
        repeat_event(gaussian_event(2.0, RATE), STEPS), 10.0, 0.0
    )
    alone = RdpAccountant(orders=ORDERS).compose(event).get_epsilon(DELTA)
    assert selection_epsilon(2.0, RATE, STEPS, DELTA, 10) == alone


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"law": "uniform"}, "unknown law 'uniform'.*logarithmic, geometric, poisson"),
        ({"expected_runs": 1}, "above 1 for the logarithmic law, got 1"),
        ({"expected_runs": 0.5, "law": "poisson"}, "at least 1 for the poisson law"),
        ({"expected_runs": math.inf}, "expected_runs must be finite"),
        ({"noise_multiplier": 0.0}, "noise_multiplier must be finite and positive"),
        ({"sampling_rate": 0.0}, "sampling_rate must lie in"),
        ({"steps": 1.5}, "steps must be a whole number"),
        ({"delta": 0.0}, "delta must lie in"),
    ],
)
def test_arguments_outside_their_range_are_refused(wrong, message):
    right = {
        "noise_multiplier": 1.0,
        "sampling_rate": 0.1,
        "steps": 10,
        "delta": 1e-5,
        "expected_runs": 10,
    }
    with pytest.raises(ConfigError, match=message):
        selection_epsilon(**right | wrong)


@pytest.mark.parametrize("law", LAWS)
def test_a_search_in_the_ledger_costs_what_it_costs(law, tmp_path):
    search = selection_event(repeat_event(gaussian_event(1.5, RATE), STEPS), 10, law)
    with Ledger(tmp_path / "ledger.sqlite", "search") as ledger:
        ledger.charge(search, round=1, key="search")
    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        assert next(ledger.charges()).event == search
        expected = selection_epsilon(1.5, RATE, STEPS, DELTA, 10, law)
        assert ledger.epsilon(DELTA) == ledger.epsilon(DELTA, "rdp") == expected


def test_a_search_and_a_release_are_composed_at_the_orders_of_searches(tmp_path):
    search, release = selection_event(gaussian_event(2.0), 10), gaussian_event(4.0)
    with Ledger(tmp_path / "ledger.sqlite", "search") as ledger:
        ledger.charge(search, round=1, key="search")
        ledger.charge(release, round=2, key="release")
        expected = RdpAccountant(orders=ORDERS).compose(search).compose(release).get_epsilon(DELTA)
        assert ledger.epsilon(DELTA) == pytest.approx(float(expected), rel=1e-12)
