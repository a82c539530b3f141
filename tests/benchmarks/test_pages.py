"""Figures on results pages: tables are those of the kept runs, and p-values in the text are those
of the tables."""

from __future__ import annotations

import json
import re
import sys
from importlib import import_module
from pathlib import Path

import pytest

from benchmarks import example_level, ladp_overhead, lm_dp_sgd_page, pages

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PAGES = sorted(RESULTS.rglob("*.md"))
KEPT = (
    "adaptive",
    "audits",
    "central_allocations",
    "correlated",
    "fashion_mnist",
    "inid",
    "ladp_budgets",
    "ladp_constants",
    "neighbouring_rates",
    "noise_and_budget",
    "noise_and_split",
    "noise_response",
    "cut_votes",
    "water_filling",
)
"""Benchmarks whose `--write` measures nothing."""
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


@pytest.mark.parametrize(
    ("page", "kept", "tables"),
    [
        (
            "lm-dp-sgd.md",
            "lm-dp-sgd.json",
            lambda found: [
                table(found)
                for table in (lm_dp_sgd_page.accuracy, lm_dp_sgd_page.changes, lm_dp_sgd_page.risk)
            ],
        ),
        (
            "data/lm-dp-sgd.md",
            "lm-dp-sgd.json",
            lambda found: [
                table(found)
                for table in (
                    lm_dp_sgd_page.search,
                    lm_dp_sgd_page.membership,
                    lm_dp_sgd_page.bias,
                    lm_dp_sgd_page.steps,
                )
            ],
        ),
        (
            "example-level.md",
            "example-level.json",
            lambda found: [
                example_level.times(found, example_level.OURS | example_level.KERNEL),
                example_level.times(found, example_level.OPACUS),
                example_level.memory(found),
                example_level.exact(found),
            ],
        ),
        ("data/ladp.md", "ladp-overhead.json", lambda found: ladp_overhead.tables(found).values()),
    ],
)
def test_tables_are_those_of_the_kept_file(page, kept, tables):
    text = (RESULTS / page).read_text(encoding="utf-8")
    assert all(
        table in text for table in tables(json.loads((RESULTS / kept).read_text(encoding="utf-8")))
    )


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
