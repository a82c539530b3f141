"""Folders of deployments, whose sockets need short paths."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def tmp_path(short_path: Path) -> Path:
    return short_path
