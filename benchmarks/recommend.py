"""Does `recommend` predict runs? Figures of docs/results/recommend.md.

    python -m benchmarks.recommend --predict               # scores of all settings, kept before
    runs are made python -m benchmarks.recommend [--minutes M]           # make runs of the settings
    that have no kept ones python -m benchmarks.recommend --write                 # tables of the
    page

A setting is a recipe with changes, for which rules were, or will be, compared at one proven
epsilon, every rule with a search of the server learning rate (or the step's) of its own on a
separate seed. Predictions are computed on the public half of the digits, or the recipe's test
examples of other sets, and are never computed again once there are runs of the setting.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from scipy.stats import spearmanr
from torch import nn

from benchmarks import adaptive, central_allocations, noise_and_split
from benchmarks.kept import Kept, Search, Values, against, change
from benchmarks.pages import show, table
from fedlgm import data
from fedlgm.training.models.adapters import adapt
from fedlgm_lab.recommend.recommend import recommend

PAGE = Path(__file__).parents[1] / "docs" / "results" / "recommend.md"
DATA_PAGE = PAGE.parent / "data" / PAGE.name
KEPT = PAGE.with_suffix(".json")
PREDICTED = PAGE.with_name("recommend-predicted.json")
SCORED = PAGE.with_name("recommend-screened.json")
FLAT, RULES = "gaussian", ("uniform", "dimension-adjusted", "snr-consistent")
"""Under EqClip the other two scored rules are one of these each."""
SEEDS = (1, 2, 3)
WIDE = 5.0
"""Points between a setting's best and worst rule from which on their order is hardly that of the
seeds."""
_RATES = Search((0.1, 0.2), 0.0125, 12.8)
Measured = dict[str, dict[int, float]]
"""Figure of each rule by seed, higher being better."""


@dataclass(frozen=True)
class Setting:
    """A recipe with changes, and the source of its runs.

    Attributes:
        recipe: bundled recipe.
        changes: changes for all rules.
        kept: gives figures measured for another page; None if this benchmark makes the runs.
        rate: the searched key.
        search: search of that key.
        seeds: seeds of a rule, if this benchmark makes the runs.
        examples: number of training examples, for a set that does not give it.
    """

    recipe: str
    changes: tuple[str, ...]
    kept: Callable[[], Measured] | None = None
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


def _of_split(task: str) -> Callable[[], Measured]:
    """Runs of docs/results/correlated.md with independent noise and secret sampling, at each
    split's own rate.
    """

    def read() -> Measured:
        kept, noise = Kept(noise_and_split.KEPT), "independent, secret Poisson sampling"
        sign = float(noise_and_split.TASKS[task].search.better)
        names = {"gaussian": "flat", "uniform": "uniform", "snr-consistent": "SNR-consistent"}
        return {
            rule: _seeds(
                kept,
                sign,
                task=task,
                noise=noise,
                split=split,
                search=noise_and_split.TASKS[task].search,
            )
            for rule, split in names.items()
        }

    return read


def _of_adaptive(task: str) -> Callable[[], Measured]:
    """Runs of docs/results/adaptive.md."""

    def read() -> Measured:
        kept = Kept(adaptive.PAGE.with_suffix(".json"))
        names = {
            "gaussian": "flat Gaussian",
            "uniform": "uniform",
            "snr-consistent": "SNR-consistent",
        }
        search = adaptive.TASKS[task].search
        return {
            rule: _seeds(kept, 1.0, "accuracy", task=task, method=m, search=search)
            for rule, m in names.items()
        }

    return read


def _of_central() -> Measured:
    """Runs of docs/results/central-allocations.md, 1,170 steps under EqClip."""
    kept, names = (
        Kept(central_allocations.KEPT),
        {"gaussian": "flat"} | {rule: rule for rule in RULES},
    )
    return {
        rule: _seeds(
            kept,
            1.0,
            rate="lr",
            rule=name,
            clip="EqClip",
            steps=central_allocations.STEPS,
            search=central_allocations.SEARCH,
        )
        for rule, name in names.items()
    }


def _of_table_3() -> Measured:
    """Runs of docs/results/fashion-mnist.md at one server rate, that of the paper's experiment: not
    searched.
    """
    kept = Kept(PAGE.with_name("fashion-mnist.json"))
    names = {"gaussian": "flat Gaussian"} | {rule: f"{rule}, EqClip" for rule in RULES}
    return {
        rule: {row["seed"]: row["final"] for row in kept.find(study="table-3", variant=variant)}
        for rule, variant in names.items()
    }


def _seeds(
    kept: Kept,
    sign: float,
    figure: str = "final",
    rate: str = "rate",
    *,
    search: Search,
    **name: Any,
) -> dict[int, float]:
    """Figures by seed at the rate that the search of a cell chose."""
    rows = kept.find(**name)
    found = {row[rate]: row[figure] for row in rows if row["seed"] == search.seed}
    best = search.chosen(found) if found else None
    return {
        row["seed"]: sign * row[figure]
        for row in rows
        if row["seed"] != search.seed and row[rate] == best
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
        "digits", (*_LOW, *_ADAM, "model.name=benchmarks.recommend:adapted")
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


def predict() -> None:
    """Scores of every setting that has none."""
    for path, settings in ((PREDICTED, SETTINGS), (SCORED, SCREENED)):
        values = Values(path)
        for name, setting in settings.items():
            values.get(name, partial(_predicted, setting))


def _predicted(setting: Setting) -> dict[str, float]:
    public, changes, examples = setting.scored
    found = recommend(setting.recipe, public=public, overrides=changes, examples=examples)
    return {rule: round(found.scores[rule], 4) for rule in (FLAT, *RULES)}


def go_on(minutes: float) -> None:
    """Make the runs that are missing: setting by setting, with the rule that is expected to be far
    off last.
    """
    kept = Kept(KEPT, minutes)
    predicted = json.loads(PREDICTED.read_text(encoding="utf-8"))
    own = {
        name: setting
        for name, setting in SETTINGS.items()
        if setting.kept is None and name in predicted
    }
    for rules in ((FLAT, "uniform", "snr-consistent"), ("dimension-adjusted",)):
        for name, setting in own.items():
            best = {rule: _searched(kept, name, setting, rule) for rule in rules}
            for seed in setting.seeds:
                for rule, rate in best.items():
                    if rate is None or _run(kept, name, setting, rule, rate, seed) is None:
                        return


def _searched(kept: Kept, name: str, setting: Setting, rule: str) -> float | None:
    """The rate that a rule's search chose; None if the time is spent."""
    found: dict[float, float] = {}
    while (rate := setting.search.following(found)) is not None:
        row = _run(kept, name, setting, rule, rate, setting.search.seed)
        if row is None:
            return None
        found[rate] = row["final"]
    return setting.search.chosen(found)


