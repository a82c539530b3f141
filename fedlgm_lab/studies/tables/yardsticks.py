"""The field's yardsticks: DP-SGD at epsilon 3 beside the published figures of F. Tramèr and
D. Boneh, *Differentially Private Learning Needs Better Features (or Much More Data)*, 2021.

    fedlgm study yardsticks --set data=FOLDER

Batches, learning rates and passes are those of their code, so nothing is searched.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from fedlgm import data
from fedlgm.data import DataSet
from fedlgm_lab.studies.tables import central_allocations
from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.pages import spread, table
from fedlgm_lab.studies.tables.runs import cells, settings
from fedlgm_lab.studies.tables.scattering import Scattering, normalise_groups
from fedlgm_lab.studies.tables.store import Kept, Row, figures

_SETTINGS = settings("yardsticks")
RECIPE, SEEDS, GROUPS = _SETTINGS["recipe"], tuple(_SETTINGS["seeds"]), 27
LINEAR, CNN = "ScatterNet, linear", "CNN"
BLOCK = 50
"""Images that are transformed at a time."""


@dataclass(frozen=True)
class Yardstick:
    """A model on a set of images, with its published settings.

    Attributes:
        set: name of the set.
        model: `LINEAR` or `CNN`.
        published: published accuracy in per cent.
        batch: expected size of a batch; 0 for a model that is not run here.
        lr: learning rate.
        passes: passes over the training examples.
        network: name of the network of `CNN`.
    """

    set: str
    model: str
    published: float
    batch: int = 0
    lr: float = 0.0
    passes: int = 40
    network: str = "cnn"

    def overrides(self, examples: int) -> list[str]:
        """Changes of the recipe for so many training examples."""
        batch = min(self.batch, examples)
        steps = max(1, round(self.passes * examples / batch))
        return [
            f"training.batch_size={batch}",
            f"training.lr={self.lr}",
            *(f"{key}={value}" for key, value in _SETTINGS["set"].items()),
            f"federation.rounds={steps}",
            f"run.evaluate_every={steps}",
            f"run.checkpoint_every={steps}",
        ]


YARDSTICKS = tuple(Yardstick(**values) for values in _SETTINGS["yardsticks"])


@lru_cache(maxsize=1)
def images(name: str, folder: str | None, examples: int | None) -> DataSet:
    """A set with pixels in [0, 1]; for a trial, its first training and test examples."""
    loaded = data.load(name, folder, pixels=(0, 1))
    if examples is None:
        return loaded
    test_x, test_y = loaded.test_x[:examples], loaded.test_y[:examples]
    return replace(loaded.keep(np.arange(examples)), test_x=test_x, test_y=test_y)


@lru_cache(maxsize=1)
def features(name: str, folder: str | None, examples: int | None) -> DataSet:
    """The same set with each image's features, scaled by themselves alone."""
    pictures = images(name, folder, examples)
    scattering = Scattering(pictures.train_x.shape[-1])

    def transform(x: np.ndarray) -> np.ndarray:
        scattered = map(scattering, torch.from_numpy(x).split(BLOCK))
        rows = [normalise_groups(block, GROUPS).flatten(1).numpy() for block in scattered]
        return np.concatenate(rows)

    return replace(pictures, train_x=transform(pictures.train_x), test_x=transform(pictures.test_x))


def run(yardstick: Yardstick, folder: str | None, examples: int | None, seed: int) -> Row:
    """A run, with its settings."""
    asked = (yardstick.set, folder, examples)
    parts: dict[str, Any] = {"data": images(*asked)}
    changes = [f"model.name={yardstick.network}"]
    if yardstick.model == LINEAR:
        parts["data"] = features(*asked)
        count = parts["data"].train_x.shape[-1]
        parts["model"], changes = (lambda: nn.Linear(count, 10)), []
    changes += yardstick.overrides(len(parts["data"].train_y))
    return {"changes": changes, **figures(RECIPE, changes, seed, **parts)}


def measure(store: Kept) -> None:
    """All yardsticks with settings."""
    folder = store.settings.get("data")
    examples = store.settings.get("examples")
    for yardstick in YARDSTICKS:
        for seed in SEEDS if yardstick.batch else ():
            name = {"set": yardstick.set, "model": yardstick.model, "seed": seed}
            store.keep(
                name | ({} if examples is None else {"examples": examples}),
                lambda: run(yardstick, folder, examples, seed),  # noqa: B023  (called at once)
            )


def texts(store: Kept) -> Pages:
    """Our figures beside the published ones."""
    rows = [
        _row(one, store.find(set=one.set, model=one.model, examples=store.settings.get("examples")))
        for one in YARDSTICKS
    ]
    rate, runs = _shorter(store.folder)
    if runs:
        shorter = Yardstick("fashion-mnist", CNN, 86.0, 512, rate, passes=10)
        rows.append(_row(shorter, runs))
    header = [
        "data", "model", "batch", "lr", "passes", "published (%)", "fedlgm (%)", "difference",
        "seeds", "minutes of a run",
    ]  # fmt: skip
    return {"yardsticks.md": {"yardsticks": table(header, rows)}}


def _row(yardstick: Yardstick, runs: Sequence[Row]) -> list[str]:
    line = [yardstick.set, yardstick.model, "-", "-", "-"]
    if yardstick.batch:
        line[2:] = [str(yardstick.batch), f"{yardstick.lr:g}", str(yardstick.passes)]
    line.append(f"{yardstick.published}")
    if not runs:
        return [*line, "not run", "-", "-", "-"]
    accuracies = [row["final"] for row in runs]
    minutes = statistics.fmean(row["seconds"] for row in runs) / 60
    gap = statistics.fmean(accuracies) - yardstick.published
    return [*line, spread(accuracies), f"{gap:+.2f}", str(len(runs)), f"{minutes:.1f}"]


def _shorter(folder: Path) -> tuple[float, list[Row]]:
    """The searched rate and the runs of the flat mechanism in the page of central allocations."""
    kept = Kept(folder / central_allocations.MAKER.file)
    (cell,) = cells(kept, central_allocations.NAME, rule="flat", steps=central_allocations.STEPS)
    rate = cell.rate()
    if rate is None:
        return 0.0, []
    rows = kept.find(**cell.name, lr=rate)
    return rate, [row for row in rows if row["seed"] in cell.seeds]


MAKER = Maker(
    "yardsticks.json",
    texts,
    measure,
    inputs={
        "data": "the folder of MNIST and CIFAR-10",
        "examples": "the number of training and test examples, for a trial",
    },
    partial=True,
)
