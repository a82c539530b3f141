"""Accuracy of membership attacks on each layer for several values of LM-DP-SGD's emphasis factor r
(Table 6 of its paper), and of the same attacks without privacy.

    fedlgm study 002-table-6 --set data=FOLDER

The S-CNN is trained on so few images of CIFAR-10 that it memorises them. The error rates of the
layers are measured with public images, on examples that the adversaries have not seen.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pandas as pd
import torch

from fedlgm import data
from fedlgm.data import DataSet
from fedlgm.noise.keys import KeyRing
from fedlgm.training import models
from fedlgm_lab.risk.exposure import ShadowTraining, layer_errors, layer_risk
from fedlgm_lab.studies.statistics import holm
from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.pages import interval, table
from fedlgm_lab.studies.tables.runs import Cell, cells, labels, measure_cells
from fedlgm_lab.studies.tables.store import LEAST_SEEDS, Kept, Row, against, simulated

NAME, MODEL = "layer-attacks", "s-cnn"
PRIVATE, PUBLIC = 1000, 2000
ADVERSARIES = ShadowTraining(epochs=30, lr=1e-3, adversary_epochs=10)
EXPECTED = {"conv1": "higher", "fc2": "lower"}
"""First and last layer, each with the direction in which, by the paper, the attack's accuracy moves
as r grows.
"""


@lru_cache(maxsize=1)
def images(folder: str) -> tuple[DataSet, DataSet]:
    """Load the private and the public images, each with all test images as test part."""
    whole = data.load("cifar10", folder)
    order = np.random.default_rng(0).permutation(len(whole.train_y))
    private, public = order[:PRIVATE], order[PRIVATE : PRIVATE + PUBLIC]
    return whole.keep(private), whole.keep(public)


def measure_risk(folder: str) -> Row:
    """Measure the held-out error rates and the strengths of the layers with public images."""
    _, public = images(folder)
    x, y = torch.from_numpy(public.train_x), torch.from_numpy(public.train_y)
    shape = (int(x.shape[1]), int(x.shape[2]), int(x.shape[3]))
    shadow = models.build(MODEL, in_shape=shape, classes=public.classes, seed=7)
    found = layer_risk(shadow, x, y, keys=KeyRing.from_seed(7), training=ADVERSARIES)
    return {
        "layers": [row.layer for row in found],
        "error_rates": [round(row.held_out_error, 4) for row in found],
        "strengths": [round(row.strength, 4) for row in found],
    }


def attack(store: Kept, recipe: str, changes: Mapping[str, Any], seed: int) -> Row:
    """Train a model, and attack each of its layers with an adversary that knows half of the
    members.
    """
    private, _ = images(store.settings["data"])
    changes = {**changes, "run.seed": seed}
    if "mechanism.weights" in changes:
        (risk,) = store.find(risk="public")
        rates = {key: risk[key] for key in ("error_rates", "strengths")}
        changes |= {f"mechanism.{key}": values for key, values in rates.items()}
    started = time.process_time()
    with simulated(recipe, overrides=changes, data=private) as result:
        module, test = result.model(), result.accuracy
        status, epsilon = str(result["guarantee_status"]), result.epsilon
    x = torch.from_numpy(np.concatenate([private.train_x, private.test_x]))
    y = torch.from_numpy(private.train_y)
    count = min(len(y), len(x) - len(y))
    with torch.no_grad():
        members = float((module(x[: len(y)]).argmax(1) == y).float().mean())
    errors = layer_errors(
        module,
        x,
        torch.arange(count),
        len(y) + torch.arange(count),
        keys=KeyRing.from_seed(1000 + seed),
        training=ADVERSARIES,
    )
    return {
        "epsilon": None if status == "none" else round(epsilon, 6),
        "guarantee": status,
        "accuracy": round(100 * test, 2),
        "accuracy_members": round(100 * members, 2),
        "attacks": {layer: round(100 * (1 - unseen), 2) for layer, (_, unseen) in errors.items()},
        "seconds": round(time.process_time() - started, 1),
    }


def measure(store: Kept) -> None:
    """Measure the layers' risk, then make all runs, seed by seed."""
    folder = str(store.input("data", "the folder of CIFAR-10"))
    store.keep({"risk": "public"}, partial(measure_risk, folder))
    measure_cells(cells(store, NAME, partial(attack, store)))


def attacks(store: Kept) -> str:
    """Make the table of attacks on each layer and of accuracies, by budget and emphasis."""
    lines, layers = [], []
    for cell in cells(store, NAME):
        rows = store.find(**cell.name)
        if len(rows) < LEAST_SEEDS:
            continue
        by_layer = [
            interval([row["attacks"][layer] for row in rows], 1) for layer in rows[0]["attacks"]
        ]
        accuracy = [
            interval([row[key] for row in rows], 1) for key in ("accuracy_members", "accuracy")
        ]
        budget, emphasis = cell.name.get("budget", "no privacy"), cell.name.get("emphasis", "-")
        lines.append([f"{budget}", f"{emphasis}", *by_layer, *accuracy, str(len(rows))])
        layers = list(rows[0]["attacks"])
    header = ["epsilon", "r", *layers, "on its members", "test accuracy", "seeds"]
    return table(header, lines) if lines else ""


def _by_seed(cell: Cell, layer: str) -> pd.Series:
    rows = cell.store.find(**cell.name)
    return pd.Series({row["seed"]: row["attacks"][layer] for row in rows}, dtype=float)


def changes(store: Kept) -> str:
    """Make the table of the accuracy of the attacks on the first and the last layer at the largest
    r minus the accuracy at the smallest r.
    """
    least, most = labels(NAME, "emphasis")[0], labels(NAME, "emphasis")[-1]
    lines, tests = [], []
    for budget in labels(NAME, "budget"):
        first, last = (
            cells(store, NAME, budget=budget, emphasis=emphasis)[0] for emphasis in (least, most)
        )
        for layer, expected in EXPECTED.items():
            test = against(_by_seed(last, layer), _by_seed(first, layer))
            if test.seeds >= LEAST_SEEDS:
                tests.append(test)
                lines.append([f"{budget:g}", layer, expected])
    for line, test, p in zip(lines, tests, holm([test.p for test in tests]), strict=True):
        same = (test.mean > 0) == (line[-1] == "higher")
        outcome = "not decided" if p >= 0.05 else "reproduced" if same else "refuted"
        line += [f"{test.mean:+.1f} ({test.low:+.1f} to {test.high:+.1f})", f"{p:.2g}", outcome]
    difference = f"r = {most:g} minus r = {least:g}, points, 95 % interval"
    header = ["epsilon", "layer", "paper", difference, "p", "outcome"]
    return table(header, lines) if lines else ""


def texts(store: Kept) -> Pages:
    """Make the page's tables."""
    tables = {"attacks over r": attacks(store), "changes over r": changes(store)}
    return {"lm-dp-sgd.md": tables if store.rows else {}}


MAKER = Maker(
    "layer-attacks.json", texts, measure, inputs={"data": "the folder of CIFAR-10"}, partial=True
)
