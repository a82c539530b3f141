"""Tests whether the scores of `recommend` predict the outcomes of runs.

A setting is a recipe with changes, for which allocation rules were, or will be, compared at the
same proven epsilon. For every rule, the learning rate (of the server or of the optimizer's step) is
searched on a separate seed. Predictions are computed on the public half of the digits or, for other
sets, on the recipe's test examples. They are never computed again once there are runs of the
setting.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from fedlgm import data
from fedlgm.training.models.adapters import adapt
from fedlgm_lab.recommend.recommend import recommend
from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.pages import table
from fedlgm_lab.studies.tables.runs import cells, labels, measure_cells, settings
from fedlgm_lab.studies.tables.store import CHANGE, Kept, Values, against, change

NAME = "recommend"
PREDICTED, SCORED = "recommend-predicted.json", "recommend-screened.json"
_MOST_HALVES = 1000
FLAT, *RULES = map(str, labels(NAME, "rule"))


def adapted() -> nn.Module:
    """Train a network 64-256-32-10 on the digits 0 to 4 of the public half, freeze it, and return
    it with adapters of rank 4.
    """
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, 256),
        nn.Tanh(),
        nn.Linear(256, 32),
        nn.Tanh(),
        nn.Linear(32, 10),
    )
    found = data.load("digits/public")
    low = found.train_y < 5
    x, y = torch.from_numpy(found.train_x[low]), torch.from_numpy(found.train_y[low])
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    for _ in range(100):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return adapt(net, rank=4)


def predictions(store: Kept, file: str = PREDICTED) -> Values:
    """Return the store of the predicted scores, by setting."""
    return Values(store.folder / file, store.settings)


def predict(setting: Mapping[str, Any]) -> dict[str, float]:
    """Compute the scores of the rules in a setting.

    The set `digits` has few test examples, so half of its training examples serve as public
    examples. The scores assume as many private examples as the whole set has.
    """
    recipe, changes, examples = setting["recipe"], setting["set"], setting.get("examples")
    public = "test"
    if "digits" in recipe:
        public, changes = "digits/public", changes | {"data.name": "digits/private"}
        examples = data.published_examples("digits")
    advice = recommend(recipe, public=public, overrides=changes, examples=examples)
    return {rule: round(advice.scores[rule], 4) for rule in (FLAT, *RULES)}


def measure(store: Kept) -> None:
    """Score every setting that has no score, and then make its runs.

    The runs of the rule that is expected to be much worse come last.
    """
    content = settings(NAME)
    for file, scored in (
        (PREDICTED, [*content["earlier"], *content["groups"]]),
        (SCORED, content["screened"]),
    ):
        for setting in scored:
            predictions(store, file).get(setting["name"]["setting"], partial(predict, setting))
    for rules in ((FLAT, "uniform", "snr-consistent"), ("dimension-adjusted",)):
        for group in content["groups"]:
            runs = cells(store, NAME, **group["name"])
            measure_cells([cell for cell in runs if cell.name["rule"] in rules])


def figures_by_rule(store: Kept) -> dict[str, pd.DataFrame]:
    """Collect a frame for each setting, with the rules' figures by seed; higher is better."""
    frames = {}
    for setting in settings(NAME)["earlier"]:
        runs = Kept(store.folder / f"{setting['maker']}.json")
        figures = {}
        for rule, label in setting["rules"].items():
            (cell,) = cells(runs, setting["maker"], **setting["where"], **{setting["axis"]: label})
            better = 1 if cell.search is None else cell.search.better
            figures[rule] = better * cell.figures()
        frames[setting["name"]["setting"]] = pd.DataFrame(figures)
    for group in settings(NAME)["groups"]:
        by_rule = {
            cell.name["rule"]: cell.figures() for cell in cells(store, NAME, **group["name"])
        }
        frames[group["name"]["setting"]] = pd.DataFrame(by_rule)
    return frames


def agreement_of_halves(figures: pd.DataFrame) -> float:
    """Compute the mean rank correlation between the rules' figures on two halves of the seeds,
    which measures how certain the order of the rules is.

    All divisions of the seeds into halves are used, or a thousand random ones if there are more.
    The result is NaN if there are fewer than two seeds, or if all rules are equal in every half.
    """
    complete = figures.dropna(axis=1, how="all").dropna()
    seeds, half = np.arange(len(complete)), len(complete) // 2
    if not half:
        return math.nan
    if math.comb(len(seeds), half) > _MOST_HALVES:
        inside = np.tile(seeds < half, (_MOST_HALVES, 1))
        inside = np.random.default_rng(0).permuted(inside, axis=1)
    else:
        inside = np.array(
            [np.isin(seeds, chosen) for chosen in itertools.combinations(seeds, half)]
        )
    first, second = (
        pd.DataFrame((part @ complete.to_numpy() / part.sum(axis=1, keepdims=True)).round(9))
        for part in (inside, ~inside)
    )  # rounded, so that equal rules share a rank
    return float(first.rank(axis=1).corrwith(second.rank(axis=1), axis=1).mean())


def texts(store: Kept) -> Pages:
    """Make the tables that compare the scores with the measured changes, by rule and by setting."""
    predicted, scored = (predictions(store, file).values for file in (PREDICTED, SCORED))
    pairs, rows = [], []
    for name, frame in figures_by_rule(store).items():
        figures, scores = frame.dropna(axis=1, how="all"), predicted.get(name, {})
        gains = {FLAT: 0.0}
        for rule in RULES if scores and FLAT in figures else ():
            if rule in figures:
                both = figures[rule].dropna(), figures[FLAT].dropna()
                tested = against(*both)
                gains[rule] = tested.mean
                origin = "new" if cells(store, NAME, setting=name) else "kept"
                label = [name, origin, rule, f"{scores[rule]:.2f}"]
                pairs.append([*label, *change(*both), tested.seeds])
        if len(gains) > 2:
            points = pd.DataFrame({"score": pd.Series(scores), "gain": pd.Series(gains)}).dropna()
            ranks = points["score"].corr(points["gain"], method="spearman")
            agreement = agreement_of_halves(figures)
            repeats = "" if math.isnan(agreement) else f"{agreement:+.2f}"
            spread = f"{points['gain'].max() - points['gain'].min():.1f}"
            best = [points["score"].idxmax(), figures.mean().idxmax()]
            rows.append([name, f"{ranks:+.2f}", repeats, spread, *best])
    columns = ["setting", "rank correlation", "two halves of the seeds", "spread"]
    header = ["setting", "runs", "rule", "predicted", *CHANGE, "seeds"]
    screened = [
        [name, *(f"{values[rule]:.2f}" for rule in RULES)] for name, values in scored.items()
    ]
    return {
        "data/recommend.md": {
            "settings": table([*columns, "predicted best", "measured best"], rows),
            "pairs": table(header, pairs),
            "screened": table(["setting", *RULES], screened),
        }
    }


MAKER = Maker("recommend.json", texts, measure, partial=True)
