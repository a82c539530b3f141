"""A store of data sets of each test's own."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or fills the user's store, nor goes to the internet."""
    monkeypatch.setenv("FEDLGM_DATA", str(tmp_path / "store"))
    monkeypatch.setenv("FEDLGM_OFFLINE", "1")
