"""Errors of correlated noise in closed form.

* ratios of the models' errors to the errors with independent noise. One comparison has no
amplification, and clients take part at least b rounds apart under both noises. The other compares
secret draws within groups with Poisson sampling of all clients; * gain of a separate C for every
layer over the best single C for all layers, for servers that treat layers differently; * errors for
a server with momentum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.optimize import minimize

from fedlgm.noise import correlation
from fedlgm.noise.correlation import Workload
from fedlgm.planning.facts import Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.privacy import calibrate
from fedlgm.privacy.whole_run import WholeRun
from fedlgm.training import models
from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.pages import table
from fedlgm_lab.studies.tables.store import Values

BANDS, ROUNDS, DELTA = 10, 300, 1e-5
BUDGETS, GROUPS = (1.0, 3.0, 8.0, 16.0), (2, 4, 5, 10)
MODELS = {"CNN, FashionMNIST": ("cnn", (1, 28, 28)), "ResNet-18": ("resnet18", (3, 32, 32))}
Row = dict[str, Any]


def without_amplification() -> list[Row]:
    """Compute the errors if a client's rounds are at least b apart under both noises, whose
    sensitivity is then sqrt(T / b).
    """
    rows = []
    independent = correlation.get("identity", ROUNDS)
    for separation in (5, 10, 20, 50):
        row: Row = {"rounds": ROUNDS, "min_separation": separation}
        for reduce in ("mean", "max"):
            c = correlation.get("banded", ROUNDS, bands=separation, reduce=reduce)
            costs = [
                each.sensitivity(separation) * each.error(reduce=reduce)
                for each in (c, independent)
            ]
            row[reduce] = costs[0] / costs[1]
        blt = correlation.get("blt", ROUNDS, min_separation=separation)
        row["blt_mean"] = (
            blt.sensitivity(separation)
            * blt.error()
            / (independent.sensitivity(separation) * independent.error())
        )
        row["floor"] = separation**-0.5
        rows.append(row)
    return rows


def against_poisson() -> list[Row]:
    """Compute the errors at q = 0.1. Ten groups form a public cycle, in which only the noise is
    secret.
    """
    rows = []
    independent = correlation.get("identity", ROUNDS)
    for epsilon in BUDGETS:
        poisson = calibrate(epsilon, DELTA, steps=ROUNDS, sampling_rate=0.1)
        for b in GROUPS:
            row: Row = {"epsilon": epsilon, "groups": b}
            for reduce in ("mean", "max"):
                c = correlation.get("banded", ROUNDS, bands=b, reduce=reduce)
                sampling = Sampling("grouped-poisson", 500, 0.1, b)
                row["multiplier"] = WholeRun(c, sampling, "add-remove").calibrate(
                    epsilon, DELTA, "pld"
                )
                row[reduce] = (
                    row["multiplier"]
                    * c.error(reduce=reduce)
                    / (poisson * independent.error(reduce=reduce))
                )
            rows.append(row)
    return rows


def workloads() -> list[Row]:
    """Compute the mean errors for a server with momentum, at 10 bands, with the C optimised for
    momentum, the C optimised for prefix sums, and independent noise.
    """
    rows = []
    for name, workload in {"momentum 0.9": Workload(0.9)}.items():
        made = correlation.get("banded", ROUNDS, bands=BANDS, workload=workload)
        prefix, independent = (
            correlation.get("banded", ROUNDS, bands=BANDS),
            correlation.get("identity", ROUNDS),
        )
        errors = [c.error(workload) for c in (made, prefix, independent)]
        rows.append(
            {"server": name}
            | dict(zip(("made_for_it", "for_prefix_sums", "independent"), errors, strict=True))
        )
    return rows


DIFFERENT = {
    "momentum 0.9 / none": (Workload(0.9), Workload()),
    "momentum 0.9 / 0.5": (Workload(0.9), Workload(0.5)),
    "weight decay 0.01 a round / none": (Workload(decay=0.99), Workload()),
    "no difference": (Workload(), Workload()),
}
"""Pairs of ways in which the server treats two kinds of layers."""


def per_layer() -> list[Row]:
    """Compute the ratio of the error with the best single C for all layers to the error with a
    separate C for each layer, each under its optimal split.

    The optimal split has the error sum_l c_l sens(C_l) E_l sqrt(d_l), where sens(C_l) E_l depends
    only on the kind of layer l. The cost of a single C is therefore the mean of its costs for the
    two kinds, weighted by the terms of this sum. "worst" is the largest cost over all weights, and
    holds for any model. In the models, all layers have equal bounds, and the last layer ("output")
    or the second half of the layers has the treatment that is named second.
    """
    sizes = {
        name: LayerTable.from_module(models.build(kind, in_shape=shape, classes=10)).sizes
        for name, (kind, shape) in MODELS.items()
    }
    rows = []
    for name, pair in DIFFERENT.items():
        costs = [_cost(workload) for workload in pair]
        own = [
            correlation.get("banded", ROUNDS, bands=BANDS, workload=workload).coefficients
            for workload in pair
        ]
        least = [cost(c) for cost, c in zip(costs, own, strict=True)]
        row: Row = {"layers differ by": name}
        row["worst"] = max(
            _cost_of_one_c(costs, least, own, share) for share in np.linspace(0.1, 0.9, 9)
        )
        for model, d in sizes.items():
            for what, second in (("output", len(d) - 1), ("second half", len(d) // 2)):
                weights = np.array(
                    [np.sqrt(d[:second]).sum() * least[0], np.sqrt(d[second:]).sum() * least[1]]
                )
                row[f"{model}: {what}"] = _cost_of_one_c(
                    costs, least, own, weights[0] / weights.sum()
                )
        rows.append(row)
    return rows


Cost = Callable[[np.ndarray], float]


def _cost(workload: Workload) -> Cost:
    """Return the function norm times root mean square error, which is sens(C) E up to the factor
    sqrt(k) that all layers have.
    """
    return lambda c: float(np.sqrt(workload.variances(c, ROUNDS).mean()) * np.linalg.norm(c))


def _cost_of_one_c(
    costs: list[Cost], least: list[float], own: list[np.ndarray], share: float
) -> float:
    """Compute the least weighted cost of one C for both kinds of layers, relative to the cost of
    separate C's.
    """
    weights = np.array([share, 1 - share])

    def relative(c: np.ndarray) -> float:
        return float(
            np.log(sum(w * cost(c) / o for w, cost, o in zip(weights, costs, least, strict=True)))
        )

    start = weights @ np.array(own)
    return float(np.exp(minimize(relative, start, method="L-BFGS-B", options={"maxiter": 300}).fun))


FIGURES: dict[str, Callable[[], list[Row]]] = {
    "without amplification": without_amplification,
    "against Poisson sampling": against_poisson,
    "a C for each layer": per_layer,
    "workloads": workloads,
}


def measure(store: Values) -> None:
    """Compute all closed forms."""
    for name, rows in FIGURES.items():
        store.get(name, rows)


def texts(store: Values) -> Pages:
    """Make the tables of all closed forms."""
    apart, poisson, layers, servers = (store.values[name] for name in FIGURES)
    errors = {
        (row["epsilon"], row["groups"]): f"{row['mean']:.3f} / {row['max']:.3f}" for row in poisson
    }
    shown = {
        "without secret sampling": table(
            [
                "b",
                "mean error",
                "largest error",
                "mean error of `blt` (2 buffers)",
                "lower bound for any matrix",
            ],
            (
                [
                    str(r["min_separation"]),
                    *(f"{r[k]:.3f}" for k in ("mean", "max", "blt_mean", "floor")),
                ]
                for r in apart
            ),
        ),
        "against secret sampling": table(
            ["epsilon", *(f"b = {b}{', public' if b == BANDS else ''}" for b in GROUPS)],
            ([f"{epsilon:g}", *(errors[epsilon, b] for b in GROUPS)] for epsilon in BUDGETS),
        ),
        "each layer": table(
            list(layers[0]),
            (
                [str(name), *(f"{x:.3f}" for x in costs)]
                for name, *costs in map(dict.values, layers)
            ),
        ),
        "momentum": table(
            ["server", "C optimised for it", "C optimised for plain averaging", "independent"],
            (
                [str(name), *(f"{x:.2f}" for x in found)]
                for name, *found in map(dict.values, servers)
            ),
        ),
    }
    return {"data/correlated.md": shown}


MAKER = Maker("correlated.json", texts, measure, Values)
