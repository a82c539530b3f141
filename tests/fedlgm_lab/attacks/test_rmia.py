"""RMIA: what it scores, and that it needs fewer shadow models than LiRA."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from fedlgm.errors import ConfigError
from fedlgm_lab.attacks.lira import likelihood_ratios, pooled, random_halves
from fedlgm_lab.attacks.rmia import GAMMA, relative_ratios


def population(
    models: int, units: int = 2000, effect: float = 1.5
) -> tuple[np.ndarray, np.ndarray]:
    """Confidences with a mean of each unit's own, higher by `effect` where the model saw it."""
    rng = np.random.default_rng(3)
    membership = random_halves(units, models)
    scores = (
        2 * rng.standard_normal(units)
        + effect * membership
        + 0.7 * rng.standard_normal((models, units))
    )
    return scores, membership


@pytest.mark.parametrize("online", [True, False])
def test_members_are_found_with_few_models(online):
    found = pooled(*population(4), partial(relative_ratios, online=online))
    assert found.auc > 0.75


def test_it_works_where_lira_cannot_fit_its_normal_laws():
    scores, membership = population(4)
    with pytest.raises(ConfigError, match="fewer than two shadow models"):
        pooled(scores, membership, likelihood_ratios)


@pytest.mark.parametrize("online", [True, False])
def test_nothing_is_found_where_there_is_nothing(online):
    assert (
        abs(pooled(*population(6, effect=0.0), partial(relative_ratios, online=online)).auc - 0.5)
        < 0.02
    )


def test_the_score_is_the_share_of_units_that_are_dominated():
    membership = np.array([[True, False, True, False], [False, True, False, True]])
    shadows = np.zeros((2, 4))  # every Pr(x) is 1/2
    p = np.array([0.9, 0.3, 0.44, 0.1])
    found = relative_ratios(np.log(p / (1 - p)), shadows, membership)
    assert GAMMA == 2.0
    assert found.round(2).tolist() == [
        0.75,
        0.25,
        0.25,
        0.0,
    ]  # 0.9 is twice 0.44; 0.44 and 0.3 are twice 0.1 alone


def test_bad_input():
    scores, membership = population(4, 10)
    with pytest.raises(ConfigError, match="gamma"):
        relative_ratios(scores[0], scores, membership, gamma=0.5)
    with pytest.raises(ConfigError, match="needs shadow models"):
        relative_ratios(scores[0], scores[:1], membership[:1])
    with pytest.raises(ConfigError, match="the attack takes"):
        relative_ratios(scores[0], scores, membership[:2])


def test_halves_of_equal_size():
    halves = random_halves(11, 6, equal=True)
    assert halves.sum(axis=1).tolist() == [5, 6, 5, 6, 5, 6]
    assert (halves.sum(axis=0) == 3).all()
