"""Every picture on the pages of results is drawn from a kept file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from matplotlib import image

from benchmarks import allocations, inid_figures, ladp_budgets, studies

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "results"
DRAWN: dict[str, Callable[[Path], None]] = {
    "allocations.png": lambda path: allocations.draw(
        json.loads(allocations.KEPT.read_text(encoding="utf-8")), path
    ),
    "ladp-budgets.png": ladp_budgets.draw,
    **{f"inid-{name}.png": partial(inid_figures.draw, name) for name in inid_figures.FIGURES},
    **{f"studies/{path}": partial(studies.draw, name) for name, path in studies.DRAWN.items()},
}
"""What draws each picture again, from a kept file."""


@pytest.mark.parametrize("name", DRAWN)
def test_a_picture_is_drawn_again_from_its_kept_file(name: str, tmp_path: Path) -> None:
    DRAWN[name](tmp_path / "again.png")
    ours, kept = (image.imread(path) for path in (tmp_path / "again.png", RESULTS / name))
    assert ours.shape == kept.shape
    assert (
        np.abs(ours - kept).mean() < 0.01
    )  # text may be drawn otherwise by another version of matplotlib


def test_there_is_no_other_picture() -> None:
    there = {
        str(path.relative_to(RESULTS))
        for kind in ("png", "svg")
        for path in RESULTS.rglob(f"*.{kind}")
    }
    assert there == set(DRAWN)
    shown = set()
    for page in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
            if not target.startswith("http"):
                shown.add(str((page.parent / target).resolve().relative_to(RESULTS)))
    assert shown == there


def test_the_curves_of_the_kept_file_are_the_closed_forms() -> None:
    kept, made = json.loads(inid_figures.KEPT.read_text(encoding="utf-8")), inid_figures.panels()
    for name in inid_figures.FIGURES:
        for one, other in zip(kept[name], made[name], strict=True):
            for label, values in other["curves"].items():
                assert one["curves"][label] == pytest.approx(values, abs=1e-5)
