"""Whether a rule beats flat clipping on models that people train.

Four models are for text: a transformer that was pretrained on public text and then frozen, with
adapters (LoRA) or with its last block open, and a recurrent network and a transformer with
embeddings, trained from a random start by Adam on the clients. Clients are chapters of the King
James Bible, cut to eight windows of 32 characters. The fifth is the CNN of the recipe
`fashion-mnist`, with Adam clients. Every rule gets the same search, over three seeds, of the server
learning rate, and is run with five other seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fedlgm_lab.studies.records import plain_values
from fedlgm_lab.studies.results import Study
from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.noise_and_split import WINDOWS
from fedlgm_lab.studies.tables.pages import table
from fedlgm_lab.studies.tables.store import Values
from simulations import recommend, study
from simulations.runs import strict_json

BASE = "the file of fedlgm pretrain text-adapters, for the models that start from it"
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
    "data.name": "fedlgm_lab.studies.tables.noise_and_split:beginnings",
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


def changes(setting: Setting, base: str) -> dict[str, Any]:
    """A setting's changes; those that start from the public base name its file."""
    return setting.changes | ({"model.weights": base} if setting.recipe == "text-adapters" else {})


def measure(store: Values) -> None:
    """Scores of every setting that has none, before the runs; then the runs."""
    base = str(store.input("base", BASE)) if len(store.values) < len(SETTINGS) - 1 else ""
    for name, setting in SETTINGS.items():
        if name != "cnn":  # which has no public examples to score
            store.get(name, partial(_predicted, setting, base))
    text = tuple(name for name in SETTINGS if name != "cnn")
    jobs = [(RULES, name) for name in text] + [(FILLING, name) for name in SETTINGS]
    for rules, name in [*jobs, (VOTES, "adapters")]:
        if not kept_at(store.folder, name, rules).exists():
            store.check_time()
            run(store, name, rules)


def _predicted(setting: Setting, base: str) -> dict[str, float]:
    whole = {"data.name": "bible-kjv-chapters"}  # whose test windows can be read alone
    advice = recommend(
        setting.recipe,
        public="test",
        overrides=changes(setting, base) | whole,
        examples=CLIENTS * WINDOWS,
    )
    return {rule: round(advice.scores[rule], 4) for rule in RULES if rule in advice.scores}


def kept_at(folder: Path, name: str, rules: Sequence[str]) -> Path:
    """File of a setting's runs with flat clipping and these rules."""
    return (
        folder
        / "real-models"
        / (f"{name}.json" if rules == RULES else f"{name}-{'-'.join(rules)}.json")
    )


def settings_with_runs(folder: Path, rules: Sequence[str]) -> dict[str, Setting]:
    """The settings in which these rules have been run."""
    return {
        name: setting for name, setting in SETTINGS.items() if kept_at(folder, name, rules).exists()
    }


def run(store: Values, name: str, rules: Sequence[str]) -> None:
    """Make or continue one setting's study of flat clipping and these rules, and keep its
    outcome.
    """
    setting, file = SETTINGS[name], kept_at(store.folder, name, rules)
    found = study(
        setting.recipe,
        grid={"mechanism": [FLAT, *rules]},
        search={"federation.server_lr": setting.rates},
        seeds=5,
        workers=int(store.settings.get("workers", 1)),
        overrides=changes(setting, str(store.input("base", BASE))),
        folder=Path("runs") / f"real-models-{file.stem}",
    )
    file.parent.mkdir(exist_ok=True)
    strict_json.write(file, plain_values(found.records), indent=1)


def comparison(store: Values, rules: Sequence[str]) -> str:
    """A page's table: these rules against flat clipping in every setting that has been run, in
    points of accuracy.
    """
    lines = []
    for name, setting in settings_with_runs(store.folder, rules).items():
        found = Study.read(kept_at(store.folder, name, rules))
        flat = found.to_frame().query("method == @FLAT")["accuracy"].mean()
        for rule in rules:
            one = found.difference(rule, FLAT, metric="accuracy")
            score = store.values.get(name, {}).get(rule)  # the CNN has no predictions
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


def texts(store: Values) -> Pages:
    """Rules of allocation, water-filling, and its choice by vote."""
    names = {"water-filling on real models": FILLING, "votes on real models": VOTES}
    filled = {
        name: comparison(store, rules) if settings_with_runs(store.folder, rules) else ""
        for name, rules in names.items()
    }
    shown = comparison(store, RULES) if settings_with_runs(store.folder, RULES) else ""
    return {"recommend.md": {"real models": shown}, "adaptive.md": filled}


MAKER = Maker(
    "real-models-predicted.json",
    texts,
    measure,
    Values,
    inputs={"base": BASE, "workers": "processes that make the runs"},
    partial=True,
)
