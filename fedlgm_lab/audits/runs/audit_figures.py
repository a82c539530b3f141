"""The picture of an audit, which compares its bounds with the reported epsilon and shows the scores
from which the bounds follow.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from fedlgm_lab.audits import AuditResult
from fedlgm_lab.reports.svg import save


def draw_audit(result: AuditResult, path: Path) -> None:
    """Draw bars of epsilon (for the complete release and for the layers), and histograms of the
    scores of included and of left-out canaries.

    Raises:
        RunError: the picture cannot be written.
    """
    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    _bars(left, result)
    _scores(right, result)
    figure.suptitle(f"{result.subject}: {'as reported' if result.passed else 'NOT AS REPORTED'}")
    save(figure, path)


def _bars(axes: Any, result: AuditResult) -> None:
    names = ["all", *(row.layer for row in result.layers)]
    lower = [result.epsilon_lower, *(row.epsilon_lower for row in result.layers)]
    finite = [value for value in (*lower, result.epsilon_reported) if math.isfinite(value)]
    top = 1.2 * max([*finite, 1e-3])
    places = np.arange(len(names))
    axes.bar(
        places,
        [min(value, top) for value in lower],
        color=["tab:red" if result.exceeded else "tab:blue"],
    )
    if math.isfinite(result.epsilon_reported):
        axes.axhline(result.epsilon_reported, color="black", linestyle="--", label="reported")
        axes.legend()
    axes.set_xticks(places, names, rotation=30 if len(names) < 12 else 90, ha="right")
    title = f"{result.method} (lower bound, confidence {result.confidence:g})"
    axes.set(ylabel=f"epsilon at delta = {result.delta:g}", title=title, ylim=(0, top))


def _scores(axes: Any, result: AuditResult) -> None:
    if not result.scores:
        axes.axis("off")
        lines = [
            f"{'passed' if check.passed else 'FAILED'}: {check.name}\n{check.detail}"
            for check in result.checks
        ]
        axes.text(0, 0.5, "\n\n".join(lines), va="center", wrap=True)
        return
    inside, outside = (np.clip(result.scores[name], -1e3, 1e3) for name in ("inside", "outside"))
    low, high = np.quantile(np.concatenate([inside, outside]), [0.001, 0.999])
    bins = np.linspace(low, high if high > low else low + 1, 60)
    axes.hist(outside, bins, density=True, alpha=0.6, label="out")
    axes.hist(inside, bins, density=True, alpha=0.6, label="in")
    axes.set(
        xlabel="score", ylabel="density", title=f"{len(inside):,} scores in, {len(outside):,} out"
    )
    axes.legend()
