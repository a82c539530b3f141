"""Accuracy of random allocation and of Poisson sampling at equal epsilon, paired by seed.

The setting "heart" needs the folder of the four hospitals' files of UCI's heart disease data
(`processed.*.data` with a header).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas

from fedlgm.errors import ConfigError
from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.pages import spread, table
from fedlgm_lab.studies.tables.runs import cells, measure_cells, settings
from fedlgm_lab.studies.tables.store import Kept, Row, simulated

NAME = "random-allocation"
_SCALES = {
    "age": (50, 10), "sex": (0.5, 0.5), "cp": (3, 1), "trestbps": (130, 20), "fbs": (0.5, 0.5),
    "restecg": (1, 1), "thalach": (140, 25), "exang": (0.5, 0.5), "oldpeak": (1, 1),
}  # fmt: skip
"""Columns that all hospitals have, with a public centre and scale. The centre replaces missing
values.
"""


def hospitals(folder: Path) -> dict[str, Any]:
    """Read the rows of the four hospitals; every fifth of all rows is a test row.

    Raises:
        ConfigError: the folder lacks the files, or a file has no header.
    """
    rows, targets, owners = [], [], []
    files = sorted(folder.glob("processed.*.data"))
    if not files:
        raise ConfigError(f"--set heart={folder}: the folder has no files processed.*.data")
    for number, file in enumerate(files):
        frame = pandas.read_csv(file, na_values="?", encoding="utf-8-sig")
        missing = [name for name in (*_SCALES, "target") if name not in frame]
        if missing:
            raise ConfigError(
                f"{file} has no column {missing[0]!r}: its first line must name the columns, as in "
                f"{','.join(_SCALES)},...,target"
            )
        # some copies of this file code three columns differently
        if "cleveland" in file.name and frame["cp"].min() == 0:
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
    """Make the runs of all settings; those of "heart" only if its folder is given."""
    heart = store.settings.get("heart")
    of_heart = None if heart is None else hospitals(Path(heart))
    for group in settings(NAME)["groups"]:
        data = of_heart if group["name"]["data"] == "heart" else None
        if data is not None or group["name"]["data"] != "heart":
            measure_cells(cells(store, NAME, partial(run, data), **group["name"]))


def run(data: dict[str, Any] | None, recipe: str, changes: Mapping[str, Any], seed: int) -> Row:
    """Make one run; return its noise multiplier, proven epsilon, and accuracy (or AUC)."""
    with simulated(recipe, data=data, overrides={**changes, "run.seed": seed}) as result:
        return {
            "noise_multiplier": result["noise_multiplier"],
            "proven_epsilon": result.epsilon,
            "accuracy": result["metrics"].get("auc", result["metrics"].get("accuracy")),
        }


def texts(store: Kept) -> Pages:
    """Make the table of accuracies in per cent by data set and epsilon, with the paired
    differences.
    """
    runs, lines = cells(store, NAME), []
    for poisson, allocation in zip(runs[::2], runs[1::2], strict=True):
        by_allocation, by_poisson = (
            100 * cell.figures("accuracy") for cell in (allocation, poisson)
        )
        gains = (by_allocation - by_poisson).dropna()
        if len(gains) > 1:
            noise = [cell.figures("noise_multiplier").iloc[0] for cell in (poisson, allocation)]
            lines.append([
                poisson.name["data"],
                f"{poisson.name['epsilon']:g}",
                " / ".join(f"{multiplier:.3f}" for multiplier in noise),
                *(spread(figures[gains.index]) for figures in (by_poisson, by_allocation)),
                f"{gains.mean():+.2f} ± {gains.sem():.2f}",
            ])  # fmt: skip
    header = ["data", "epsilon", "noise: Poisson / allocation", "Poisson", "allocation"]
    text = table([*header, "difference"], lines)
    return {"../how-to/random-allocation.md": {"accuracy": text}}


MAKER = Maker(
    "random-allocation.json",
    texts,
    measure,
    inputs={"heart": "the folder of the four hospitals' files of UCI's heart disease data"},
    partial=True,
)
