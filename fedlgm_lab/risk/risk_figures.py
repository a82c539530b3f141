"""Layer risk as a picture, a table, JSON and sentences: error rates of the adversaries and the
resulting weights.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from fedlgm_lab.risk.measure import Errors, Findings
from simulations import tables
from simulations.config.recipe import Recipe


def figure(found: Findings, weights: list[float]) -> Figure:
    """Draw bars of both error rates with a line at one half, and bars of the layer weights."""
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


def table(found: Findings, weights: list[float]) -> Table:
    """Make the table of error rates by layer."""
    names = (
        "layer",
        "error, training set (paper)",
        "error, held out",
        "error, gradient norm",
        "strength",
        "weight",
    )
    rows = [
        [
            row.layer,
            *(
                f"{value:.3f}"
                for value in (
                    row.training_error,
                    row.held_out_error,
                    row.gradient_error,
                    row.strength,
                    weight,
                )
            ),
        ]
        for row, weight in zip(found.risks, weights, strict=True)
    ]
    return tables.table("layer risk: 0.5 is a coin toss", names, rows, left=("layer",))


def summarise(
    recipe: Recipe, findings: Findings, errors: Errors, emphasis: float, folder: Path
) -> dict[str, Any]:
    """Convert the findings to values that JSON can hold, with the weights and file names."""
    return {
        "recipe_name": recipe.name,
        "model": recipe.model.name,
        **findings.to_dict(),
        "errors": errors,
        "emphasis": emphasis,
        "error_rates": findings.rates(errors),
        "strengths": [row.strength for row in findings.risks],
        "weights": findings.weights(errors, emphasis).tolist(),
        "folder": str(folder),
        "picture": str(folder / "risk.png"),
    }


def sentences(summary: dict[str, Any]) -> list[str]:
    """Summarise the findings in sentences that the terminal shows below the table."""
    rates = ", ".join(f"{rate:.4g}" for rate in summary["error_rates"])
    strengths = ", ".join(f"{value:.4g}" for value in summary["strengths"])
    least = ", ".join(f"{value:.4g}" for value in summary["bias_weights"])
    lines = [
        f"public examples: {summary['examples']:,}, {summary['public']}; no other data were used",
        f"a held-out error near 0.5 has a standard error of {summary['standard_error']:.3f}",
        "for a recipe with mechanism.name = 'lm-dp-sgd':",
        f"  error_rates = [{rates}]",
        f"  strengths = [{strengths}]",
        f"  emphasis = {summary['emphasis']:g}",
        f"or, for the least bias and without error rates (Appendix D.2): strengths = [{least}]",
    ]
    if "recipe" in summary:
        lines.append(f"the recipe with them: {summary['recipe']}")
    return [*lines, f"picture: {summary['picture']}"]
