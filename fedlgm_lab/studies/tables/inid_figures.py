"""Figures 1 to 4 of the i.n.i.d. noise paper, computed from closed forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedlgm.mechanisms.profiles import as_profile
from fedlgm.privacy.gaussian import gaussian_mu
from fedlgm_lab.studies.tables.inid import SHAPES, db, gaussian_mse, laplace_mse
from fedlgm_lab.studies.tables.maker import Maker
from fedlgm_lab.studies.tables.pages import picture
from fedlgm_lab.studies.tables.profiles import gini, unit_profile
from fedlgm_lab.studies.tables.store import Values

SIZES, EPSILONS = range(1, 26), np.linspace(0.1, 2, 39).round(3).tolist()
FIGURES = ("figure1", "figure2", "figure3", "figure4")
MARKS = dict(zip(SHAPES, "os^dv", strict=True))
Panel = Mapping[str, Any]


def panels() -> dict[str, list[Panel]]:
    """Compute the panels of each figure, as {x, curves, xlabel, ylabel}."""

    def panel(
        x: Sequence[float], curves: Mapping[str, list[float]], xlabel: str, ylabel: str = "MSE (dB)"
    ) -> Panel:
        rounded = {name: np.round(values, 6).tolist() for name, values in curves.items()}
        return {"x": list(x), "curves": rounded, "xlabel": xlabel, "ylabel": ylabel}

    made = {}
    iid_g = [db(20 / gaussian_mu(e, 1e-6) ** 2) for e in EPSILONS]
    for number, mse, order, iid_e, iid_k in (
        (1, gaussian_mse, 2, iid_g, [db(k / gaussian_mu(0.5, 1e-6) ** 2) for k in SIZES]),
        (3, laplace_mse, 1, [db(40 / e**2) for e in EPSILONS], [db(8 * k) for k in SIZES]),
    ):
        by_e = {s: [db(mse(unit_profile(s, 20, norm=order), e)) for e in EPSILONS] for s in SHAPES}
        by_k = {s: [db(mse(unit_profile(s, k, norm=order), 0.5)) for k in SIZES] for s in SHAPES}
        made[f"figure{number}"] = [
            panel(EPSILONS, {"i.i.d.": iid_e} | by_e, "epsilon (K = 20)"),
            panel(SIZES, {"i.i.d.": iid_k} | by_k, "K (epsilon = 0.5)"),
        ]
    inequality = {s: [gini(as_profile(unit_profile(s, k))) for k in SIZES] for s in SHAPES}
    made["figure2"] = [panel(SIZES, inequality, "K", "Gini coefficient")]
    curves = {
        f"{family}, {s}": [db(mse(unit_profile(s, k), 0.5)) for k in SIZES]
        for family, mse in (("Gaussian", gaussian_mse), ("Laplace", laplace_mse))
        for s in ("uniform", "exponential")
    }
    made["figure4"] = [panel(SIZES, curves, "K (epsilon = 0.5, unit l2 sensitivity)")]
    return made


def draw(name: str, store: Values, path: Path) -> None:
    """Draw a figure from its stored panels."""
    shown = store.values[name]
    with picture(path, (9, 3.4) if len(shown) == 2 else (4.8, 3.2), len(shown)) as axes:
        for axis, one in zip(axes, shown, strict=True):
            style = {"markevery": 4, "markersize": 4, "linewidth": 1.1}
            for label, y in one["curves"].items():
                axis.plot(one["x"], y, label=label, marker=MARKS.get(label), **style)
            axis.set(xlabel=one["xlabel"], ylabel=one["ylabel"])
            axis.legend(fontsize=7)


def measure(store: Values) -> None:
    """Compute the curves of every figure."""
    for name, curves in panels().items():
        store.get(name, lambda curves=curves: curves)


MAKER = Maker(
    "inid-figures.json",
    lambda store: {},
    measure,
    Values,
    {f"inid-{name}.png": partial(draw, name) for name in FIGURES},
)
