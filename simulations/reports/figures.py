"""Pictures of partitions and runs (PNG, no display needed)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np

from fedlgm.errors import RunError
from simulations.reports.headline import headline

mpl.use("Agg")
import matplotlib.pyplot as plt


def draw_partition(histogram: np.ndarray, title: str, path: Path) -> None:
    """Stacked bars, one per client, one colour per class; `histogram` is int [clients, classes]."""
    clients, classes = histogram.shape
    figure, axes = plt.subplots(figsize=(10, 4))
    left = np.zeros(clients)
    colours = plt.get_cmap("tab10" if classes <= 10 else "turbo", classes)
    for label in range(classes):
        axes.bar(
            np.arange(clients), histogram[:, label], bottom=left, width=1.0, color=colours(label), label=str(label)
        )
        left += histogram[:, label]
    axes.set(xlabel="client", ylabel="examples", title=title, xlim=(-0.5, clients - 0.5))
    if classes <= 20:
        axes.legend(title="class", ncols=2, fontsize="small", loc="upper right")
    _save(figure, path)


def draw_run(rows: Sequence[Mapping[str, Any]], title: str, path: Path) -> None:
    """The task's headline and epsilon over the rounds."""
    seen = [row for row in rows if "loss" in row]
    rounds = [row["round"] for row in seen]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
    left.plot(rounds, [headline(row)[1] for row in seen], marker=".")
    left.set(xlabel="round", ylabel=f"test {headline(seen[-1])[0]}" if seen else "", title=title)
    right.plot(rounds, [row["epsilon"] for row in seen], label="proven")
    right.plot(rounds, [row["claimed_epsilon"] for row in seen], label="claimed", linestyle="--")
    right.set(xlabel="round", ylabel="epsilon", title="privacy spent")
    right.legend()
    for axes in (left, right):
        axes.grid(alpha=0.3)
    _save(figure, path)


def draw_descent(values: Sequence[float], optimum: float, title: str, path: Path) -> None:
    """Objective above the non-private optimum after each pass, the start included."""
    figure, axes = plt.subplots(figsize=(5.6, 3.6))
    axes.semilogy(range(len(values)), [max(value - optimum, 1e-12) for value in values], marker=".")
    axes.set(xlabel="pass", ylabel="objective above the optimum", title=title)
    axes.grid(alpha=0.3)
    _save(figure, path)


def draw_spectrum(exact: Sequence[float], released: Sequence[float], title: str, path: Path) -> None:
    """Eigenvalues, largest first, of the exact and of the released second-moment matrix."""
    figure, axes = plt.subplots(figsize=(5.6, 3.6))
    for values, label, style in ((exact, "exact", "-"), (released, "released", "--")):
        axes.plot(range(1, len(values) + 1), values, style, label=label)
    axes.set(xlabel="component", ylabel="eigenvalue", title=title)
    axes.legend()
    axes.grid(alpha=0.3)
    _save(figure, path)


def _save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    try:
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as error:
        raise RunError(f"cannot write the picture {path}: {error}") from error
    finally:
        plt.close(figure)
