"""Draws pictures of partitions and applications into files, without a display."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fedlgm_lab.reports.pictures import draw_division
from fedlgm_lab.reports.svg import drawing, save


def draw_partition(histogram: np.ndarray, title: str, path: Path) -> None:
    """Draw the division of data as a heat map of sorted clients, or as sorted sizes if there is
    only one class.

    Args:
        histogram: examples by client and class, int [clients, classes].
        title: heading.
        path: file to write; its suffix gives the format (.png, .svg, .pdf).

    Raises:
        RunError: the file cannot be written.
    """
    with drawing(9.0, 4.5) as figure:
        draw_division(figure, histogram, title)
        save(figure, path)


def draw_descent(values: Sequence[float], optimum: float, title: str, path: Path) -> None:
    """Draw the objective above the non-private optimum at the start and after each pass."""
    figure, axes = _plain(xlabel="pass", ylabel="objective above the optimum", title=title)
    axes.semilogy(range(len(values)), [max(value - optimum, 1e-12) for value in values], marker=".")
    save(figure, path)


def draw_spectrum(
    exact: Sequence[float], released: Sequence[float], title: str, path: Path
) -> None:
    """Draw the eigenvalues, largest first, of the exact and the released second-moment matrix."""
    figure, axes = _plain(xlabel="component", ylabel="eigenvalue", title=title)
    for values, label, style in ((exact, "exact", "-"), (released, "released", "--")):
        axes.plot(range(1, len(values) + 1), values, style, label=label)
    axes.legend()
    save(figure, path)


def _plain(**words: str) -> tuple[Figure, Axes]:
    """Make a figure of one plot with a grid; `words` are its title and the labels of its axes."""
    figure = Figure(figsize=(5.6, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.set(**words)
    axes.grid(alpha=0.3)
    return figure, axes
