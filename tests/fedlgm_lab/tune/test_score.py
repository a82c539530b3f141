"""Scores of a search on private data: what they release, and what a search with them costs."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.special import ndtri
from torch import nn

import simulations
from fedlgm.errors import ConfigError
from fedlgm.noise.keys import KeyRing
from fedlgm.privacy import Ledger, calibrate
from fedlgm.privacy.accountants import ORDERS
from fedlgm.privacy.accounting import composed_epsilon
from fedlgm.privacy.events import decode, encode, gaussian_event
from fedlgm.privacy.selection import draw_runs, selection_event
from fedlgm_lab.tune.score import PrivateScore
from simulations import arguments
from simulations.config.assembly import Assembly
from simulations.config.recipe import load
from tests.fedlgm_lab.tune.test_tune import SHORT, lower_bound

CHANGES = [f"{key}={value}" for key, value in SHORT.items()]
UNITS = {
    "client": ("digits", CHANGES),
    "user": ("digits", [*CHANGES, "privacy.unit=user", "federation.users=10"]),
    "example": (
        "dp-sgd-digits",
        ["federation.rounds=2", "privacy.delta=1e-4", "training.batch_size=1442"],
    ),
}


def _score(unit: str = "client", epsilon: float = 1.0) -> tuple[PrivateScore, nn.Module]:
    recipe, changes = UNITS[unit]
    assembly = Assembly(load(recipe, changes))
    score = PrivateScore.calibrated(assembly, epsilon)
    return replace(score, x=score.x.clone()), assembly.model.module()  # type: ignore[union-attr]  # tests change it


@pytest.mark.parametrize("unit", UNITS)
def test_a_unit_moves_the_sum_by_at_most_its_bound_and_no_other_unit_s_term(unit):
    score, module = _score(unit)
    before = score.contributions(module)
    filled = [rows for rows in score.rows if len(rows)]
    assert len(before) == len(filled)
    assert before.abs().max() <= 0.5 == score.plan.clip[0]
    assert score.plan.denominator == {"client": 30, "user": 10, "example": len(score.y)}[unit]
    assert sum(map(len, filled)) == len(
        np.unique(np.concatenate(filled))
    )  # no row counts in two units
    score.x[torch.from_numpy(filled[3]).long()] = 1e6  # one unit's examples become others
    changed = (score.contributions(module) - before).flatten().nonzero().flatten()
    assert set(changed.tolist()) <= {3}
    score.x[torch.from_numpy(filled[3]).long()] = torch.nan
    assert float(score.contributions(module)[3].abs()) <= 0.5


def test_the_noise_is_that_of_the_stated_epsilon(monkeypatch):
    score, module = _score(epsilon=1.0)
    terms = score.contributions(module)
    exact = 0.5 + float(terms.sum()) / 30
    monkeypatch.setattr(PrivateScore, "contributions", lambda *_: terms)
    summary: dict = {}
    drawn = [score.of(summary, module, KeyRing.from_seed(seed)) for seed in range(300)]
    assert np.std(drawn) == pytest.approx(score.noise, rel=0.15)
    assert np.mean(drawn) == pytest.approx(exact, abs=4 * score.noise / math.sqrt(300))
    assert score.noise == pytest.approx(calibrate(1.0, 1e-3, steps=1) * 0.5 / 30)
    assert composed_epsilon([(event, 1) for event in score.events()], 1e-3) <= 1.0
    ring = KeyRing.from_seed(None)
    assert score.of(summary, module, ring.derive(b"a")) != score.of(
        summary, module, ring.derive(b"b")
    )


def test_under_replacement_a_term_may_move_by_its_whole_range():
    relation = ["privacy.relation='replace-one'", "federation.sampling='fixed'"]
    score = PrivateScore.calibrated(Assembly(load("digits", [*CHANGES, *relation])), 1.0)
    assert score.noise == pytest.approx(2 * _score()[0].noise)


@pytest.mark.parametrize("law", ["logarithmic", "geometric"])
def test_the_search_costs_what_theorem_2_says_of_a_run_with_its_score(law, tmp_path):
    """r(a) is the run's plus the score's divergence; computed here from the theorem's text."""
    z, zs, delta, mean = 2.0, 5.0, 1e-5, 10.0
    orders = np.array(ORDERS)
    r = orders / (2 * z**2) + orders / (2 * zs**2)
    if law == "geometric":
        eta, gamma = 1.0, 1 / mean
    else:
        low, high = 1e-9, 1 - 1e-9
        for _ in range(200):
            gamma = math.sqrt(low * high)
            low, high = (
                (gamma, high) if (1 / gamma - 1) / math.log(1 / gamma) > mean else (low, gamma)
            )
        eta = 0.0
    best = min((1 + eta) * ((1 - 1 / orders) * r + math.log(1 / gamma) / orders))
    rdp = r + best + math.log(mean) / (orders - 1)
    by_hand = min(rdp + np.log1p(-1 / orders) - (np.log(delta) + np.log(orders)) / (orders - 1))
    event = selection_event(composed(gaussian_event(z), gaussian_event(zs)), mean, law)
    assert decode(json.loads(json.dumps(encode(event)))) == event
    assert composed_epsilon([(event, 1)], delta) == pytest.approx(by_hand, rel=1e-4)