def _run(
    kept: Kept, name: str, setting: Setting, rule: str, rate: float, seed: int
) -> dict[str, Any] | None:
    label = {"setting": name, "rule": rule, "rate": rate, "seed": seed}
    changes = [*setting.changes, *setting.of(rule), f"{setting.rate}={rate}", *setting.faster]
    return kept.measure(label, setting.recipe, changes)


def measured(name: str, setting: Setting, kept: Kept) -> Measured:
    """The measured figures of a setting's rules."""
    if setting.kept is not None:
        return setting.kept()
    return {
        rule: _seeds(kept, 1.0, setting=name, rule=rule, search=setting.search)
        for rule in (FLAT, *RULES)
    }


def repeated(figures: Measured) -> float:
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


def write() -> None:
    """Put the tables into the page."""
    kept, predicted = Kept(KEPT), json.loads(PREDICTED.read_text(encoding="utf-8"))
    rows, pairs, per_setting = [], [], []
    for name, setting in SETTINGS.items():
        figures = measured(name, setting, kept)
        scores: Mapping[str, float] = predicted[name]
        points = []
        for rule in RULES:
            if not figures.get(rule) or not figures.get(FLAT):
                continue
            found = against(figures[rule], figures[FLAT])
            if found is None:
                continue
            gain = found if isinstance(found, float) else found.mean
            points.append((scores[rule], gain))
            count = len(figures[rule].keys() & figures[FLAT].keys())
            origin = "kept" if setting.kept is not None else "new"
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
        pairs += points
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
            agreement = repeated(figures)
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
    scored = json.loads(SCORED.read_text(encoding="utf-8"))
    found_rows = [
        [name, *(f"{values[rule]:.2f}" for rule in RULES)] for name, values in scored.items()
    ]
    data = {
        "settings": table(columns, per_setting),
        "pairs": table(header, rows),
        "screened": table(["setting", *RULES], found_rows),
    }
    show(DATA_PAGE, data, write=True)
    if len(pairs) > 2:
        ranks = spearmanr([s for s, _ in pairs], [g for _, g in pairs])
        print(
            f"{len(pairs)} pairs, rank correlation {float(ranks.statistic):.3f}, p "
            f"{float(ranks.pvalue):.2g}"
        )
        mean = statistics.fmean(float(row[1]) for row in per_setting)
        print(f"{len(per_setting)} settings, mean rank correlation {mean:.3f}")
        halves = [float(row[2]) for row in per_setting if row[2]]
        print(
            f"two halves of the seeds: {statistics.fmean(halves):.3f} over {len(halves)} settings"
        )
        wide = [float(row[1]) for row in per_setting if float(row[3]) >= WIDE]
        print(f"{len(wide)} settings with a spread of {WIDE} or more: {statistics.fmean(wide):.3f}")


def _ranks(points: Sequence[tuple[float, float]]) -> float:
    """Rank correlation of scores and changes, the flat rule included."""
    scores, changes = zip((1.0, 0.0), *points, strict=True)
    return float(spearmanr(scores, changes).statistic)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--minutes", type=float, default=float("inf"))
    values = parser.parse_args()
    if values.predict:
        predict()
    elif values.write:
        write()
    else:
        go_on(values.minutes)


if __name__ == "__main__":
    main()
