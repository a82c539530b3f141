"""The seven newcomers of the page about the first private result."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from benchmarks import newcomers

ROOT = Path(__file__).parents[2]
KEPT = json.loads((ROOT / newcomers.PLACE).read_text(encoding="utf-8"))
PAGE = (ROOT / newcomers.PLACE).with_suffix(".md").read_text(encoding="utf-8")


def test_the_table_is_that_of_the_kept_file_and_within_the_limits():
    assert newcomers.table(KEPT) in PAGE
    assert list(KEPT["newcomers"]) == list(newcomers.NEWCOMERS)
    for row in KEPT["newcomers"].values():
        assert statistics.median(row["seconds"]) <= newcomers.MOST_SECONDS
        assert 0 < row["epsilon"] <= 8
        assert row["lines"] <= newcomers.MOST_LINES


def test_the_sizes_of_installations_are_those_of_the_kept_file():
    for row in json.loads((ROOT / "docs/results/install-sizes.json").read_text(encoding="utf-8")):
        cells = (row["installed"], row["python"], f"{row['megabytes']:,}")
        assert f"| {' | '.join(cells)} | {row['packages'] or 'not counted'} |" in PAGE


def test_a_command_is_found_wherever_a_page_prints_it_and_lines_are_counted(tmp_path):
    page = "```\nfirst --option \\\n    value\n```\nWrite `second DIR`.\n\n    third x*  # why\n"
    commands = [newcomers.command_of(page, start) for start in ("first", "second", "third")]
    assert commands == ["first --option value", "second DIR", "third x*"]
    with pytest.raises(AssertionError):
        newcomers.command_of(page, "fourth")
    visit = newcomers.Visit(tmp_path, tmp_path)
    visit.paste("a.py", "x = 1\ny = 2\nz = 3\n", {"y = 2\n": "y = 4\n\nw = 5\n", "z = 3\n": ""})
    assert (visit.lines, (tmp_path / "a.py").read_text()) == (2, "x = 1\ny = 4\n\nw = 5\n")


@pytest.mark.slow
@pytest.mark.parametrize("who", newcomers.NEWCOMERS)
def test_a_newcomer_reaches_a_private_result_with_few_lines(who):
    """By the commands and the code of the page, from an empty folder."""
    visit, kept = newcomers.visit(who), KEPT["newcomers"][who]
    assert visit.first is not None
    _, commands, epsilon = visit.first
    assert 0 < epsilon <= 8
    assert visit.lines <= newcomers.MOST_LINES
    assert (visit.page, commands, visit.lines) == (kept["page"], kept["commands"], kept["lines"])
