"""Tests whether an allocation rule beats flat clipping on realistic models.

Four models are for text. Two of them are a transformer that was pretrained on public text and then
frozen, once with adapters (LoRA) and once except for its last block. The other two are a recurrent
network and a transformer with embeddings, trained from a random start by Adam on the clients.
Clients are chapters of the King James Bible, cut to eight windows of 32 characters. The fifth model
is the CNN of the recipe `fashion-mnist`, trained by Adam on the clients. For every rule, the same
server learning rates are searched over three seeds; the best rate is then run with five other
seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from fedlgm_lab.studies.records import plain_values
from fedlgm_lab.studies.results import Study
from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.noise_and_split import WINDOWS
from fedlgm_lab.studies.tables.pages import table
from fedlgm_lab.studies.tables.runs import settings
from fedlgm_lab.studies.tables.store import Values
from simulations import recommend, study
from simulations.runs import strict_json

BASE = "the file of fedlgm pretrain text-adapters, for the models that start from it"
CLIENTS = 1189
Setting = Mapping[str, Any]
"""A model in a federation, as a table with title, recipe, changes and searched server learning
rates.
"""
FLAT = "gaussian"
RULES = ("uniform", "snr-consistent", "adaptive")
FILLING = ("water-filling",)
VOTES = ("water-filling", "voted-filling")
SETTINGS: dict[str, Setting] = settings("real-models")


def changes(setting: Setting, base: str) -> dict[str, Any]:
    """Return a setting's changes of the recipe. If the setting starts from the public base model,
    the changes name the file of this model.
    """
    weights = {"model.weights": base} if setting["recipe"] == "text-adapters" else {}
    return setting["set"] | weights


def measure(store: Values) -> None:
    """Compute the missing scores of every setting, and then make the missing runs."""
    base = str(store.input("base", BASE)) if len(store.values) < len(SETTINGS) - 1 else ""
    for name, setting in SETTINGS.items():
        if name != "cnn":  # the CNN has no public examples to score
            store.get(name, partial(_predicted, setting, base))
    text = tuple(name for name in SETTINGS if name != "cnn")
    jobs = [(RULES, name) for name in text] + [(FILLING, name) for name in SETTINGS]
    for rules, name in [*jobs, (VOTES, "adapters")]:
        if not kept_at(store.folder, name, rules).exists():
            store.check_time()
            run(store, name, rules)


def _predicted(setting: Setting, base: str) -> dict[str, float]:
    whole = {"data.name": "bible-kjv-chapters"}  # the test windows of this set can be read alone
    advice = recommend(
        setting["recipe"],
        public="test",
        overrides=changes(setting, base) | whole,
        examples=CLIENTS * WINDOWS,
    )
    return {rule: round(advice.scores[rule], 4) for rule in RULES if rule in advice.scores}


def kept_at(folder: Path, name: str, rules: Sequence[str]) -> Path:
    """Return the file of a setting's runs with flat clipping and these rules."""
    return (
        folder
        / "real-models"
        / (f"{name}.json" if rules == RULES else f"{name}-{'-'.join(rules)}.json")
    )


def settings_with_runs(folder: Path, rules: Sequence[str]) -> dict[str, Setting]:
    """Return the settings for which runs with these rules are stored."""
    return {
        name: setting for name, setting in SETTINGS.items() if kept_at(folder, name, rules).exists()
    }


def run(store: Values, name: str, rules: Sequence[str]) -> None:
    """Make or continue a setting's study of flat clipping and these rules; store its figures."""
    setting, file = SETTINGS[name], kept_at(store.folder, name, rules)
    found = study(
        setting["recipe"],
        grid={"mechanism": [FLAT, *rules]},
        search={"federation.server_lr": setting["rates"]},
        seeds=5,
        workers=int(store.settings.get("workers", 1)),
        overrides=changes(setting, str(store.input("base", BASE))),
        folder=Path("runs") / f"real-models-{file.stem}",
    )
    file.parent.mkdir(exist_ok=True)
    strict_json.write(file, plain_values(found.records), indent=1)


def comparison(store: Values, rules: Sequence[str]) -> str:
    """Make the table that compares these rules with flat clipping in every setting with stored
    runs, in points of accuracy.
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
                    setting["title"],
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
    """Make the tables of allocation rules, of water-filling and of water-filling by vote."""
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
