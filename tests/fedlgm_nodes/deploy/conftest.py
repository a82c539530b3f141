"""Folders of deployments, whose sockets need short paths."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A folder with a short path: the system allows a Unix socket about a hundred bytes."""
    with tempfile.TemporaryDirectory(prefix="fedlgm-", ignore_cleanup_errors=True) as path:
        yield Path(path)
