"""Pictures of attacks: figures without a display or pyplot state, for notebooks and PNG files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure
from torch import Tensor

from fedlgm.attacks.membership import MembershipResult

if TYPE_CHECKING:
    from simulations.attacks.gan import ClassFinding
    from simulations.attacks.inversion import Finding

_COLUMNS = 12


def inversions(findings: Sequence[Finding]) -> Figure:
    """Private images in the first row, then one row of reconstructions for each protection, with their SSIM."""
    whole = [finding for finding in findings if finding.seen is None]
    labels = list(dict.fromkeys(finding.protection for finding in whole))
    columns = [(f.victim.client, i) for f in whole if f.protection == labels[0] for i in range(len(f.victim.y))]
    columns = columns[:_COLUMNS]
    figure, grid = _grid(len(labels) + 1, len(columns))
    for row, label in enumerate(["private", *labels]):
        _row_title(grid[row, 0], label)
        for column, (client, image) in enumerate(columns):
            finding = next(
                f for f in whole if f.victim.client == client and f.protection == (labels[0] if row == 0 else label)
            )
            if row == 0:
                _show(grid[row, column], finding.victim.x[image], f"client {client}")
                continue
            guess = _assigned(finding)[image]
            _show(grid[row, column], finding.found.images[guess], f"SSIM {finding.scores[image]['ssim']:.2f}")
    return figure


def classes(findings: Sequence[tuple[str, ClassFinding]]) -> Figure:
    """Private images of each class, then reconstructions, one row for each labelled finding."""
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
    """Receiver operating characteristics on logarithmic axes: the success of an attack at low false-positive rates."""
    figure = Figure(figsize=(5.6, 4.6), layout="constrained")
    axes = figure.subplots()
    least = 0.5 / max(max(r.nonmembers, r.members) for r in results.values())
    for name, result in results.items():
        fpr, tpr = result.roc
        axes.plot(np.maximum(fpr, least), np.maximum(tpr, least), label=f"{name} (AUC {result.auc:.3f})")
    axes.plot([least, 1], [least, 1], color="grey", linestyle=":", label="guessing")
    axes.set(
        xscale="log", yscale="log", xlabel="false-positive rate", ylabel="true-positive rate", title=title,
        xlim=(least, 1), ylim=(least, 1.05),
    )  # fmt: skip
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    return figure


def _assigned(finding: Finding) -> np.ndarray:
    from fedlgm.attacks.images import match

    return match(finding.found.images.numpy(), finding.victim.x.numpy())


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
