"""Every test that a page names as backing one of its lines is there, under that name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"
FOLDERS = {
    "adversaries.md": (TESTS,),
    "how-to/node-threats.md": (TESTS / "fedlgm_nodes" / "service", TESTS),
    "how-to/run-real-nodes.md": (TESTS / "fedlgm_nodes" / "deploy", ROOT),
    "how-to/secure-aggregation.md": (TESTS / "fedlgm_nodes" / "service", ROOT),
}
"""Folders of the tests of pages that say where these are; other pages name whole paths."""
PAGES = sorted(
    str(page.relative_to(ROOT / "docs"))
    for page in (ROOT / "docs").rglob("*.md")
    if re.search(r"`[\w/]*test_\w+\.py", page.read_text(encoding="utf-8"))
)


def named(page: str) -> list[tuple[str, str]]:
    """(file, test) in the order of the page; "::test" alone belongs to the file named before it, and
    a file may be named without a test."""
    found, file = [], ""
    for spelt, test in re.findall(
        r"`([\w/]*test_\w+\.py)?(?:::(\w+))?`", (ROOT / "docs" / page).read_text(encoding="utf-8")
    ):
        file = spelt or file
        if spelt or test:
            found.append((file, test))
    return found


def test_the_pages_of_threats_name_many():
    assert len(PAGES) >= 11
    assert all(len(named(page)) >= 20 for page in ("adversaries.md", "how-to/node-threats.md"))


@pytest.mark.parametrize("page", PAGES)
def test_they_exist(page):
    for file, test in named(page):
        here = [base / file for base in FOLDERS.get(page, (ROOT,)) if (base / file).is_file()]
        assert here, f"{page} names {file}, which is not there"
        assert re.search(rf"(def|class) {test}\b", here[0].read_text(encoding="utf-8")), (
            f"{page} names {file}::{test}"
        )
