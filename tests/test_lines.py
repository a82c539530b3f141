"""Lines are short enough to stand beside each other."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = (
    *("fedlgm", "clients", "strategies", "simulations", "fedlgm_nodes", "fedlgm_lab"),
    *("tests", "benchmarks"),
)


@pytest.mark.parametrize("folder", FOLDERS)
def test_less_than_one_line_in_a_hundred_is_longer_than_100_characters(folder: str) -> None:
    """The formatter keeps code at 100 (`pyproject.toml`); texts and links that cannot be broken may
    be longer."""
    files = sorted((ROOT / folder).rglob("*.py"))
    lines = [line for file in files for line in file.read_text(encoding="utf-8").splitlines()]
    assert sum(len(line) > 100 for line in lines) < 0.01 * len(lines)
