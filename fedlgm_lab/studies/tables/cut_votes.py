"""Tests whether clients vote for the way of clipping that trains the better model.

The settings come from `water_filling` and `real_models`, whose runs show which way of clipping is
better. The votes are taken in the first round, with hardly any noise.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

import simulations
from fedlgm.errors import ConfigError
from fedlgm.planning.queries import CutVote
from fedlgm_lab.studies.results import Study
from fedlgm_lab.studies.tables import real_models, water_filling
from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.pages import table
from fedlgm_lab.studies.tables.runs import settings
from fedlgm_lab.studies.tables.store import CHANGE, Kept, change

SEEDS = (1, 2, 3, 4, 5)
_ADAM = {"training.optimizer": "adam", "training.lr": 0.01}


class Setting(NamedTuple):
    """A model in a federation, with its title, recipe and changes of the recipe, and with the
    measured accuracies of flat clipping and of water-filling in per cent, by seed.
    """

    title: str
    recipe: str
    changes: dict[str, object]
    flat: pd.Series
    filled: pd.Series


def settings_of(folder: Path, base: str) -> Iterator[tuple[str, Setting]]:
    """Yield the name of every setting and the setting, with the runs that a folder holds."""
    store = water_filling.MAKER.open(folder)
    assert isinstance(store, Kept)
    rules = water_filling.FLAT, water_filling.FILLING
    for group in settings(water_filling.NAME)["groups"]:
        task, options = group["name"]["task"], group["set"]
        runs = water_filling.runs_of(store, task)
        changes = {"model.hidden": options["hidden"], **(_ADAM if options["adam"] else {})}
        figures = [runs[rule].figures() for rule in rules]
        yield task, Setting(group["title"], "digits", changes, *figures)
    for name, model in real_models.settings_with_runs(folder, real_models.FILLING).items():
        frame = Study.read(real_models.kept_at(folder, name, real_models.FILLING)).to_frame()
        by_seed = 100 * frame.set_index(["method", "seed"])["accuracy"]
        changes = real_models.changes(model, base)
        figures = [by_seed[rule] for rule in rules]
        yield name, Setting(model["title"], model["recipe"], changes, *figures)


def vote(setting: Setting, seed: int) -> dict[str, float]:
    """Return the share of the first cohort's clients that vote for water-filling; an abstention
    counts as half a vote.
    """
    once = {
        "mechanism.name": "voted-filling",
        "federation.rounds": 1,
        "privacy.epsilon": 1e4,
        "run.seed": seed,
    }
    voted = simulations.simulate(setting.recipe, overrides=setting.changes | once, engine="local")
    return {"share": voted.history[1]["queries"][CutVote.name][0]}


def comparison(store: Kept) -> str:
    """Make the table of the votes and of the measured change by water-filling in every setting."""
    lines = []
    for name, setting in settings_of(store.folder, ""):
        shares = [row["share"] for row in store.find(setting=name)]
        if shares:
            least, most = (f"{100 * share:.0f}" for share in (min(shares), max(shares)))
            mean = np.mean(shares)
            chosen = (
                "either" if abs(mean - 0.5) < 0.01 else "water-filling" if mean > 0.5 else "flat"
            )
            lines.append(
                [setting.title, f"{least} to {most}", chosen, *change(setting.filled, setting.flat)]
            )
    header = ["setting", "votes for water-filling (%)", "choice", "change by water-filling"]
    return table([*header, *CHANGE[1:]], lines)


def measure(store: Kept) -> None:
    """Take the votes in every setting.

    Raises:
        ConfigError: the runs of water-filling are missing.
    """
    if not (store.folder / water_filling.MAKER.file).is_file():
        raise ConfigError("cut-votes compares runs of water-filling: fedlgm study water-filling")
    for name, setting in settings_of(store.folder, store.settings.get("base", "")):
        for seed in SEEDS:
            store.keep({"setting": name, "seed": seed}, partial(vote, setting, seed))


def texts(store: Kept) -> Pages:
    """Make the page's table."""
    return {"adaptive.md": {"votes": comparison(store)}}


MAKER = Maker("cut-votes.json", texts, measure, inputs={"base": real_models.BASE})
