"""Whether `recommend` predicts runs.

A setting is a recipe with changes, for which rules were, or will be, compared at one proven
epsilon, every rule with a separate search of the server learning rate (or the step's) on a separate
seed. Predictions are computed on the public half of the digits, or the recipe's test examples of
other sets, and are never computed again once there are runs of the setting.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import nn

from fedlgm import data
from fedlgm.training.models.adapters import adapt
from fedlgm_lab.recommend.recommend import recommend
from fedlgm_lab.studies.tables import adaptive, central_allocations, noise_and_split
from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.pages import table
from fedlgm_lab.studies.tables.searched import Cell, Search, measure_cells
from fedlgm_lab.studies.tables.store import Kept, Values, against, change, figures

PREDICTED, SCORED = "recommend-predicted.json", "recommend-screened.json"
FLAT, RULES = "gaussian", ("uniform", "dimension-adjusted", "snr-consistent")
"""Under EqClip the other two scored rules are one of these each."""
SEEDS = (1, 2, 3)
_RATES = Search((0.1, 0.2), 0.0125, 12.8)
Measured = dict[str, dict[int, float]]
"""Figure of each rule by seed, higher being better."""


@dataclass(frozen=True)
class Setting:
    """A recipe with changes, and the source of its runs.

    Attributes:
        recipe: bundled recipe.
        changes: changes for all rules.
        earlier: reads figures measured for another page; None if this study makes the runs.
        rate: the searched key.
        search: search of that key.
        seeds: seeds of a rule, if this study makes the runs.
        examples: number of training examples, for a set that does not give it.
    """

    recipe: str
    changes: tuple[str, ...]
    earlier: Callable[[Kept], Measured] | None = None
    rate: str = "federation.server_lr"
    search: Search = _RATES
    seeds: tuple[int, ...] = SEEDS
    examples: int | None = None

    @property
    def example_level(self) -> bool:
        """Whether examples are protected."""
        return self.recipe.startswith("dp-sgd")

    @property
    def scored(self) -> tuple[str, tuple[str, ...], int | None]:
        """Public examples, changes and number of examples for the advice.

        Digits has few test examples, so half of its training examples are the public ones; the
        advice is for as many as the whole set has.
        """
        if "digits" not in self.recipe:
            return "test", self.changes, self.examples
        return (
            "digits/public",
            (*self.changes, "data.name=digits/private"),
            data.published_examples("digits"),
        )

    @property
    def faster(self) -> tuple[str, ...]:
        """Changes that save time."""
        return () if self.example_level else ("training.vectorize=on", "run.block_size=64")

    def of(self, rule: str) -> tuple[str, ...]:
        """A rule's changes."""
        if not self.example_level:
            return (f"mechanism.name={rule}",)
        return () if rule == FLAT else ("mechanism.style=per-layer", f"mechanism.allocation={rule}")


def _of_split(task: str) -> Callable[[Kept], Measured]:
    """Runs of docs/results/correlated.md with independent noise and secret sampling, at each
    split's own rate.
    """

    def read(store: Kept) -> Measured:
        runs = Kept(store.folder / noise_and_split.MAKER.file)
        noise = "independent, secret Poisson sampling"
        sign = float(noise_and_split.TASKS[task].search.better)
        names = {"gaussian": "flat", "uniform": "uniform", "snr-consistent": "SNR-consistent"}
        return {
            rule: {
                seed: sign * figure
                for seed, figure in noise_and_split.runs_of(runs, task, (noise, split))
                .figures()
                .items()
            }
            for rule, split in names.items()
        }

    return read


def _of_adaptive(task: str) -> Callable[[Kept], Measured]:
    """Runs of docs/results/adaptive.md."""

    def read(store: Kept) -> Measured:
        runs = Kept(store.folder / adaptive.MAKER.file)
        names = {
            "gaussian": "flat Gaussian",
            "uniform": "uniform",
            "snr-consistent": "SNR-consistent",
        }
        return {rule: adaptive.runs_of(runs, task, name).figures() for rule, name in names.items()}

    return read


def _of_central(store: Kept) -> Measured:
    """Runs of docs/results/central-allocations.md, 1,170 steps under EqClip."""
    runs = Kept(store.folder / central_allocations.MAKER.file)
    names = {"gaussian": "flat"} | {rule: rule for rule in RULES}
    return {
        rule: central_allocations.runs_of(runs, (name, "EqClip")).figures()
        for rule, name in names.items()
    }


def _of_table_3(store: Kept) -> Measured:
    """Runs of docs/results/fashion-mnist.md at one server rate, that of the paper's experiment: not
    searched.
    """
    runs = Kept(store.folder / "fashion-mnist.json")
    names = {"gaussian": "flat Gaussian"} | {rule: f"{rule}, EqClip" for rule in RULES}
    return {
        rule: {row["seed"]: row["final"] for row in runs.find(study="table-3", variant=variant)}
        for rule, variant in names.items()
    }


