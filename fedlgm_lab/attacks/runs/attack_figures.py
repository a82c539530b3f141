"""Pictures of attacks, for notebooks and PNG files; drawing them needs neither a display nor
pyplot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from fedlgm_lab.attacks.membership import MembershipResult
from fedlgm_lab.attacks.runs.gan import ClassFinding
from fedlgm_lab.attacks.runs.inversion import Finding

_COLUMNS = 12


def inversions(findings: Sequence[Finding]) -> Figure:
    """Draw the private images in the first row, then one row of reconstructions for each
    protection, with the SSIM of each reconstruction.
    """
    from fedlgm_lab.attacks.images import match

    # label of a row -> (client, image) -> image and its caption
    rows: dict[str, dict[tuple[int, int], tuple[Tensor, str]]] = {"private": {}}
    for finding in findings:
        if finding.seen is not None:
            continue
        victim, guesses = (
            finding.victim,
            match(finding.found.images.numpy(), finding.victim.x.numpy()),
        )
        for image, (guess, score) in enumerate(zip(guesses, finding.scores, strict=True)):
            place, reconstruction = (victim.client, image), finding.found.images[guess]
            rows["private"][place] = victim.x[image], f"client {victim.client}"
            rows.setdefault(finding.protection, {})[place] = (
                reconstruction,
                f"SSIM {score['ssim']:.2f}",
            )
    places = list(rows["private"])[:_COLUMNS]
    figure, grid = _grid(len(rows), len(places))
    for row, (label, shown) in enumerate(rows.items()):
        _row_title(grid[row, 0], label)
        for column, place in enumerate(places):
            if place in shown:
                _show(grid[row, column], *shown[place])
    return figure


def classes(findings: Sequence[tuple[str, ClassFinding]]) -> Figure:
    """Draw private images of the first finding's class, then each finding's reconstructions."""
    first = findings[0][1]
    figure, grid = _grid(len(findings) + 1, 8)
    for row, (label, finding) in enumerate([(f"private, class {first.target}", first), *findings]):
        title = label if row == 0 else f"{label}\ndistance {finding.distance:.0f}"
        _row_title(grid[row, 0], title)
        images = finding.private if row == 0 else finding.samples
        for column in range(8):
            _show(grid[row, column], images[column % len(images)], "")
    return figure


def curves(results: Mapping[str, MembershipResult], title: str) -> Figure:
    """Draw receiver operating characteristics on logarithmic axes, which show the success of
    attacks at low false-positive rates.
    """
    figure = Figure(figsize=(5.6, 4.6), layout="constrained")
    axes = figure.subplots()
    least = 0.5 / max(max(r.nonmembers, r.members) for r in results.values())
    for name, result in results.items():
        fpr, tpr = result.roc
        axes.plot(
            np.maximum(fpr, least), np.maximum(tpr, least), label=f"{name} (AUC {result.auc:.3f})"
        )
    axes.plot([least, 1], [least, 1], color="grey", linestyle=":", label="guessing")
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="false-positive rate",
        ylabel="true-positive rate",
        title=title,
        xlim=(least, 1),
        ylim=(least, 1.05),
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


def _grid(rows: int, columns: int) -> tuple[Figure, Any]:
    figure = Figure(figsize=(1.25 * columns + 2.6, 1.4 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes in grid.flat:
        axes.set(xticks=[], yticks=[])
    return figure, grid


def _row_title(axes: Any, label: str) -> None:
    axes.set_ylabel(label.replace(", ", "\n"), rotation=0, ha="right", va="center", fontsize=8)


def _show(axes: Any, image: Tensor, title: str) -> None:
    pixels = (image.numpy().transpose(1, 2, 0) + 1) / 2
    axes.imshow(pixels if pixels.shape[-1] == 3 else pixels[..., 0], cmap="gray", vmin=0, vmax=1)
    axes.set_title(title, fontsize=8)
