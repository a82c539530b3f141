"""The examples of the documentation are short. `tests/test_packaging.py` runs them as they stand."""

from __future__ import annotations

from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


def test_an_existing_flower_app_becomes_private_in_few_lines() -> None:
    app = EXAMPLES / "existing_flower_app"
    lines = [line for line in (app / "app.py").read_text().splitlines() if line.strip()]
    assert len(lines) <= 30
