"""Do clients vote for the cut of their updates that trains the better model? A section of
docs/results/adaptive.md.

    python -m benchmarks.cut_votes BASE      # the votes of the first round, with hardly any noise
    python -m benchmarks.cut_votes --write   # the table of docs/results/adaptive.md

The settings are those of `benchmarks.water_filling` and `benchmarks.real_models`, whose runs tell
which cut is better. BASE is the file of `fedlgm pretrain text-adapters`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

import simulations
from benchmarks import real_models, water_filling
from benchmarks.adaptive import PAGE
from benchmarks.kept import Kept, change, command_line
from benchmarks.pages import show, table
from fedlgm.planning.queries import CutVote
from fedlgm_lab.studies.results import Study

KEPT = PAGE.with_name("cut-votes.json")
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


def settings(base: Path) -> Iterator[tuple[str, Setting]]:
    """The ten settings of the page, by name."""
    kept = Kept(water_filling.KEPT)
    for name, digits in water_filling.DIGITS.items():
        found = []
        for rule in (water_filling.FLAT, water_filling.FILLING):
            rows = kept.find(task=name, rule=rule, rate=water_filling.best_rate(kept, name, rule))
            found.append({row["seed"]: row["accuracy"] for row in rows if row["seed"] in SEEDS})
        changes = {"model.hidden": list(digits.hidden), **(_ADAM if digits.adam else {})}
        yield name, Setting(digits.title, "digits", changes, *found)
    for name, model in real_models.measured(real_models.FILLING).items():
        frame = Study.read(real_models.kept_at(name, real_models.FILLING)).to_frame()
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


def compared(kept: Kept, base: Path) -> str:
    """One row per setting: the votes, and the measured change by water-filling."""
    lines = []
    for name, setting in settings(base):
        shares = [row["share"] for row in kept.find(setting=name)]
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


def main() -> None:
    """See the module."""
    parser = command_line(__doc__, KEPT)
    parser.add_argument(
        "base", nargs="?", type=Path, default=Path("text-base.safetensors"), help="the public base"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept = Kept(options.kept, options.minutes)
    for name, setting in () if options.write else settings(options.base):
        for seed in SEEDS:
            kept.keep({"setting": name, "seed": seed}, partial(vote, setting, seed))
    if options.write:
        show(PAGE, {"votes": compared(kept, options.base)}, write=True)


if __name__ == "__main__":
    main()
