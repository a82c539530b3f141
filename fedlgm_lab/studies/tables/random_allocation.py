"""Accuracy at equal epsilon: random allocation against Poisson sampling, paired over seeds.

The setting "heart" needs the folder of the four hospitals' files of UCI's heart disease data
(`processed.*.data` with a header).
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas

import simulations
from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.pages import spread, table
from fedlgm_lab.studies.tables.store import Kept

SEEDS = range(1, 6)
SETTINGS: dict[str, tuple[str, tuple[float, ...], dict[str, Any]]] = {
    "digits": ("digits", (2.0, 8.0), {"training.kernel": "native"}),
    "fashion-mnist": (
        "fashion-mnist",
        (3.0,),
        {"federation.rounds": 100, "model.name": "mlp", "model.hidden": [32]},
    ),
    "ten-hospitals": ("ten-hospitals", (2.0, 8.0), {"run.evaluate_every": 100}),
    "heart": ("ten-hospitals", (1.0, 4.0), {"run.evaluate_every": 100, "privacy.delta": 1e-4}),
}
DRAWS: dict[str, dict[str, Any]] = {
    "poisson": {"federation.sampling": "poisson", "federation.rate": 0.1},
    "allocation": {"federation.sampling": "allocation", "federation.participations": 10},
}
"""What differs between the two sides, for settings without their own."""
OWN_DRAWS: dict[str, dict[str, dict[str, Any]]] = {
    "heart": {
        "poisson": {"training.batch_size": 74},
        "allocation": {
            "federation.sampling": "allocation",
            "federation.participations": 10,
            "training.batch_size": 74,
        },
    },
    "ten-hospitals": {
        "poisson": {"training.batch_size": 64},
        "allocation": {
            "federation.sampling": "allocation",
            "federation.participations": 14,
        },
    },
}


_SCALES = {
    "age": (50, 10), "sex": (0.5, 0.5), "cp": (3, 1), "trestbps": (130, 20), "fbs": (0.5, 0.5),
    "restecg": (1, 1), "thalach": (140, 25), "exang": (0.5, 0.5), "oldpeak": (1, 1),
}  # fmt: skip
"""Columns that all hospitals have, with public centres and scales; a missing value is its centre."""


def hospitals(folder: Path) -> dict[str, Any]:
    """Rows of the four hospitals; every fifth row of each is a test row."""
    rows, targets, owners = [], [], []
    for number, file in enumerate(sorted(folder.glob("processed.*.data"))):
        frame = pandas.read_csv(file, na_values="?", encoding="utf-8-sig")
        if "cleveland" in file.name and frame["cp"].min() == 0:  # a copy with other codes
            frame = frame.assign(
                target=1 - frame["target"],
                cp=frame["cp"].map({0: 4, 1: 2, 2: 3, 3: 1}),
                restecg=frame["restecg"].map({0: 2, 1: 0, 2: 1}),
            )
        scaled = [(frame[name] - mean) / scale for name, (mean, scale) in _SCALES.items()]
        rows.append(np.nan_to_num(np.stack(scaled, axis=1)).astype(np.float32))
        targets.append((frame["target"] > 0).to_numpy(np.int64))
        owners.append(np.full(len(frame), number))
    x, y, owner = map(np.concatenate, (rows, targets, owners))
    test = np.arange(len(y)) % 5 == 0
    held = [np.flatnonzero(owner[~test] == number) for number in range(len(owners))]
    return {"train": (x[~test], y[~test]), "test": (x[test], y[test]), "clients": held}


def measure(store: Kept) -> None:
    """All settings; "heart" if its folder is given."""
    heart = store.settings.get("heart")
    for data, (recipe, epsilons, changes) in SETTINGS.items():
        if data == "heart" and heart is None:
            continue
        for epsilon, seed in itertools.product(epsilons, SEEDS):
            for sampling, draws in OWN_DRAWS.get(data, DRAWS).items():
                name = {"data": data, "epsilon": epsilon, "seed": seed, "sampling": sampling}
                overrides = {**changes, **draws, "privacy.epsilon": epsilon, "run.seed": seed}
                hospital_data = hospitals(Path(heart)) if data == "heart" else None
                store.keep(name, partial(run, recipe, hospital_data, overrides))


def run(recipe: str, data: dict[str, Any] | None, overrides: dict[str, Any]) -> dict[str, Any]:
    """One run: its noise multiplier, proven epsilon, and accuracy (or area under the curve)."""
    with tempfile.TemporaryDirectory() as folder:
        result = simulations.simulate(
            recipe, data=data, overrides=overrides, run_dir=Path(folder) / "run"
        )
    return {
        "noise_multiplier": result["noise_multiplier"],
        "proven_epsilon": result.epsilon,
        "accuracy": result["metrics"].get("auc", result["metrics"].get("accuracy")),
    }


def texts(store: Kept) -> Pages:
    """The table of its page."""
    return {"../how-to/random-allocation.md": {"accuracy": accuracy_table(store.rows)}}


def accuracy_table(rows: list[dict[str, Any]]) -> str:
    """Accuracies in percent by data and epsilon, with the paired difference."""
    cells: dict[tuple[str, float], dict[str, dict[int, dict[str, Any]]]] = {}
    for row in rows:
        cell = cells.setdefault((row["data"], row["epsilon"]), {draw: {} for draw in DRAWS})
        cell[row["sampling"]][row["seed"]] = row
    lines = []
    for (data, epsilon), cell in cells.items():
        seeds = sorted(set(cell["poisson"]) & set(cell["allocation"]))
        if len(seeds) < 2:
            continue
        means = {draw: [100 * cell[draw][seed]["accuracy"] for seed in seeds] for draw in DRAWS}
        gains = [b - a for a, b in zip(means["poisson"], means["allocation"], strict=True)]
        error = statistics.stdev(gains) / len(gains) ** 0.5
        noise = [f"{cell[draw][seeds[0]]['noise_multiplier']:.3f}" for draw in DRAWS]
        lines.append(
            [
                data,
                f"{epsilon:g}",
                " / ".join(noise),
                *(spread(means[draw]) for draw in DRAWS),
                f"{statistics.fmean(gains):+.2f} ± {error:.2f}",
            ]
        )
    header = [
        "data",
        "epsilon",
        "noise: Poisson / allocation",
        "Poisson",
        "allocation",
        "difference",
    ]
    return table(header, lines)


MAKER = Maker(
    "random-allocation.json",
    texts,
    measure,
    inputs={"heart": "the folder of the four hospitals' files of UCI's heart disease data"},
    partial=True,
)
