"""How sure the measured order of a setting's rules is."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from fedlgm_lab.studies.tables.recommend import agreement_of_halves


def test_halves_of_the_seeds_agree_where_rules_differ_and_disagree_where_seeds_do() -> None:
    sure = {
        "a": {1: 9.0, 2: 9.1, 3: 8.9},
        "b": {1: 5.0, 2: 5.2, 3: 5.1},
        "c": {1: 1.0, 2: 1.1, 3: 1.2},
    }
    assert agreement_of_halves(pd.DataFrame(sure)) == pytest.approx(1.0)
    opposite = {"a": {1: 1.0, 2: 3.0}, "b": {1: 2.0, 2: 2.0}, "c": {1: 3.0, 2: 1.0}}
    assert agreement_of_halves(pd.DataFrame(opposite)) == pytest.approx(-1.0)


def test_one_seed_has_no_halves() -> None:
    assert math.isnan(agreement_of_halves(pd.DataFrame({"a": {1: 1.0}, "b": {1: 2.0}, "c": {}})))


def test_seeds_that_one_rule_lacks_are_left_out() -> None:
    figures = pd.DataFrame({"a": {1: 1.0, 2: 1.0, 3: 9.0}, "b": {1: 2.0, 2: 2.0}})
    assert agreement_of_halves(figures) == pytest.approx(1.0)


def test_many_seeds_are_divided_at_random_in_the_same_way_again() -> None:
    rng = np.random.default_rng(1)
    figures = pd.DataFrame(rng.normal([0.0, 0.3, 0.6], 1.0, (30, 3)), columns=["a", "b", "c"])
    agreement = agreement_of_halves(figures)
    assert agreement == agreement_of_halves(figures)
    assert 0 < agreement < 1
    assert agreement_of_halves(figures + 100 * np.arange(3)) == pytest.approx(1.0)
