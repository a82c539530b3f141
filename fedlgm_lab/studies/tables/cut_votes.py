"""Whether clients vote for the cut of their updates that trains the better model.

The settings are those of `water_filling` and `real_models`, whose runs tell which cut is better.
The votes are those of the first round, with hardly any noise.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import simulations
from fedlgm.errors import ConfigError
from fedlgm.planning.queries import CutVote
from fedlgm_lab.studies.results import Study
from fedlgm_lab.studies.tables import real_models, water_filling
from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.pages import table
from fedlgm_lab.studies.tables.store import Kept, change

SEEDS = water_filling.SEEDS
_ADAM = {"training.optimizer": "adam", "training.lr": 0.01}


class Setting(NamedTuple):
    """A model in one federation: its title, recipe and changes, and measured accuracies of both
    rules in per cent.
    """

    title: str
    recipe: str
    changes: dict[str, object]
    flat: dict[int, float]
    filled: dict[int, float]


def settings(folder: Path, base: str) -> Iterator[tuple[str, Setting]]:
    """The ten settings of the page, by name, with the runs that a folder keeps."""
    store = water_filling.MAKER.open(folder)
    assert isinstance(store, Kept)
    for name, digits in water_filling.DIGITS.items():
        found = []
        for rule in (water_filling.FLAT, water_filling.FILLING):
            rows = store.find(task=name, rule=rule, rate=water_filling.best_rate(store, name, rule))
            found.append({row["seed"]: row["accuracy"] for row in rows if row["seed"] in SEEDS})
        changes = {"model.hidden": list(digits.hidden), **(_ADAM if digits.adam else {})}
        yield name, Setting(digits.title, "digits", changes, *found)
    for name, model in real_models.settings_with_runs(folder, real_models.FILLING).items():
        frame = Study.read(real_models.kept_at(folder, name, real_models.FILLING)).to_frame()
        found = []
        for rule in (real_models.FLAT, *real_models.FILLING):
            rows = frame[frame["method"] == rule]
            found.append(
                {seed: 100 * one for seed, one in zip(rows["seed"], rows["accuracy"], strict=True)}
            )
        yield name, Setting(model.title, model.recipe, real_models.changes(model, base), *found)


def vote(setting: Setting, seed: int) -> dict[str, float]:
    """The share of the first cohort's clients that prefer water-filling; those that abstain count
    as half.
    """
    one = {
        "mechanism.name": "voted-filling",
        "federation.rounds": 1,
        "privacy.epsilon": 1e4,
        "run.seed": seed,
    }
    made = simulations.simulate(setting.recipe, overrides=setting.changes | one, engine="local")
    return {"share": made.history[1]["queries"][CutVote.name][0]}


def comparison(store: Kept) -> str:
    """One row per setting: the votes, and the measured change by water-filling."""
    lines = []
    for name, setting in settings(store.folder, ""):
        shares = [row["share"] for row in store.find(setting=name)]
        if shares:
            least, most = (f"{100 * one:.0f}" for one in (min(shares), max(shares)))
            mean = statistics.fmean(shares)
            chosen = (
                "either" if abs(mean - 0.5) < 0.01 else "water-filling" if mean > 0.5 else "flat"
            )
            lines.append(
                [setting.title, f"{least} to {most}", chosen, *change(setting.filled, setting.flat)]
            )
    header = [
        "setting",
        "votes for water-filling (%)",
        "choice",
        "change by water-filling",
        "95 % interval",
        "p",
    ]
    return table(header, lines)


def measure(store: Kept) -> None:
    """The votes in every setting."""
    if not (store.folder / water_filling.MAKER.file).is_file():
        raise ConfigError("cut-votes compares runs of water-filling: fedlgm study water-filling")
    for name, setting in settings(store.folder, store.settings.get("base", "")):
        for seed in SEEDS:
            store.keep({"setting": name, "seed": seed}, partial(vote, setting, seed))


def texts(store: Kept) -> Pages:
    """The votes beside the measured change."""
    return {"adaptive.md": {"votes": comparison(store)}}


MAKER = Maker("cut-votes.json", texts, measure, inputs={"base": real_models.BASE})
