"""Figures on results pages: tables are those of the kept runs, and p-values in the text are those
of the tables."""

from __future__ import annotations

import json
import re
from pathlib import Path

from benchmarks import example_level

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PAGES = sorted(RESULTS.rglob("*.md"))
NUMBER = r"[0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?"


def rows(text: str) -> list[dict[str, str]]:
    """The cells of all tables of a page by the names of their columns."""
    found, names = [], []
    for line in text.splitlines():
        cells = (
            [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        )
        if not names:
            names = cells
        elif not cells:
            names = []
        elif not set("".join(cells)) <= set("-:"):
            found.append(dict(zip(names, cells, strict=False)))
    return found


def test_p_values_in_the_text_stand_in_a_table():
    known = {
        row["p"] for page in PAGES for row in rows(page.read_text(encoding="utf-8")) if "p" in row
    }
    values = [float(text) for text in known if re.fullmatch(NUMBER, text)]
    seen = 0
    for page in PAGES:
        text = "\n".join(
            line
            for line in page.read_text(encoding="utf-8").splitlines()
            if not line.startswith("|")
        )
        for first, second in re.findall(rf"\bp = ({NUMBER})(?: and ({NUMBER}))?", text):
            for stated in filter(None, (first, second)):
                half = 0.5 * 10.0 ** -len(stated.partition(".")[2]) + 1e-9
                assert any(abs(value - float(stated)) <= half for value in values), (
                    f"{page.name}: p = {stated}"
                )
                seen += 1
    assert seen > 20


def test_tables_of_example_level_steps_are_those_of_the_kept_file():
    kept = json.loads((RESULTS / "example-level.json").read_text(encoding="utf-8"))
    text = (RESULTS / "example-level.md").read_text(encoding="utf-8")
    assert example_level.times(kept, example_level.OURS | example_level.KERNEL) in text
    assert example_level.times(kept, example_level.OPACUS) in text
    assert example_level.memory(kept) in text
    assert example_level.exact(kept) in text
