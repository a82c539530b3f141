"""Comparison of DP-SGD at epsilon 3 with the published figures of F. Tramèr and D. Boneh,
*Differentially Private Learning Needs Better Features (or Much More Data)*, 2021.

    fedlgm study yardsticks --set data=FOLDER

The batch sizes, learning rates and numbers of passes come from their code, so nothing is searched.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import simulations
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
STANDARDISED, SCATTERED_CNN = "ScatterNet, linear, private means", "ScatterNet, CNN"
BLOCK = 50
"""Number of images that are transformed at a time."""
CHANNELS = 3 * 81
"""Number of channels of the features of a colour image."""
LEAST = 1e-3
"""Least variance of a channel, as a share of its mean square. Without it, noise could make the
variance negative.
"""


@dataclass(frozen=True)
class Yardstick:
    """A model and a set of images, with the published settings.

    Attributes:
        set: name of the set of images.
        model: `LINEAR`, `STANDARDISED`, `SCATTERED_CNN` or `CNN`.
        published: published accuracy in per cent.
        batch: expected size of a batch.
        lr: learning rate.
        passes: passes over the training examples.
        network: name of the network, if the model is `CNN`.
    """

    set: str
    model: str
    published: float
    batch: int
    lr: float
    passes: int = 40
    network: str = "cnn"

    def overrides(self, examples: int) -> list[str]:
        """Return the changes of the recipe for this number of training examples."""
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
    """Load a set with pixels in [0, 1]; for a trial, only its first training and test examples."""
    loaded = data.load(name, folder, pixels=(0, 1))
    if examples is None:
        return loaded
    test_x, test_y = loaded.test_x[:examples], loaded.test_y[:examples]
    return replace(loaded.keep(np.arange(examples)), test_x=test_x, test_y=test_y)


def scatter(x: np.ndarray, groups: int) -> np.ndarray:
    """Compute features of images, [n, channels, height, width], normalised in groups if `groups` >
    0.
    """
    transform = Scattering(x.shape[-1])
    blocks = map(transform, torch.from_numpy(x).split(BLOCK))
    return np.concatenate(
        [(normalise_groups(block, groups) if groups else block).numpy() for block in blocks]
    )


@lru_cache(maxsize=1)
def features(name: str, folder: str | None, examples: int | None) -> DataSet:
    """Load a set and replace each image by its features, scaled only by values of this image."""
    pictures = images(name, folder, examples)
    train, test = (scatter(x, GROUPS) for x in (pictures.train_x, pictures.test_x))
    return replace(
        pictures, train_x=train.reshape(len(train), -1), test_x=test.reshape(len(test), -1)
    )


@lru_cache(maxsize=1)
def standardised(name: str, folder: str | None, examples: int | None) -> DataSet:
    """Load a set and replace each image by its features, standardised by the mean and variance of
    each channel over all training images and positions.

    Mean and variance are released with noise, and a run on this set pays for the release. An image
    contributes the means of its channels and of their squares. The public ranges of these means are
    three standard deviations around their average over the test images.
    """
    pictures = images(name, folder, examples)
    parts = {"train": scatter(pictures.train_x, 0), "test": scatter(pictures.test_x, 0)}
    moments = {
        part: np.concatenate([x.mean((2, 3)), (x**2).mean((2, 3))], axis=1)
        for part, x in parts.items()
    }
    middle, width = moments["test"].mean(0), 3 * moments["test"].std(0)
    with tempfile.TemporaryDirectory() as ledger:
        released = simulations.standardise(
            {
                "train": (moments["train"], pictures.train_y),
                "test": (moments["test"], pictures.test_y),
            },
            low=middle - width,
            high=middle + width,
            ledger=f"{ledger}/moments.sqlite",
            **_SETTINGS["moments"],
        )
    mean, square = np.split(released.mean.astype(np.float32)[:, None, None], 2)
    deviation = np.sqrt(np.maximum(square - mean**2, LEAST * abs(square)))
    for x in parts.values():  # in place: the features of CIFAR-10 take 3.7 GB
        x -= mean
        x /= deviation
    train, test = (x.reshape(len(x), -1) for x in parts.values())
    return replace(pictures, train_x=train, test_x=test, spent=released.data.spent)


def scattered_cnn() -> nn.Module:
    """Build the paper's network for the features of CIFAR-10, with 187,210 parameters."""
    layers = [
        *(nn.Conv2d(CHANNELS, 64, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(64 * 4 * 4, 10)),
    ]
    return nn.Sequential(*layers)


def run(yardstick: Yardstick, folder: str | None, examples: int | None, seed: int) -> Row:
    """Make a run, and return its figures and its settings."""
    asked = (yardstick.set, folder, examples)
    parts: dict[str, Any] = {"data": images(*asked)}
    changes = [f"model.name={yardstick.network}"]
    if yardstick.model != CNN:
        parts["data"] = (features if yardstick.model == LINEAR else standardised)(*asked)
        count = parts["data"].train_x.shape[-1]
        parts["model"], changes = (lambda: nn.Linear(count, 10)), []
    if yardstick.model == SCATTERED_CNN:
        shape, flat = (CHANNELS, 8, 8), parts["data"]
        parts["data"] = replace(
            flat, train_x=flat.train_x.reshape(-1, *shape), test_x=flat.test_x.reshape(-1, *shape)
        )
        parts["model"] = scattered_cnn
    changes += yardstick.overrides(len(parts["data"].train_y))
    return {"changes": changes, **figures(RECIPE, changes, seed, **parts)}


def measure(store: Kept) -> None:
    """Make all runs."""
    folder = store.settings.get("data")
    examples = store.settings.get("examples")
    for yardstick in YARDSTICKS:
        for seed in SEEDS:
            name = {"set": yardstick.set, "model": yardstick.model, "seed": seed}
            store.keep(
                name | ({} if examples is None else {"examples": examples}),
                lambda: run(yardstick, folder, examples, seed),  # noqa: B023  (called at once)
            )


def texts(store: Kept) -> Pages:
    """Make the table that compares the measured with the published figures."""
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
    line = [yardstick.set, yardstick.model, str(yardstick.batch), f"{yardstick.lr:g}"]
    line += [str(yardstick.passes), f"{yardstick.published}"]
    if not runs:
        return [*line, "not run", "-", "-", "-"]
    accuracies = [row["final"] for row in runs]
    minutes = statistics.fmean(row["seconds"] for row in runs) / 60
    gap = statistics.fmean(accuracies) - yardstick.published
    return [*line, spread(accuracies), f"{gap:+.2f}", str(len(runs)), f"{minutes:.1f}"]


def _shorter(folder: Path) -> tuple[float, list[Row]]:
    """Return the searched rate and the runs of the flat mechanism from `central_allocations`."""
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
