"""Numbers of releases, rows and trials are whole: a negative one would take from a sum, a broken
one is cut short."""

from __future__ import annotations

import math

import numpy as np
import pytest
from dp_accounting import dp_event

from fedlgm import privacy
from fedlgm.checks import check_count
from fedlgm.errors import ConfigError, LedgerError
from fedlgm.planning.facts import RunFacts, Sampling
from fedlgm.privacy.accounting import calibrate_levels, composed_epsilon
from fedlgm.privacy.events import decode, encode, gaussian_event, repeat_event
from fedlgm.privacy.ledger import Ledger
from fedlgm_lab.applications.datasets import fully_random_rows
from fedlgm_lab.applications.pca import covariance_plan

EVENT = gaussian_event(2.0)
COUNTS = [-1, 1.5, math.nan, math.inf, True, "2"]


@pytest.mark.parametrize("count", [*COUNTS, 0])
def test_what_is_counted_is_a_whole_number(count):
    with pytest.raises(ConfigError, match="rows must be a whole number of at least 1"):
        check_count("rows", count)
    check_count("rows", np.int64(3))
    check_count("rows", 3.0)


@pytest.mark.parametrize("count", COUNTS)
def test_composition_refuses(count):
    """-1 releases would take one off those beside them."""
    with pytest.raises(ConfigError, match="count must be a whole number"):
        composed_epsilon([(EVENT, 5), (EVENT, count)], 1e-5)
    with pytest.raises(ConfigError, match="count must be a whole number"):
        repeat_event(EVENT, count)
    with pytest.raises(ConfigError, match="level 1 must be a whole number"):
        calibrate_levels({1.0: count, 2.0: 3}, 1.0, 1e-5)


@pytest.mark.parametrize("count", [-1, 0, 1.5])
def test_a_ledger_refuses_an_event_of_such_a_count(tmp_path, count):
    event = dp_event.SelfComposedDpEvent(EVENT, count)
    with Ledger(tmp_path / "ledger.sqlite", owner="a run") as ledger:
        with pytest.raises((ConfigError, LedgerError), match="count must be a whole number"):
            ledger.charge(event, round=1, key="noise 1")
        assert ledger.position() == 0
    with pytest.raises(ConfigError, match="count must be a whole number"):
        decode({"type": "SelfComposedDpEvent", "event": encode(EVENT), "count": count})


def test_two_wrong_counts_do_not_make_a_right_one():
    nested = dp_event.SelfComposedDpEvent(EVENT, -1)
    with pytest.raises(ConfigError, match="count must be a whole number"):
        composed_epsilon([(nested, -1)], 1e-5)


def test_rows_dimensions_and_participations():
    for rows in (-1, 1.5):
        with pytest.raises(ConfigError, match="rows must be a whole number"):
            fully_random_rows(4, 2, rows, np.random.default_rng(0))
    with pytest.raises(ConfigError, match="dimension must be a whole number"):
        covariance_plan("gaussian-inid", 1.5, 1.0, 1e-5)
    with pytest.raises(ConfigError, match="max_participations must be a whole number"):
        RunFacts(1.0, Sampling("poisson", 10, 0.5), "replace-one", "local", max_participations=-1)
    with pytest.raises(ConfigError, match="steps must be a whole number"):
        privacy.epsilon(1.0, 1e-5, steps=1.5)
