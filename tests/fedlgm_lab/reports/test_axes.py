"""Pictures of a report as they are drawn: labels differ, stand apart and fit; short runs have
lines."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from fedlgm_lab.reports import pictures
from fedlgm_lab.reports.pictures import Picture, heat_map, over_rounds, per_layer

random = np.random.default_rng(0)


@dataclass
class Drawn:
    """The figures of pictures, drawn."""

    figures: list[Figure] = field(default_factory=list)

    def labels(self) -> Iterator[list[tuple[str, Bbox]]]:
        """Texts and places of the tick labels, axis by axis."""
        for figure in self.figures:
            canvas = FigureCanvasAgg(figure)
            canvas.draw()
            for axes, name in itertools.product(figure.axes, ("xaxis", "yaxis")):
                axis = getattr(axes, name)
                low, high = sorted(axis.get_view_interval())
                ticks = [tick for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
                shown = [
                    label
                    for tick in ticks
                    for label in (tick.label1, tick.label2)
                    if label.get_visible()
                ]
                yield [
                    (text.get_text(), text.get_window_extent()) for text in shown if text.get_text()
                ]

    def axes(self) -> Axes:
        return self.figures[-1].axes[0]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    kept = Drawn()

    def keep(figure: Figure, **options: bool) -> str:
        kept.figures.append(figure)
        return "<svg></svg>"

    monkeypatch.setattr(pictures, "to_svg", keep)
    return kept


def narrow(rounds: int) -> Picture | None:
    return over_rounds(
        "accuracy", range(1, rounds + 1), {"a": list(np.linspace(0.1, 0.12, rounds))}, percent=True
    )


def nearly_flat(rounds: int) -> Picture | None:
    values = {"proven": list(7.9999 + 1e-6 * np.arange(rounds)), "claimed": [7.9999] * rounds}
    return over_rounds("epsilon", range(1, rounds + 1), values)


def near_one(rounds: int) -> Picture | None:
    return over_rounds("accuracy", range(1, rounds + 1), {"a": [0.997] * rounds}, percent=True)


def large(rounds: int) -> Picture | None:
    return over_rounds(
        "loss", range(1, rounds + 1), {"loss": list(np.linspace(2.3e6, 2.1e4, rounds))}
    )


def layers(number: int, spread: float, log: bool) -> Callable[[int], Picture | None]:
    names = [f"block.{k}.attention.weight" for k in range(number)]

    def draw(rounds: int) -> Picture | None:
        values = np.exp(spread * random.standard_normal((rounds, number)))
        return per_layer("noise", names, range(1, rounds + 1), values, log=log)

    return draw


def heat(rounds: int) -> Picture | None:
    values = np.exp(4 * random.standard_normal((rounds, 12)))
    return heat_map("noise", [f"layer {k}" for k in range(12)], range(1, rounds + 1), values)


CASES = {
    "accuracy from 10 to 12 %": narrow,
    "flat epsilon": nearly_flat,
    "accuracy near one": near_one,
    "loss of millions": large,
    "one layer": layers(1, 1.2, True),
    "four layers": layers(4, 1.2, True),
    "four layers, wide": layers(4, 4.0, True),
    "twelve layers": layers(12, 1.2, False),
    "twelve layers, wide": layers(12, 4.0, False),
    "sixty layers": layers(60, 4.0, True),
    "heat map": heat,
}


@pytest.mark.parametrize("rounds", [1, 2, 3, 10, 300])
@pytest.mark.parametrize("draw", CASES.values(), ids=CASES)
def test_labels_differ_stand_apart_and_fit(
    draw: Callable[[int], Picture], rounds: int, drawn: Drawn
) -> None:
    draw(rounds)
    for shown in drawn.labels():
        texts = [text for text, _ in shown]
        assert len(set(texts)) == len(texts), texts
        assert max(map(len, texts), default=0) <= 22, texts
        close = [(a, b) for (a, x), (b, y) in itertools.combinations(shown, 2) if x.overlaps(y)]
        assert not close
    (figure,) = drawn.figures
    for legend in figure.legends:
        place = legend.get_window_extent()
        assert place.x0 >= 0
        assert place.x1 <= figure.bbox.width


def test_the_check_finds_what_it_is_for(drawn: Drawn) -> None:
    """Power: repeated labels, and labels that overlap."""
    narrow(10)
    axes = drawn.axes()
    axes.set_xticks([1, 1.1, 9], ["first", "second", "first"])
    shown = next(drawn.labels())
    assert [text for text, _ in shown] == ["first", "second", "first"]
    assert shown[0][1].overlaps(shown[1][1])


@pytest.mark.parametrize("rounds", [2, 3, 10])
def test_short_runs_have_lines(rounds: int, drawn: Drawn) -> None:
    narrow(rounds)
    assert [len(line.get_xdata()) for line in drawn.axes().get_lines()] == [rounds]


def test_a_single_round_has_bars_with_their_figures(drawn: Drawn) -> None:
    picture = over_rounds(
        "Test accuracy", [3], {"proven": [0.107], "claimed": [0.25]}, percent=True
    )
    assert picture is not None
    assert "in round 3" in picture.alt
    axes = drawn.axes()
    assert [bar.get_width() for bar in axes.patches] == [0.107, 0.25]
    assert {"10.7%", "25.0%"} <= {text.get_text() for text in axes.findobj(Text)}


def test_differences_of_rounding_do_not_fill_the_axis(drawn: Drawn) -> None:
    nearly_flat(10)
    low, high = drawn.axes().get_ylim()
    assert high - low >= 1e-3 * 7.9999


def test_a_share_has_no_labels_beyond_100_per_cent(drawn: Drawn) -> None:
    near_one(10)
    assert drawn.axes().get_ylim()[1] <= 1.0


def test_every_one_of_many_curves_is_drawn():
    """The fifth and later ones were named in the text below a picture without them."""
    series = {f"curve {number}": [0.1 * number, 0.2] for number in range(6)}
    svg = over_rounds("figures", [1, 2], series).svg
    assert [name for name in series if f">{name}</text>" not in svg] == []
