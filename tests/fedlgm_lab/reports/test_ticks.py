"""Tick labels of a report differ and do not overlap."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from fedlgm_lab.reports import pictures, ticks
from fedlgm_lab.reports.pictures import over_rounds
from fedlgm_lab.reports.svg import drawing


@pytest.mark.parametrize("spread", [1.1, 2.0, 4.0, 9.0])
@pytest.mark.parametrize("which", ["x", "y"])
def test_labels_of_a_logarithmic_axis(spread, which):
    values = np.geomspace(3e-4, 3e-4 * 10**spread, 20)
    with drawing() as figure:
        axes = figure.add_subplot()
        axes.plot(*((values, range(20)) if which == "x" else (range(20), values)))
        (axes.set_xscale if which == "x" else axes.set_yscale)("log")
        axis = axes.xaxis if which == "x" else axes.yaxis
        ticks.logarithmic(axis, values.min(), values.max())
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        low, high = axis.get_view_interval()
        shown = [
            t.label1
            for t in axis.get_major_ticks()
            if low <= t.get_loc() <= high and t.label1.get_text()
        ]
        boxes = [label.get_window_extent(canvas.get_renderer()) for label in shown]
    assert len(shown) >= 2
    assert len({label.get_text() for label in shown}) == len(shown)
    assert not any(a.overlaps(b) for a, b in itertools.pairwise(boxes))


@pytest.mark.parametrize(
    ("values", "percent"), [([0.14, 0.142, 0.144], True), ([1000.01, 1000.02], False)]
)
def test_labels_of_a_narrow_linear_axis_differ(values, percent, monkeypatch):
    figures = []
    monkeypatch.setattr(pictures, "to_svg", lambda figure, dark: figures.append(figure) or "")
    over_rounds("a figure", range(1, len(values) + 1), {"a": values}, percent=percent)
    FigureCanvasAgg(figures[0]).draw()
    axis = figures[0].axes[0].yaxis
    shown = [label.get_text() for label in axis.get_ticklabels()]
    assert len(set(shown)) == len(shown)
    assert axis.get_offset_text().get_text() == ""
    assert all(label.endswith("%") == percent for label in shown)


@pytest.mark.parametrize("rounds", [1, 3])
def test_every_series_of_a_short_run_has_markers(rounds):
    picture = over_rounds(
        "epsilon", range(1, rounds + 1), {"proven": [1.0] * rounds, "claimed": [2.0] * rounds}
    )
    assert picture is not None
    assert picture.svg.count("<use") >= 2 * rounds
