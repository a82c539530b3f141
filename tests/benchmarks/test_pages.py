"""Figures on results pages: tables are those of the kept runs, and p-values in the text are those of the tables."""

from __future__ import annotations

import math
import re
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from benchmarks import pages

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PAGES = sorted(RESULTS.rglob("*.md"))
KEPT = (
    "adaptive", "audits", "central_allocations", "correlated", "fashion_mnist", "inid", "ladp_constants",
    "neighbouring_rates", "noise_and_budget", "noise_and_split", "noise_response",
)  # fmt: skip
"""Benchmarks whose `--write` measures nothing."""
NUMBER = r"[0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?"


def rows(text: str) -> list[dict[str, str]]:
    """The cells of all tables of a page by the names of their columns."""
    found, names = [], []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not names:
            names = cells
        elif not cells:
            names = []
        elif not set("".join(cells)) <= set("-:"):
            found.append(dict(zip(names, cells, strict=False)))
    return found


def test_p_values_in_the_text_stand_in_a_table():
    known = {row["p"] for page in PAGES for row in rows(page.read_text(encoding="utf-8")) if "p" in row}
    values = [float(text) for text in known if re.fullmatch(NUMBER, text)]
    seen = 0
    for page in PAGES:
        text = "\n".join(line for line in page.read_text(encoding="utf-8").splitlines() if not line.startswith("|"))
        for first, second in re.findall(rf"\bp = ({NUMBER})(?: and ({NUMBER}))?", text):
            for stated in filter(None, (first, second)):
                half = 0.5 * 10.0 ** -len(stated.partition(".")[2]) + 1e-9
                assert any(abs(value - float(stated)) <= half for value in values), f"{page.name}: p = {stated}"
                seen += 1
    assert seen > 20


def test_differences_without_kept_runs_follow_from_the_means_of_their_table():
    """Welch's t test of three seeds each."""
    table = [row for row in rows((RESULTS / "ladp.md").read_text(encoding="utf-8")) if "p" in row]
    figures = {row["method"]: [float(part) for part in row["accuracy (%)"].split(" ± ")] for row in table}
    mean, deviation = figures["LaDP-FL (sound)"]
    tested = [row for row in table if row["p"] != "-"]
    assert len(tested) >= 6
    for row in tested:
        own = figures[row["method"]]
        found = stats.ttest_ind_from_stats(*own, 3, mean, deviation, 3, equal_var=False)
        errors = np.array([own[1], deviation]) ** 2 / 3
        half = math.sqrt(errors.sum()) * stats.t.ppf(0.975, errors.sum() ** 2 / (errors**2 / 2).sum())
        change, *interval = (float(text) for text in re.findall(r"[+-]?[0-9.]+", row["change (points), 95 % interval"]))
        assert (change, *interval) == pytest.approx(
            (own[0] - mean, own[0] - mean - half, own[0] - mean + half), abs=0.11
        )
        assert float(row["p"]) == pytest.approx(found.pvalue, abs=0.006)


@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT)
def test_tables_are_those_of_the_kept_runs(name, monkeypatch, capsys):
    def same(page: Path, mark: str, text: str) -> None:
        _, on_page, _ = page.read_text(encoding="utf-8").split(f"<!-- {mark} -->")
        assert on_page.strip() == text.strip(), f"{page.name}, {mark}"
        compared.append(mark)

    compared: list[str] = []
    module = import_module(f"benchmarks.{name}")
    for owner in (module, pages):
        if hasattr(owner, "put"):
            monkeypatch.setattr(owner, "put", same)
    before = {page: page.read_text(encoding="utf-8") for page in PAGES}
    monkeypatch.setattr(sys, "argv", [name, "--write"])
    module.main()
    assert compared or {page: page.read_text(encoding="utf-8") for page in PAGES} == before