_LAST = "run.evaluate_every=1000"  # the last round is always evaluated
_CENTRAL = (*central_allocations.SETTING, f"federation.rounds={central_allocations.STEPS}")
_DIGITS = ("federation.rounds=50", _LAST)
_LOW = ("federation.rounds=30", _LAST, "privacy.epsilon=3")
_ADAM = ("training.optimizer=adam", "training.lr=0.01")
_WIDE = ("model.hidden=[8, 1024, 8]",)
_STEPS = Search((1.0, 2.0), 0.125, 32.0)
SETTINGS: dict[str, Setting] = {
    "digits, 64-32-10, SGD, epsilon 1": Setting(
        "digits", (*_DIGITS, "privacy.epsilon=1"), _of_adaptive("small")
    ),
    "digits, 64-64-32-32-10, SGD": Setting(
        "digits", (*_DIGITS, "model.hidden=[64, 32, 32]"), _of_adaptive("deep")
    ),
    "FashionMNIST, MLP, Adam": Setting(
        "fashion-mnist", noise_and_split.MLP, _of_split("FashionMNIST, MLP")
    ),
    "FashionMNIST, CNN, Adam, 100 rounds": Setting(
        "fashion-mnist",
        ("data.pixels=[0, 1]", "federation.rounds=100"),
        _of_split("FashionMNIST, CNN"),
    ),
    "FashionMNIST, CNN, Adam, 300 rounds": Setting("fashion-mnist", (), _of_table_3),
    "text, GRU, SGD": Setting("text-gru", (), _of_split("text, whole recipe"), examples=115_802),
    "examples: FashionMNIST, CNN": Setting("dp-sgd-fashion-mnist", _CENTRAL, _of_central),
    "digits, 64-8-1024-8-10, Adam": Setting("digits", (*_LOW, *_WIDE, *_ADAM)),
    "digits, 64-256-16-10, Adam": Setting("digits", (*_LOW, *_ADAM, "model.hidden=[256, 16]")),
    "examples: digits, 64-32-10": Setting(
        "dp-sgd-digits", ("privacy.epsilon=1", _LAST), rate="training.lr", search=_STEPS
    ),
    "examples: digits, 64-8-256-8-10": Setting(
        "dp-sgd-digits",
        ("privacy.epsilon=2", "model.hidden=[8, 256, 8]", _LAST),
        rate="training.lr",
        search=_STEPS,
    ),
    "digits, 64-8-1024-8-10, SGD": Setting("digits", (*_LOW, *_WIDE)),
    "digits, 64-32-10, Adam": Setting("digits", (*_LOW, *_ADAM)),
    "digits, 64-64-32-32-10, Adam": Setting("digits", (*_LOW, *_ADAM, "model.hidden=[64, 32, 32]")),
}


SCREENED: dict[str, Setting] = {
    "digits, 64-1024-8-10, Adam": Setting("digits", (*_LOW, *_ADAM, "model.hidden=[1024, 8]")),
    "digits, 64-8-512-10, Adam": Setting("digits", (*_LOW, *_ADAM, "model.hidden=[8, 512]")),
    "digits, 64-128-128-128-128-128-10, Adam": Setting(
        "digits", (*_LOW, *_ADAM, f"model.hidden={[128] * 5}")
    ),
    "digits, 64-1024-10, Adam": Setting("digits", (*_LOW, *_ADAM, "model.hidden=[1024]")),
    "digits, adapters of rank 4, Adam": Setting(
        "digits", (*_LOW, *_ADAM, "model.name=fedlgm_lab.studies.tables.recommend:adapted")
    ),
    "text, transformer, Adam": Setting("text-transformer", (), examples=115_802),
    "text, transformer, SGD": Setting(
        "text-transformer", ("training.optimizer=sgd", "training.lr=1.0"), examples=115_802
    ),
    "text, GRU, Adam": Setting("text-gru", _ADAM, examples=115_802),
}
"""Settings that were scored to look for a rule that wins; most were not run."""


