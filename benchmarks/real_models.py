"""Does a rule beat flat clipping on models that people train? Tables of docs/results/recommend.md
and adaptive.md.

    python -m benchmarks.real_models predict BASE                 # scores, kept before the runs
    python -m benchmarks.real_models run BASE [--workers N]       # make or continue the studies, in
    runs/ python -m benchmarks.real_models run BASE --filling           # water-filling, beside flat
    clipping once more python -m benchmarks.real_models run BASE --votes             # and its
    choice by vote, beside both python -m benchmarks.real_models write                        # the
    tables of both pages

Four models are for text: a transformer that was pretrained on public text and then frozen, with
adapters (LoRA) or with its last block open, and a recurrent network and a transformer with
embeddings, trained from a random start by Adam on the clients. BASE is the file of
`fedlgm pretrain text-adapters`. Clients are chapters of the King James Bible, cut to eight windows
of 32 characters. The fifth is the CNN of the recipe `fashion-mnist`, with Adam clients. Every rule
gets the same search, over three seeds, of the server learning rate, and is run with five other
seeds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import adaptive
from benchmarks.kept import Values
from benchmarks.noise_and_split import WINDOWS
from benchmarks.pages import show, table
from benchmarks.recommend import PAGE
from fedlgm_lab.studies.records import plain_values
from fedlgm_lab.studies.results import Study
from simulations import recommend, study
from simulations.runs import strict_json

KEPT, PREDICTED = PAGE.with_name("real-models"), PAGE.with_name("real-models-predicted.json")
CLIENTS = 1189
FLAT = "gaussian"
RULES = ("uniform", "snr-consistent", "adaptive")
FILLING = ("water-filling",)
VOTES = ("water-filling", "voted-filling")
_LAST: dict[str, Any] = {
    "run.evaluate_every": 1000,
    "run.checkpoint_every": 1000,
}  # the last round is always evaluated
_CUT: dict[str, Any] = {
    **_LAST,
    "data.name": "benchmarks.noise_and_split:beginnings",
    "training.batch_size": 8,
    "federation.rounds": 30,
    "run.block_size": 32,
    "training.vectorize": "on",
}
_ADAM = {"training.optimizer": "adam", "training.lr": 0.01}


class Setting(NamedTuple):
    """A model in one federation.

    Attributes:
        title: its name in the table.
        recipe: bundled recipe.
        changes: changes for all rules.
        rates: searched server learning rates.
    """

    title: str
    recipe: str
    changes: dict[str, Any]
    rates: list[float]


_OPEN = {"rank": 0, "also": ["blocks.2", "norm", "outputs"]}
SETTINGS = {
    "adapters": Setting(
        "LoRA of rank 4 on a frozen, public transformer", "text-adapters", _CUT, [0.005, 0.01, 0.02]
    ),
    "frozen-trunk": Setting(
        "a frozen, public transformer with its last block open",
        "text-adapters",
        {**_CUT, "model.adapters": _OPEN, "mechanism.group_by": "module"},
        [0.0025, 0.005, 0.01],
    ),
    "embeddings-gru": Setting(
        "embeddings and GRU, Adam clients",
        "text-gru",
        {**_CUT, **_ADAM, "model.hidden": 32},
        [0.125, 0.25, 0.5, 1.0],
    ),
    "transformer": Setting(
        "embeddings and transformer, Adam clients",
        "text-transformer",
        _CUT,
        [0.125, 0.25, 0.5, 1.0],
    ),
    "cnn": Setting(
        "CNN on FashionMNIST, Adam clients",
        "fashion-mnist",
        {**_LAST, "federation.rounds": 100},
        [2.0, 4.0],
    ),
}


def changes(setting: Setting, base: Path) -> dict[str, Any]:
    """A setting's changes; those that start from the public base name its file."""
    return setting.changes | (
        {"model.weights": str(base)} if setting.recipe == "text-adapters" else {}
    )


