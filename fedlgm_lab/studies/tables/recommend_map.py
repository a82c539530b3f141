"""Tests whether `recommend` predicts the map of rules, whose runs come from the studies map-*.

    FEDLGM_DATA=FOLDER fedlgm study recommend-map --out docs/results    # FOLDER holds MNIST

Scores are computed for each network, from several initial models, and compared with the stored
runs; no run is made. The sets `passages` and `flights` need the packages that `map_data` names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from fedlgm import data
from fedlgm.errors import ConfigError
from fedlgm_lab.recommend.recommend import recommend
from fedlgm_lab.recommend.verdict import BETTER, FLAT, LEVELLED, WORSE
from fedlgm_lab.studies.files import StudyFile
from fedlgm_lab.studies.jobs import grid_jobs
from fedlgm_lab.studies.results import Study
from fedlgm_lab.studies.study import base_of
from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.pages import table
from fedlgm_lab.studies.tables.recommend import RULES, agreement_of_halves
from fedlgm_lab.studies.tables.rule_map import PLACE, kept_studies, setting_of, studies_of_map
from fedlgm_lab.studies.tables.store import CHANGE, Values, against, change
from simulations.config.recipe import Recipe

_DRAWS, _MODELS = 10_000, 6
_KNOWN = "ratio 102"
"""The network of the map that is also among the earlier settings of `recommend`."""
_SETS = {"digits": ("digits",), "other sets": ("mnist", "passages", "flights")}
_PARTS = ("all", f"all but {_KNOWN}", *_SETS)

ORDER = (
    "scored", "rank correlation", "95 % interval", "two halves of the seeds", "ceiling",
    "over all pairs",
)  # fmt: skip
"""Column titles of the cells that `correlations` makes."""
OUTCOME = ("pairs", "mean change", "changes", "gains", "interval above 0", "interval below 0")
"""Column titles of the cells that `outcome` makes."""


class Cell(NamedTuple):
    """A network in a study of the map.

    Attributes:
        place: its values of `PLACE`.
        scores: scores of the rules; empty if `recommend` refused the network.
        figures: accuracies in per cent of the flat rule and of the scored rules with runs, with a
            row for each seed.
    """

    place: tuple[str, ...]
    scores: dict[str, float]
    figures: pd.DataFrame

    def correlation(self) -> float:
        """Compute the rank correlation of the scores with the mean figures; NaN without scores."""
        means = self.figures.mean().round(9)
        return float(pd.Series(self.scores, dtype=float).corr(means, method="spearman"))


class Pair(NamedTuple):
    """A scored rule in a cell, with its score (relative to the flat rule) and the figures of both
    rules.
    """

    place: tuple[str, ...]
    rule: str
    ratio: float
    figures: pd.Series
    flat: pd.Series


def recipes(study: StudyFile) -> Iterator[tuple[str, Recipe]]:
    """Yield the name and recipe of each network of a study for each of several initial models."""
    grid = study.grid | {"mechanism": [FLAT]}
    base, own, options = base_of(study.recipe, grid, {}, study.set)
    for job in grid_jobs(base, grid, range(_MODELS), options, own):
        yield f"{study.name}, {job.point['model']}, {job.repetition}", job.recipe


def predict(recipe: Recipe) -> dict[str, float]:
    """Compute the scores of the rules; the result is empty if `recommend` refuses.

    The public examples are the test examples, except for the digits, which have few test examples;
    for them, the public half of the training examples is used.
    """
    found = data.load(recipe.data.name)
    given: dict[str, Any] = {"public": "test", "data": found}
    if recipe.data.name == "digits":
        given = {"public": "digits/public", "overrides": {"data.name": "digits/private"}}
    try:
        scores = recommend(recipe, examples=len(found.train_y), **given).scores
    except ConfigError:
        return {}
    return {rule: round(scores[rule], 4) for rule in (FLAT, *RULES, LEVELLED)}


def measure(store: Values) -> None:
    """Compute the missing scores of every network of the map."""
    for study in studies_of_map():
        for name, recipe in recipes(study):
            store.get(name, partial(predict, recipe))


def cells(store: Values, initial: int = 0) -> list[Cell]:
    """List the cells of the map that have runs and that were scored from this initial model."""
    found = []
    for study, file in kept_studies(store.folder):
        runs = Study.read(file).to_frame()
        rules = [rule for rule in (FLAT, *RULES, LEVELLED) if rule in set(runs["method"])]
        for network in (model["label"] for model in study.grid["model"]):
            scores = store.values.get(f"{study.name}, {network}, {initial}")
            if scores is not None:
                accuracies = runs[runs["model"] == network].pivot(
                    index="seed", columns="method", values="accuracy"
                )
                place = (*setting_of(study), network)
                found.append(Cell(place, scores, 100 * accuracies[rules]))
    return found


def pairs(group: Sequence[Cell]) -> list[Pair]:
    """List the scored rules of some cells, without the flat rule."""
    return [
        Pair(cell.place, rule, cell.scores[rule], cell.figures[rule], cell.figures[FLAT])
        for cell in group
        for rule in (cell.figures.columns[1:] if cell.scores else ())
    ]


def correlations(group: Sequence[Cell]) -> list[str]:
    """Make a line on how well the scores order the rules in some cells; blank if no cell has
    scores.
    """
    scored = [cell for cell in group if cell.scores]
    if not scored:
        return [""] * len(ORDER)
    correlation = pd.Series([cell.correlation() for cell in scored])
    # A network has the same scores at both budgets, so its cells are drawn together.
    networks = [(data, clients, network) for data, _, clients, network in (c.place for c in scored)]
    drawn = correlation.groupby(pd.MultiIndex.from_tuples(networks)).agg(["sum", "size"]).to_numpy()
    draws = np.random.default_rng(0).integers(len(drawn), size=(_DRAWS, len(drawn)))
    sums, sizes = drawn[draws].sum(axis=1).T
    low, high = np.quantile(sums / sizes, (0.025, 0.975))
    halves = float(np.nanmean([agreement_of_halves(cell.figures) for cell in scored]))
    ratios, gains = zip(
        *((pair.ratio, (pair.figures - pair.flat).mean()) for pair in pairs(scored)), strict=True
    )
    pooled = pd.Series(ratios).corr(pd.Series(gains), method="spearman")
    return [
        f"{len(scored)} of {len(group)}",
        f"{correlation.mean():+.2f}",
        f"{low:+.2f} to {high:+.2f}",
        f"{halves:+.2f}",
        f"{math.sqrt(2 * max(0.0, halves) / (1 + halves)):.2f}",
        f"{pooled:+.2f}",
    ]


def calls(group: Sequence[Cell]) -> dict[str, list[Pair]]:
    """Group the pairs by whether `recommend` calls the rule "better", "worse" or neither."""
    found: dict[str, list[Pair]] = {"better": [], "worse": [], "neither": []}
    for pair in pairs(group):
        called = "better" if pair.ratio >= BETTER else "worse" if pair.ratio <= WORSE else "neither"
        found[called].append(pair)
    return found


def outcome(called: Sequence[Pair]) -> list[str]:
    """Make a line on the measured changes of some pairs."""
    tested = [against(pair.figures, pair.flat) for pair in called]
    means = [one.mean for one in tested]
    return [
        str(len(called)),
        f"{np.mean(means):+.1f}",
        f"{min(means):+.1f} to {max(means):+.1f}",
        str(sum(mean > 0 for mean in means)),
        str(sum(one.low > 0 for one in tested)),
        str(sum(one.high < 0 for one in tested)),
    ]


def _cell_row(cell: Cell) -> list[str]:
    """Make a line on one cell."""
    rules = cell.figures.columns[1:]
    both = (
        (cell.scores.get(rule), (cell.figures[rule] - cell.figures[FLAT]).mean()) for rule in rules
    )
    ranks = f"{cell.correlation():+.2f}" if cell.scores else "refused"
    halves = f"{agreement_of_halves(cell.figures):+.2f}"
    changes = (f"{'-' if ratio is None else f'{ratio:.2f}'}, {gain:+.1f}" for ratio, gain in both)
    return [*cell.place, ranks, halves, *changes]


def grouped(found: Sequence[Cell]) -> dict[str, Sequence[Cell]]:
    """Group the cells of the map by data set and by the clients' optimizer."""
    groups = {"all": found}
    groups[f"all but {_KNOWN}"] = [cell for cell in found if cell.place[-1] != _KNOWN]
    for name, sets in _SETS.items():
        groups[name] = ours = [cell for cell in found if cell.place[0] in sets]
        for clients in ("Adam", "SGD"):
            groups[f"{name}, {clients}"] = [cell for cell in ours if clients in cell.place]
    return groups


