"""The comparison of splits: runs are appended, not made twice, and give the figures of its page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedlgm_lab.studies.tables import adaptive
from fedlgm_lab.studies.tables.searched import Search
from fedlgm_lab.studies.tables.store import Kept


@pytest.mark.slow
def test_a_second_call_goes_on_where_the_first_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adaptive, "ROUNDS", 2)
    monkeypatch.setattr(adaptive, "SEEDS", (1, 2, 3))
    methods = {name: adaptive.FIXED[name] for name in ("uniform", "flat Gaussian")}
    task = adaptive.Task((8,), 8.0, Search((0.05, 0.1), 0.05, 0.1), methods)
    monkeypatch.setattr(adaptive, "TASKS", {"tiny": task})
    file, left = tmp_path / "cells.json", tmp_path / "left.json"
    adaptive.measure(Kept(file))
    rows = json.loads(file.read_text())
    assert len(rows) == 4 + 6  # the search, then three seeds of each method at its rate
    assert all(0 <= row["accuracy"] <= 100 for row in rows)
    lines = adaptive.text_of(Kept(file), "tiny").splitlines()[2:]
    assert sum("best fixed" in line for line in lines) == 1
    assert all(line.count("| 3 |") == 1 for line in lines)
    left.write_text(json.dumps(rows[:3]))
    adaptive.measure(Kept(left))
    assert json.loads(left.read_text()) == rows