def predict(base: Path) -> None:
    """Scores of every setting that has none."""
    values = Values(PREDICTED)
    for name, setting in SETTINGS.items():
        values.get(name, partial(_predicted, setting, base))


def _predicted(setting: Setting, base: Path) -> dict[str, float]:
    whole = {"data.name": "bible-kjv-chapters"}  # whose test windows can be read alone
    advice = recommend(
        setting.recipe,
        public="test",
        overrides=changes(setting, base) | whole,
        examples=CLIENTS * WINDOWS,
    )
    return {rule: round(advice.scores[rule], 4) for rule in RULES if rule in advice.scores}


def kept_at(name: str, rules: Sequence[str]) -> Path:
    """File of a setting's runs with flat clipping and these rules."""
    return KEPT / (f"{name}.json" if rules == RULES else f"{name}-{'-'.join(rules)}.json")


def measured(rules: Sequence[str]) -> dict[str, Setting]:
    """The settings in which these rules have been run."""
    return {name: setting for name, setting in SETTINGS.items() if kept_at(name, rules).exists()}


def run(name: str, rules: Sequence[str], base: Path, workers: int) -> None:
    """Make or continue one setting's study of flat clipping and these rules, and keep its
    outcome.
    """
    setting, file = SETTINGS[name], kept_at(name, rules)
    found = study(
        setting.recipe,
        grid={"mechanism": [FLAT, *rules]},
        search={"federation.server_lr": setting.rates},
        seeds=5,
        workers=workers,
        overrides=changes(setting, base),
        folder=Path("runs") / f"real-models-{file.stem}",
    )
    KEPT.mkdir(exist_ok=True)
    strict_json.write(file, plain_values(found.records), indent=1)


def compared(rules: Sequence[str]) -> str:
    """A page's table: these rules against flat clipping in every setting that has been run, in
    points of accuracy.
    """
    predicted = json.loads(PREDICTED.read_text(encoding="utf-8"))
    lines = []
    for name, setting in measured(rules).items():
        found = Study.read(kept_at(name, rules))
        flat = found.to_frame().query("method == @FLAT")["accuracy"].mean()
        for rule in rules:
            one = found.difference(rule, FLAT, metric="accuracy")
            score = predicted.get(name, {}).get(rule)  # the CNN has no predictions
            lines.append(
                [
                    setting.title,
                    f"{100 * flat:.1f}",
                    rule,
                    "-" if score is None else f"{score:.2f}",
                    f"{100 * one.mean:+.2f}",
                    f"{100 * one.low:+.2f} to {100 * one.high:+.2f}",
                    f"{one.p:.2g}",
                ]
            )
    header = ["model", "flat (%)", "rule", "predicted", "change (points)", "95 % interval", "p"]
    return table(header, lines)


def main() -> None:
    """Predict, run or write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["predict", "run", "write"])
    parser.add_argument("base", nargs="?", type=Path, help="the public base, for predict and run")
    parser.add_argument("--settings", nargs="*", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument(
        "--filling", action="store_true", help="run water-filling instead of the other rules"
    )
    parser.add_argument(
        "--votes", action="store_true", help="run water-filling and its choice by vote"
    )
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    if arguments.what == "write":
        show(PAGE, {"real models": compared(RULES)}, write=True)
        filled = {
            "water-filling on real models": compared(FILLING),
            "votes on real models": compared(VOTES),
        }
        show(adaptive.PAGE, filled, write=True)
    elif arguments.base is None:
        parser.error(
            "predict and run need the file of the public base: fedlgm pretrain text-adapters"
        )
    elif arguments.what == "predict":
        predict(arguments.base)
    else:
        for name in arguments.settings:
            rules = VOTES if arguments.votes else FILLING if arguments.filling else RULES
            run(name, rules, arguments.base, arguments.workers)


if __name__ == "__main__":
    main()