def _model_row(store: Values, initial: int) -> list[str]:
    """Make a line on the scores from one initial model."""
    groups = grouped(cells(store, initial))
    scored = {part: [cell for cell in groups[part] if cell.scores] for part in _PARTS}
    order = (
        f"{np.mean([cell.correlation() for cell in some]):+.2f}" if some else ""
        for some in scored.values()
    )
    better = [calls(groups[name])["better"] for name in _SETS]
    gains = [sum(against(pair.figures, pair.flat).low > 0 for pair in some) for some in better]
    confirmed = (f"{gained} of {len(some)}" for gained, some in zip(gains, better, strict=True))
    return [
        str(initial + 1),
        f"{len(scored['all'])} of {len(groups['all'])}",
        *order,
        *confirmed,
    ]


def texts(store: Values) -> Pages:
    """Make the tables on how well the scores order the rules, on the measured changes by call, and
    on the figures of every cell.
    """
    found = cells(store)
    if not any(cell.scores for cell in found):
        return {}
    groups = grouped(found)
    order = [[label, *correlations(group)] for label, group in groups.items()]
    called = {(name, call): some for name in _SETS for call, some in calls(groups[name]).items()}
    far = [
        [*pair.place, pair.rule, f"{pair.ratio:.2f}", *change(pair.figures, pair.flat)]
        for (_, call), some in called.items()
        if call != "neither"
        for pair in some
    ]
    rules = [f"`{rule}`" for rule in found[0].figures.columns[1:]]
    return {
        "recommend.md": {
            "order on the map": table(["cells", *ORDER], order),
            "calls on the map": table(
                ["data", "called", *OUTCOME],
                [[*label, *outcome(some)] for label, some in called.items() if some],
            ),
        },
        "data/recommend.md": {
            "map": table([*PLACE, ORDER[1], ORDER[3], *rules], map(_cell_row, found)),
            "far on the map": table([*PLACE, "rule", "predicted", *CHANGE], far),
            "initial models on the map": table(
                ["initial model", "scored", *_PARTS, *(f"called better, {name}" for name in _SETS)],
                [_model_row(store, initial) for initial in range(_MODELS)],
            ),
        },
    }


MAKER = Maker("recommend-map.json", texts, measure, Values, partial=True)