def composed(*events):
    from dp_accounting import dp_event

    return dp_event.ComposedDpEvent(list(events))


@pytest.mark.parametrize("law", ["logarithmic", "geometric"])
def test_an_audit_stays_below_the_epsilon_with_the_scores_and_exceeds_the_one_without(law):
    """Runs reveal little, scores much; the largest score is published, and its distribution is
    known."""
    run, scored, delta, trials, rng = (
        gaussian_event(20.0),
        gaussian_event(0.7),
        1e-3,
        200_000,
        np.random.default_rng(4),
    )
    bests = []
    for value in (0.0, 1.0):
        counts = np.array([draw_runs(5.0, law, rng) for _ in range(2000)])[
            rng.integers(2000, size=trials)
        ]
        bests.append(value + 0.7 * ndtri(rng.random(trials) ** (1 / counts)))
    half = trials // 2
    thresholds = np.quantile(bests[1][:half], np.linspace(0.5, 0.9999, 40))
    found = max(lower_bound(bests[1][half:] > t, bests[0][half:] > t, delta) for t in thresholds)
    costs = {
        "charged": composed_epsilon([(selection_event(composed(run, scored), 5.0, law), 1)], delta),
        "not charged": composed_epsilon([(selection_event(run, 5.0, law), 1)], delta),
    }
    assert costs["not charged"] < found < costs["charged"]


def test_a_search_by_private_scores_charges_them_and_publishes_the_best_one(tmp_path):
    search = {"federation.server_lr": [0.1, 0.2]}
    options = {"search": search, "expected_runs": 3, "overrides": SHORT | {"run.seed": 3}}
    found = simulations.tune("digits", folder=tmp_path / "search", score_epsilon=0.5, **options)
    rows = [
        json.loads(line)
        for line in (found.folder / "private" / "runs.jsonl").read_text().splitlines()
    ]
    best = max(rows, key=lambda row: row["score"])
    assert (found.settings, found["published_score"]) == (best["settings"], best["score"])
    assert "private training examples" in found["score"]
    with Ledger(found.folder / "ledger.sqlite") as ledger:
        assert ledger.epsilon(1e-3) == found.epsilon
    without = simulations.tune("digits", folder=tmp_path / "other", **options)
    assert without["epsilon"] < found["epsilon"]
    assert without["epsilon_all_runs"] < found["epsilon_all_runs"]
    assert without["epsilon_one_run"] == found["epsilon_one_run"]
    assert "published_score" not in without


def test_a_task_without_a_share_is_scored_by_its_loss_over_that_of_the_initial_model():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(200, 3)).astype(np.float32)
    part = (x, x.sum(axis=1, keepdims=True))
    given = {
        "model": nn.Linear(3, 1),
        "data": {"train": part, "test": part},
        "task": "regression",
    }
    recipe, own = arguments.resolve(None, given, SHORT | {"data.partition": "iid"})
    assembly = Assembly(recipe, own)
    score, module = PrivateScore.calibrated(assembly, 1.0), assembly.model.module()
    assert (
        float(score.contributions(module).mean()) < 0
    )  # the initial model is at 0, up to how losses are spread
    with torch.no_grad():
        module.weight[:], module.bias[:] = 1.0, 0.0
    assert score.contributions(module).flatten().tolist() == pytest.approx(
        [0.5] * len(score.contributions(module))
    )
    assert score.name.startswith("1 - loss / initial loss on the private")


def test_a_score_is_not_charged_for_people_at_several_clients(tmp_path):
    with pytest.raises(ConfigError, match="the score is charged for one client"):
        simulations.tune(
            "digits",
            search={"training.lr": [0.1]},
            overrides={**dict(SHORT), "federation.overlap": 2, "privacy.relation": "replace-one"},
            score_epsilon=0.5,
            folder=tmp_path / "s",
        )


@pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan])
def test_an_epsilon_that_is_none_is_refused(epsilon, tmp_path):
    with pytest.raises(ConfigError, match="score_epsilon"):
        simulations.tune(
            "digits",
            search={"training.lr": [0.1]},
            overrides=SHORT,
            score_epsilon=epsilon,
            folder=tmp_path / "s",
        )
    assert not (tmp_path / "s").exists()
