"""Picture of layer risk: error rates of the adversaries and the resulting weights."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure

from fedlgm_lab.risk.measure import Findings


def figure(found: Findings, weights: list[float]) -> Figure:
    """Bars of both error rates with the coin toss, and the layer weights."""
    picture = Figure(figsize=(10, 4), layout="constrained")
    left, right = picture.subplots(1, 2)
    places, names = np.arange(len(found.risks)), [row.layer for row in found.risks]
    left.bar(places - 0.2, [row.held_out_error for row in found.risks], 0.4, label="held out")
    left.bar(
        places + 0.2,
        [row.training_error for row in found.risks],
        0.4,
        label="adversary's training set (paper)",
    )
    left.plot(
        places,
        [row.gradient_error for row in found.risks],
        "k_",
        markersize=18,
        label="gradient norm",
    )
    left.axhline(0.5, color="black", linestyle="--", label="coin toss")
    left.set(
        ylabel="error rate of the adversary",
        title="lower: the layer gives more away",
        ylim=(0, 0.55),
    )
    left.legend(fontsize="small", loc="lower left")
    right.bar(places, weights, color="tab:green")
    right.set(ylabel="layer weight", title="share of an example's length", ylim=(0, 1))
    for axes in (left, right):
        axes.set_xticks(places, names, rotation=30 if len(names) < 12 else 90, ha="right")
    return picture
