from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from scipy.stats import norm
from torch import nn

from fedlgm import data
from fedlgm.errors import ConfigError
from fedlgm.training import models
from fedlgm_lab.attacks.lira import confidence_logits, likelihood_ratios, pooled, random_halves


def test_confidence_is_the_logit_of_the_true_class():
    logits = torch.tensor([[1.0, -2.0, 0.5], [300.0, 0.0, 1.0]])
    p = torch.softmax(logits[0].double(), 0)
    found = confidence_logits(nn.Identity(), logits, torch.tensor([2, 0]))
    assert found[0] == pytest.approx(float(torch.log(p[2] / (1 - p[2]))))
    assert found[1] == pytest.approx(300 - np.log(1 + np.e))  # where p rounds to 1


def test_every_example_is_in_half_of_the_models_also_without_a_pair():
    halves = random_halves(50, 10, seed=3)
    assert (halves.sum(axis=0) == 5).all()
    assert (halves[2:].sum(axis=0) == 4).all()
    assert not (halves[0] == halves[2]).all()


def simulated(models: int, examples: int, effect: float) -> tuple[np.ndarray, np.ndarray]:
    """Confidences with a mean of each example's own, higher by `effect` where the model saw it."""
    rng = np.random.default_rng(0)
    membership = random_halves(examples, models)
    scores = (
        5 * rng.standard_normal(examples)
        + effect * membership
        + rng.standard_normal((models, examples))
    )
    return scores, membership


@pytest.mark.parametrize("online", [True, False])
def test_reaches_the_best_possible_auc(online):
    result = pooled(*simulated(64, 400, 1.5), partial(likelihood_ratios, online=online))
    # Two normal laws 1.5 apart; the estimated means cost a little.
    assert norm.cdf(1.5 / np.sqrt(2)) - 0.02 < result.auc < norm.cdf(1.5 / np.sqrt(2)) + 0.01


@pytest.mark.parametrize("online", [True, False])
def test_finds_nothing_where_there_is_nothing(online):
    result = pooled(*simulated(16, 2000, 0.0), partial(likelihood_ratios, online=online))
    assert abs(result.auc - 0.5) < 0.01


def test_online_score_is_the_likelihood_ratio():
    membership = np.array([[True], [True], [True], [False], [False], [False]])
    shadows = np.array([[1.0], [2.0], [3.0], [-1.0], [0.0], [1.0]])
    found = likelihood_ratios(np.array([2.5]), shadows, membership, shared_variance=False)
    std = np.std([1.0, 2.0, 3.0])
    assert found[0] == pytest.approx(norm.logpdf(2.5, 2.0, std) - norm.logpdf(2.5, 0.0, std))
    offline = likelihood_ratios(
        np.array([2.5]), shadows, membership, online=False, shared_variance=False
    )
    assert offline[0] == pytest.approx(np.log(norm.cdf(2.5 / std)))


def test_members_of_an_overfitted_model_are_found():
    digits = data.load("digits")
    x, y = torch.from_numpy(digits.train_x[:200]), torch.from_numpy(digits.train_y[:200])
    membership = random_halves(200, 16)
    scores = []
    for seed, row in enumerate(membership):
        model = models.build("mlp", in_shape=(1, 8, 8), classes=10, hidden=[64], activation="relu")
        optimizer, order = (
            torch.optim.Adam(model.parameters(), lr=3e-3),
            torch.Generator().manual_seed(seed),
        )
        own = torch.from_numpy(np.flatnonzero(row))
        for _ in range(60):
            for batch in own[torch.randperm(len(own), generator=order)].split(50):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
                optimizer.step()
        scores.append(confidence_logits(model, x, y))
    for online in (True, False):
        result = pooled(np.stack(scores), membership, partial(likelihood_ratios, online=online))
        assert result.auc_low > 0.6
        assert result.rates[1].low > 0.01  # at a false-positive rate of 1 %: better than guessing


def test_refuses():
    with pytest.raises(ConfigError, match="pairs of models, got 5"):
        random_halves(10, 5)
    scores, membership = simulated(4, 3, 0.0)
    with pytest.raises(ConfigError, match="fewer than two shadow models that were trained with it"):
        likelihood_ratios(scores[0], scores[1:], np.zeros((3, 3), dtype=bool))
    with pytest.raises(ConfigError, match="at least 4 models"):
        pooled(scores[:2], membership[:2], likelihood_ratios)
    with pytest.raises(ConfigError, match=r"scores and membership \[M, n\] of the same models"):
        pooled(scores[:, 1:], membership, likelihood_ratios)
    with pytest.raises(ConfigError, match="takes a target"):
        likelihood_ratios(scores[0], scores[1:, :2], membership[1:])
