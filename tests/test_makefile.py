"""The folders and files that the Makefile names exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_tests_of_rounding_are_there() -> None:
    printed = subprocess.run(
        ["make", "--dry-run", "test-rounding"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    named = set(re.findall(r"\btests/[\w/.]+", printed))
    assert len(named) > 5
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