def adapted() -> nn.Module:
    """A network 64-256-32-10 trained on the digits 0 to 4 of the public half, then frozen, with
    adapters of rank 4.
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
    """Kept scores by setting."""
    return Values(store.folder / file, store.settings)


def _predicted(setting: Setting) -> dict[str, float]:
    public, changes, examples = setting.scored
    found = recommend(setting.recipe, public=public, overrides=changes, examples=examples)
    return {rule: round(found.scores[rule], 4) for rule in (FLAT, *RULES)}


def measure(store: Kept) -> None:
    """Score every setting that has no score, before its runs. Then make the runs, with the rule
    that is expected to be far off last.
    """
    for file, settings in ((PREDICTED, SETTINGS), (SCORED, SCREENED)):
        for name, setting in settings.items():
            predictions(store, file).get(name, partial(_predicted, setting))
    own = {name: setting for name, setting in SETTINGS.items() if setting.earlier is None}
    for rules in ((FLAT, "uniform", "snr-consistent"), ("dimension-adjusted",)):
        for name, setting in own.items():
            cells = [_cell(store, name, setting, rule) for rule in rules]
            measure_cells(cells, setting.seeds)


def _cell(store: Kept, name: str, setting: Setting, rule: str) -> Cell:
    """The runs of a rule in a setting."""

    def run(rate: float, seed: int) -> dict[str, Any]:
        changes = [*setting.changes, *setting.of(rule), f"{setting.rate}={rate}", *setting.faster]
        return figures(setting.recipe, changes, seed)

    return Cell(store, {"setting": name, "rule": rule}, setting.search, run)


def figures_by_rule(name: str, setting: Setting, store: Kept) -> Measured:
    """The measured figures of a setting's rules."""
    if setting.earlier is not None:
        return setting.earlier(store)
    return {rule: _cell(store, name, setting, rule).figures() for rule in (FLAT, *RULES)}


def agreement_of_halves(figures: Measured) -> float:
    """Mean rank correlation of a setting's figures between two halves of its seeds, which says how
    sure their order is.

    NaN where there are no two halves, or where rules are equal in one.
    """
    rules = [rule for rule, values in figures.items() if values]
    seeds = sorted(set.intersection(*(set(figures[rule]) for rule in rules)))
    found = []
    for half in itertools.combinations(seeds, len(seeds) // 2):
        parts = (half, [seed for seed in seeds if seed not in half])
        means = [
            [statistics.fmean(figures[rule][seed] for seed in part) for rule in rules]
            for part in parts
            if part
        ]
        if len(means) == 2 and all(len(set(values)) > 1 for values in means):
            found.append(float(spearmanr(*means).statistic))
    return statistics.fmean(found) if found else math.nan


def texts(store: Kept) -> Pages:
    """Scores beside measured changes, by pair and by setting."""
    predicted, scored = (predictions(store, file).values for file in (PREDICTED, SCORED))
    rows, per_setting = [], []
    for name, setting in SETTINGS.items():
        figures = figures_by_rule(name, setting, store)
        scores: Mapping[str, float] = predicted.get(name, {})
        points = []
        for rule in RULES:
            if not (scores and figures.get(rule) and figures.get(FLAT)):
                continue
            found = against(figures[rule], figures[FLAT])
            if found is None:
                continue
            gain = found if isinstance(found, float) else found.mean
            points.append((scores[rule], gain))
            count = len(figures[rule].keys() & figures[FLAT].keys())
            origin = "kept" if setting.earlier is not None else "new"
            rows.append(
                [
                    name,
                    origin,
                    rule,
                    f"{scores[rule]:.2f}",
                    *change(figures[rule], figures[FLAT]),
                    str(count),
                ]
            )
        if len(points) >= 2:
            ranks = _ranks(points)
            best = max(
                [FLAT, *(r for r in RULES if figures.get(r))],
                key=lambda r: statistics.fmean(figures[r].values()),
            )
            told = max([FLAT, *(r for r in RULES if figures.get(r))], key=lambda r: scores[r])
            spread = max(gain for _, gain in [(1.0, 0.0), *points]) - min(
                gain for _, gain in [(1.0, 0.0), *points]
            )
            agreement = agreement_of_halves(figures)
            repeats = "" if math.isnan(agreement) else f"{agreement:+.2f}"
            per_setting.append([name, f"{ranks:+.2f}", repeats, f"{spread:.1f}", told, best])
    header = ["setting", "runs", "rule", "predicted", "change", "95 % interval", "p", "seeds"]
    columns = [
        "setting",
        "rank correlation",
        "two halves of the seeds",
        "spread",
        "predicted best",
        "measured best",
    ]
    found_rows = [
        [name, *(f"{values[rule]:.2f}" for rule in RULES)] for name, values in scored.items()
    ]
    return {
        "data/recommend.md": {
            "settings": table(columns, per_setting),
            "pairs": table(header, rows),
            "screened": table(["setting", *RULES], found_rows),
        }
    }


def _ranks(points: Sequence[tuple[float, float]]) -> float:
    """Rank correlation of scores and changes, the flat rule included."""
    scores, changes = zip((1.0, 0.0), *points, strict=True)
    return float(spearmanr(scores, changes).statistic)


MAKER = Maker("recommend.json", texts, measure, partial=True)
