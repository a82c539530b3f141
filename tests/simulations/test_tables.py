"""Tables on narrow terminals: a word is never folded."""

from __future__ import annotations

import pytest
from rich.console import Console

from simulations.tables import table

COLUMNS = (
    "method",
    "budget",
    "accuracy",
    "noise of the model",
    "guarantee",
    "proven",
    "claimed",
    "seconds",
)
ROW = (
    "sensitivity-proportional",
    "8",
    "26.20 % ± 11.95 %",
    "1.763 ± 0",
    "proven",
    "8 at 1e-05",
    "8 at 1e-05",
    "0.92",
)


@pytest.mark.parametrize("width", [50, 60, 80, 100, 120, 200])
@pytest.mark.parametrize("keys", [1, 2])
def test_words_and_figures_are_whole_at_any_width(width, keys):
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table("Figures", COLUMNS, [ROW, ROW], left=["method"], keys=keys))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= width
    words = {word.strip("│┃") for line in lines for word in line.split()}
    assert {word for cell in (*COLUMNS, *ROW) for word in cell.split()} <= words
    parts = sum("seconds" in line for line in lines), sum("method" in line for line in lines)
    assert parts[0] == 1
    assert (parts[1] == 1) == (width >= 100) or width in (80,)


def test_a_table_with_room_keeps_its_lines():
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(table("sizes", ["layer", "size"], [["a", "3"]], left=["layer"]))
    assert "│ a     │    3 │" in console.export_text()
