"""Every test that a page names as backing one of its lines is there, under that name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {
    "adversaries.md": (ROOT / "tests", 20),
    "guarantees-proofs.md": (ROOT / "tests", 1),
    "proofs/audits.md": (ROOT / "tests", 1),
    "proofs/correlated-noise.md": (ROOT / "tests", 1),
    "proofs/mechanisms.md": (ROOT / "tests", 1),
    "how-to/node-threats.md": (ROOT / "tests" / "fedlgm_nodes" / "service", 20),
}
"""Folder of the tests of a page, and the least number of tests that it names."""


def named(page: str) -> list[tuple[str, str]]:
    """(file, test) in the order of the page; "::test" alone belongs to the file named before it."""
    found, file = [], ""
    for spelt, test in re.findall(
        r"`([\w/.]*)::(\w+)`", (ROOT / "docs" / page).read_text(encoding="utf-8")
    ):
        file = spelt or file
        found.append((file, test))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_they_exist(page):
    folder, least = PAGES[page]
    assert len(named(page)) >= least
    for file, test in named(page):
        here = [base / file for base in (folder, ROOT / "tests") if (base / file).is_file()]
        assert here, f"{page} names {file}, which is not there"
        assert re.search(rf"(def|class) {test}\b", here[0].read_text(encoding="utf-8")), (
            f"{page} names {file}::{test}"
        )
