"""Draws a metric of a study against a key of the grid or against the rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from matplotlib.figure import Figure
from pandas import DataFrame

from fedlgm.errors import ConfigError
from fedlgm.files import path_of, write_whole
from fedlgm_lab.studies import frames
from fedlgm_lab.studies.statistics import interval

_KINDS = (".png", ".svg", ".pdf")


class Drawn(Protocol):
    """The figures of a study, see `fedlgm_lab.studies.results.Study`."""

    @property
    def keys(self) -> list[str]:
        """Key columns of the cells."""

    @property
    def compared_keys(self) -> list[str]:
        """Keys that must have equal values when methods are compared."""

    def to_frame(self) -> DataFrame:
        """Return a frame with one row per run."""

    def history(self) -> DataFrame:
        """Return a frame with one row per run and round."""


def draw(
    study: Drawn,
    path: Path | str | None,
    x: str | None,
    hue: str | Sequence[str] | None,
    y: str,
    spread: str,
    labels: Mapping[str, str],
) -> Figure:
    """Draw the picture of `Study.plot`.

    Raises:
        ConfigError: a key, metric, spread or kind of file is unknown.
    """
    if spread not in ("interval", "std"):
        raise ConfigError(f"spread must be 'interval' or 'std', got {spread!r}")
    file = None if path is None else path_of("path", path)
    if file is not None and file.suffix.lower() not in _KINDS:
        raise ConfigError(f"a picture's file must end in {', '.join(_KINDS)}, got {str(path)!r}")
    frame = study.to_frame()
    asked = [] if hue is None else [hue] if isinstance(hue, str) else list(hue)
    varied = [
        key for key in ("method", *study.compared_keys) if len(frames.values_of(frame, key)) > 1
    ]
    over = x or next(
        (key for key in varied if key not in ("method", *asked) and len(_values(frame, key)) > 1),
        "round",
    )
    unknown = [key for key in (over, *asked) if key not in (*study.keys, "round")]
    if unknown or "round" in asked:
        raise ConfigError(
            f"no key {(*unknown, 'round')[0]!r} in this study; it has {', '.join(study.keys)}"
        )
    lines = asked or [key for key in varied if key != _method(over)] or ["method"]
    pooled = [key for key in varied if key not in map(_method, (over, *lines))]
    data = study.history() if over == "round" else frame
    frames.check_metric(data, frames.metrics_of(frame, study.keys), y)

    class Shown(Figure):
        """A figure that a notebook shows without matplotlib's global state."""

        def _repr_png_(self) -> bytes:
            import io

            buffer = io.BytesIO()
            self.savefig(buffer, format="png", dpi=110)
            return buffer.getvalue()

    figure = Shown(figsize=(6, 4), layout="constrained")
    axes = figure.subplots()
    ticks = _values(data, over)
    numeric = all(map(frames.is_number, ticks))
    for index, cell in enumerate(frames.cells_of(data, lines, {})):
        shown = ["-" if frames.is_missing(value) else str(value) for value in cell.values()]
        label = ", ".join(labels.get(value, value) for value in shown)
        rows = _per_seed(frames.at(data, cell).dropna(subset=y), [*lines, over], pooled, y)
        if rows.empty:
            continue
        by_tick = {tick: frames.at(rows, {over: tick})[y].to_numpy(dtype=float) for tick in ticks}
        by_tick = {tick: figures for tick, figures in by_tick.items() if len(figures)}
        # the key has no effect on this method's figures, as a budget has none without privacy
        if not by_tick:
            axes.axhline(rows[y].mean(), color=f"C{index}", linestyle=":", label=label)
            continue
        at = np.array([tick if numeric else ticks.index(tick) for tick in by_tick], dtype=float)
        mean = np.array([figures.mean() for figures in by_tick.values()])
        low, high = np.array([_reach(figures, spread) for figures in by_tick.values()]).T
        if over == "round":
            axes.plot(at, mean, color=f"C{index}", label=label)
            axes.fill_between(at, low, high, color=f"C{index}", alpha=0.15, linewidth=0)
        else:
            shift = 0.0 if numeric else 0.06 * index
            axes.errorbar(
                at + shift,
                mean,
                [mean - low, high - mean],
                color=f"C{index}",
                marker="o",
                capsize=3,
                label=label,
            )
    if numeric and over != "round" and min(ticks) > 0 and max(ticks) >= 20 * min(ticks):
        axes.set_xscale("log")
    if not numeric:
        axes.set_xticks(range(len(ticks)), [str(labels.get(str(tick), tick)) for tick in ticks])
    axes.set(xlabel=labels.get(over, over), ylabel=labels.get(y, f"test {y}"))
    axes.grid(alpha=0.3)
    names = [] if lines == ["method"] else [", ".join(labels.get(key, key) for key in lines)]
    if pooled:
        names.append(f"mean over {', '.join(labels.get(key, key) for key in pooled)}")
    axes.legend(title="\n".join(names) or None, fontsize="small")
    if file is not None:
        kind = file.suffix[1:].lower()
        write_whole(file, lambda partial: figure.savefig(partial, dpi=150, format=kind))
    return figure


def _values(frame: DataFrame, key: str) -> list[Any]:
    return [value for value in frames.values_of(frame, key) if not frames.is_missing(value)]


def _method(key: str) -> str:
    """Return the column of a key; the column "method" stands for the key "mechanism"."""
    return "method" if key == "mechanism" else key


def _per_seed(rows: DataFrame, keys: list[str], pooled: Sequence[str], y: str) -> DataFrame:
    """Average over the pooled settings, with one row per seed and combination of the keys' values.

    Only the seeds with the largest number of pooled settings have rows. The figures of a seed's
    settings are not independent, so their mean counts as one figure of an interval.
    """
    if not pooled or rows.empty:
        return rows
    keys = list(dict.fromkeys(keys))
    means = (
        rows.groupby([*keys, "seed"], sort=False, dropna=False)[y]
        .agg(["mean", "size"])
        .reset_index()
    )
    most = means.groupby(keys, sort=False, dropna=False)["size"].transform("max")
    return means[means["size"] == most].rename(columns={"mean": y})


def _reach(values: np.ndarray, spread: str) -> tuple[float, float]:
    """Compute the lower and the upper end of the spread of figures; both ends are the mean if there
    are fewer than two figures.
    """
    mean = float(values.mean())
    if len(values) < 2:
        return mean, mean
    if spread == "std":
        deviation = float(values.std(ddof=1))
        return mean - deviation, mean + deviation
    return interval(values)
