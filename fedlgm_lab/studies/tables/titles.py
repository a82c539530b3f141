"""Names and titles of the makers of tables, listed without importing the makers."""

from __future__ import annotations

import tomllib
from pathlib import Path

TITLES: dict[str, str] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
"""Titles of the makers, by name."""
