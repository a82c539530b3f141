"""The pictures of a run: figures over the rounds, figures of the layers, and the division of the
data.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from fedlgm_lab.reports import ticks
from fedlgm_lab.reports.svg import SERIES, drawing, to_svg
from simulations.summaries.terminal import number

_LINES = 8  # largest number of curves that can be told apart; more layers become a heat map
_BARS = 28  # largest number of layers whose names fit beside bars
_NARROW = 14  # largest length of a name for which three names fit side by side
_TICKS = 9  # largest number of intervals between labelled rounds
_COLUMNS = 500  # largest number of columns of a heat map; more clients share columns


@dataclass(frozen=True)
class Picture:
    """An image for a page.

    Attributes:
        title: heading of the picture.
        alt: description of the picture for readers who cannot see it.
        svg: an SVG document.
    """

    title: str
    alt: str
    svg: str


def over_rounds(
    title: str,
    rounds: Sequence[int],
    series: Mapping[str, Sequence[float]],
    *,
    dark: bool = True,
    percent: bool = False,
) -> Picture | None:
    """Draw curves over the rounds, or bars if there is only one round; None if no value is finite.

    Args:
        title: heading.
        rounds: the rounds [n].
        series: values [n] by name.
        dark: see `to_svg`.
        percent: whether values are shares, to be shown in per cent.

    Raises:
        ValueError: a series does not have one value for each round.
    """
    finite = {name: [(r, v) for r, v in zip(rounds, values, strict=True) if math.isfinite(v)]
              for name, values in series.items()}  # fmt: skip
    finite = {name: points for name, points in finite.items() if points}
    if not finite:
        return None
    told = "; ".join(_course(name, points, percent) for name, points in finite.items())
    if len({point for points in finite.values() for point, _ in points}) == 1:
        shown = {name: points[0][1] for name, points in finite.items()}
        return Picture(title, f"{title}: {told}.", _single(shown, dark, percent))
    with drawing() as figure:
        axes = _axes(figure, "round")
        for (name, points), style in zip(
            finite.items(), itertools.cycle(("-", "--", ":", "-.")), strict=False
        ):
            axes.plot(
                *zip(*points, strict=True),
                style,
                label=name,
                marker=_marker(points),
                markersize=3.5,
            )
        if percent:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_ylim(*ticks.limits(*axes.get_ylim(), most=1.0 if percent else math.inf))
        if len(finite) > 1:
            axes.legend(loc="best")
        axes.margins(x=0.02)
        svg = to_svg(figure, dark=dark)
    return Picture(title, f"{title} over the rounds: {told}.", svg)


def _single(values: Mapping[str, float], dark: bool, percent: bool) -> str:
    """Draw the figures of a single round as bars that are labelled with their values."""
    texts = [f"{value:.1%}" if percent else number(value) for value in values.values()]
    with drawing(height=0.75 + 0.3 * len(values)) as figure:
        axes = _axes(figure, "")
        bars = axes.barh(list(values), list(values.values()), height=0.6, color=SERIES[0])
        axes.bar_label(bars, texts, padding=4)
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False, axis="y")
        axes.margins(x=0.2)
        axes.xaxis.set_major_locator(MaxNLocator(6))
        if percent:
            axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        return to_svg(figure, dark=dark)


def per_layer(
    title: str,
    names: Sequence[str],
    rounds: Sequence[int],
    values: np.ndarray,
    *,
    log: bool = False,
    limits: tuple[float, float] | None = None,
) -> Picture | None:
    """Draw a figure of each layer: bars if it is constant over the rounds, otherwise curves or a
    heat map.

    Args:
        title: heading.
        names: layers, K.
        rounds: rounds [T].
        values: [T, K]; NaN where a layer was not released.
        log: whether the axis is logarithmic if values differ by more than a factor of ten.
        limits: values at the ends of a heat map's colours; by default the smallest and largest
            value.
    """
    values = np.where(np.isfinite(values), values, np.nan)
    if log:
        values = np.where(values > 0, values, np.nan)
    if values.size == 0 or np.isnan(values).all():
        return None
    log = log and float(np.nanmax(values)) > 10 * float(np.nanmin(values))
    first = np.broadcast_to(values[:1], values.shape)
    if np.allclose(values, first, rtol=1e-3, atol=0.0, equal_nan=True):
        return _bars(title, names, values[-1], log)
    if len(names) <= _LINES:
        return _curves(title, names, rounds, values, log)
    return heat_map(title, names, rounds, values, log=log, limits=limits)


def _bars(title: str, names: Sequence[str], values: np.ndarray, log: bool) -> Picture:
    named = len(names) <= _BARS
    with drawing(height=max(1.5, 0.55 + 0.235 * len(names)) if named else 3.0) as figure:
        axes = _axes(figure, "" if named else "layer, from input to output")
        if named:
            axes.barh(range(len(names)), values, height=0.68, color=SERIES[0])
            axes.set_yticks(range(len(names)), [_short(name) for name in names])
            axes.tick_params(axis="y", length=0)
            axes.invert_yaxis()
            axes.grid(visible=False, axis="y")
        else:
            _steps(axes, values)
        _scale(axes, "x" if named else "y", values, log)
        svg = to_svg(figure)
    return Picture(
        title, f"{title} of each layer, the same in every round: {_extremes(names, values)}.", svg
    )


def _curves(
    title: str, names: Sequence[str], rounds: Sequence[int], values: np.ndarray, log: bool
) -> Picture:
    with drawing() as figure:
        axes = _axes(figure, "round")
        for position, name in enumerate(names):
            style = ("-", "--")[position // 4 % 2]
            color, marker = SERIES[position % len(SERIES)], _marker(rounds)
            axes.plot(
                rounds,
                values[:, position],
                style,
                label=_short(name),
                color=color,
                marker=marker,
                markersize=3.5,
            )
        _scale(axes, "y", values, log)
        axes.margins(x=0.02)
        if len(names) > 1:
            columns = 3 if max(map(len, names)) <= _NARROW else 2
            figure.legend(
                loc="outside lower center", ncols=columns, handlelength=1.6, columnspacing=1.2
            )
        svg = to_svg(figure)
    return Picture(
        title,
        f"{title} of each layer over the rounds; in the last: {_extremes(names, values[-1])}.",
        svg,
    )


def heat_map(
    title: str,
    names: Sequence[str],
    rounds: Sequence[int],
    values: np.ndarray,
    *,
    log: bool = False,
    limits: tuple[float, float] | None = None,
) -> Picture:
    """Draw a figure of each layer [T, K] as a heat map. The arguments are those of `per_layer`;
    values must be positive if `log` is true.
    """
    low, high = limits or (np.nanmin(values), np.nanmax(values))
    norm = LogNorm(low, high) if log else Normalize(low, high)
    with drawing(height=3.4) as figure:
        axes = _axes(figure, "round", grid=False)
        extent = (rounds[0] - 0.5, rounds[-1] + 0.5, len(names) + 0.5, 0.5)
        image = axes.imshow(
            values.T, aspect="auto", interpolation="none", cmap="viridis", extent=extent, norm=norm
        )
        if len(names) <= _LINES:
            axes.set_yticks(range(1, len(names) + 1), [_short(name) for name in names])
        else:
            axes.set_ylabel("layer, from input to output")
        bar = figure.colorbar(image, ax=axes, pad=0.02)
        bar.outline.set_visible(False)  # type: ignore[operator]
        if log:
            ticks.logarithmic(bar.ax.yaxis, low, high)
        svg = to_svg(figure)
    return Picture(
        title,
        f"{title} of each layer over the rounds; in the last: {_extremes(names, values[-1])}.",
        svg,
    )


def division(histogram: np.ndarray) -> Picture:
    """Draw the division of the training data among clients, for any number of clients (see
    `draw_division`).
    """
    sizes, classes = histogram.sum(axis=1), histogram.shape[1]
    figures = (
        f"{len(sizes)} clients with {int(sizes.min())} to {int(sizes.max())} examples, median "
        f"{np.median(sizes):g}, "
        f"{int((sizes == 0).sum())} without data"
    )
    with drawing(5.4, 3.4 if classes > 1 else 2.6) as figure:
        draw_division(figure, histogram)
        svg = to_svg(figure)
    if classes == 1:
        return Picture("Examples by client", f"Numbers of examples, sorted: {figures}.", svg)
    largest = (
        float(np.mean(histogram.max(axis=1)[sizes > 0] / sizes[sizes > 0])) if sizes.any() else 0.0
    )
    told = (
        f"Heat map of {classes} classes over clients sorted by their largest class: {figures}; on "
        f"average {largest:.0%} of a client's examples are of its largest class."
    )
    return Picture("Examples by client and class", told, svg)


def _steps(axes: Axes, values: np.ndarray) -> None:
    places = range(1, len(values) + 1)
    axes.fill_between(places, values, step="mid", color=SERIES[0], alpha=0.3, linewidth=0)
    axes.step(places, values, where="mid", color=SERIES[0], linewidth=1)
    axes.margins(x=0)


def draw_division(figure: Figure, histogram: np.ndarray, title: str = "") -> None:
    """Draw the division of data among clients.

    With classes, each client has a column that is coloured by the classes' shares, below its number
    of examples; columns are sorted by the most frequent class. Without classes, the sorted numbers
    of examples are shown.

    Args:
        figure: where to draw.
        histogram: examples by client and class, int [clients, classes]; one column if there are no
            classes.
        title: heading.
    """
    if histogram.shape[1] == 1:
        axes = _axes(figure, "client, smallest first")
        _steps(axes, np.sort(histogram[:, 0]))
        axes.set(ylabel="examples", ylim=(0, None), title=title)
        return
    top, below = figure.subplots(2, 1, sharex=True, height_ratios=(1, 3))
    order = sorted_clients(histogram)
    ordered = histogram[order]
    groups = np.array_split(ordered, min(_COLUMNS, len(ordered)))
    counts = np.array([group.mean(axis=0) for group in groups])
    totals = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, totals, out=np.zeros_like(counts), where=totals > 0)
    clients, classes = histogram.shape
    edges = np.linspace(0.5, clients + 0.5, len(groups) + 1)
    top.stairs(totals[:, 0], edges, fill=True, color=SERIES[0], alpha=0.35)
    top.set(ylabel="examples", ylim=(0, None), title=title)
    top.grid(axis="y", alpha=0.8)
    image = below.imshow(
        shares.T, aspect="auto", interpolation="none", cmap="viridis", vmin=0, vmax=1,
        extent=(0.5, clients + 0.5, classes - 0.5, -0.5),
    )  # fmt: skip
    below.set(xlabel="client, sorted by its largest class", ylabel="class")
    if classes <= 12:
        below.set_yticks(range(classes))
    percent = PercentFormatter(1.0)
    bar = figure.colorbar(
        image, ax=[top, below], pad=0.02, format=percent, label="share of the client's examples"
    )
    bar.outline.set_visible(False)  # type: ignore[operator]


def sorted_clients(histogram: np.ndarray) -> np.ndarray:
    """Sort the clients by their most frequent class, then by its share, and return their numbers;
    clients without data are last.

    >>> sorted_clients(np.array([[0, 4], [2, 2], [0, 0], [5, 1]]))
    array([3, 1, 0, 2])
    """
    totals = histogram.sum(axis=1)
    share = histogram.max(axis=1) / np.maximum(totals, 1)
    return np.lexsort((-share, histogram.argmax(axis=1), totals == 0))


def _axes(figure: Figure, label: str, grid: bool = True) -> Axes:
    axes = figure.add_subplot()
    axes.set_xlabel(label)
    if label == "round":
        axes.xaxis.set_major_locator(
            MaxNLocator(_TICKS, steps=[1, 2, 5, 10], integer=True, min_n_ticks=1)
        )
    axes.set_axisbelow(True)
    if grid:
        axes.grid(alpha=0.9)
    return axes


def _scale(axes: Axes, which: Literal["x", "y"], values: np.ndarray, log: bool) -> None:
    axis = axes.xaxis if which == "x" else axes.yaxis
    if not log:
        if which == "x":
            axis.set_major_locator(MaxNLocator(6))
        else:
            axes.set_ylim(*ticks.limits(*axes.get_ylim()))
        return
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    ticks.logarithmic(axis, float(np.nanmin(values)), float(np.nanmax(values)))


def _marker(points: Sequence[Any]) -> str | None:
    """Return the marker for points on a line: a dot if there are few points, otherwise None."""
    return "o" if len(points) < 30 else None


def _short(name: str) -> str:
    return name if len(name) <= 22 else f"…{name[-21:]}"


def _course(name: str, points: Sequence[tuple[int, float]], percent: bool) -> str:
    (first, start), (last, end) = points[0], points[-1]
    begin, finish = (f"{start:.1%}", f"{end:.1%}") if percent else (number(start), number(end))
    return f"{name} from {begin} in round {first} to {finish} in round {last}"


def _extremes(names: Sequence[str], values: np.ndarray) -> str:
    if np.isnan(values).all():
        return "none released"
    low, high = int(np.nanargmin(values)), int(np.nanargmax(values))
    if values[low] == values[high]:
        return f"{number(float(values[low]))} in all"
    return f"least {number(float(values[low]))} ({names[low]}), most {number(float(values[high]))} ({names[high]})"


def layer_columns(
    rows: Sequence[Mapping[str, Any]], key: str, layers: int
) -> tuple[list[int], np.ndarray]:
    """Return the rounds and the values [T, K] of a figure of the layers in a run's rows; NaN for a
    layer that was not released.
    """
    layer_rows = [row for row in rows if isinstance(row.get(key), list) and len(row[key]) == layers]
    values = np.array(
        [[math.nan if v is None else v for v in row[key]] for row in layer_rows], dtype=float
    )
    released = [
        [sigma is not None for sigma in row.get("sigma", [0.0] * layers)] for row in layer_rows
    ]
    values = values.reshape(len(layer_rows), layers)
    return [row["round"] for row in layer_rows], np.where(
        np.array(released).reshape(values.shape), values, np.nan
    )
