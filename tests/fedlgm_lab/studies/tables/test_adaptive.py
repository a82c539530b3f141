"""The comparison of splits: runs are appended, not made twice, and give the figures of its page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedlgm_lab.studies.tables import adaptive, runs
from fedlgm_lab.studies.tables.store import Kept


@pytest.mark.slow
def test_a_second_call_goes_on_where_the_first_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adaptive, "ROUNDS", 2)
    monkeypatch.setattr(adaptive, "TASKS", ("tiny",))
    group = {
        "name": {"task": "tiny"},
        "seeds": [1, 2, 3],
        "axes": {"method": ["uniform", "flat Gaussian"]},
        "search": {"key": "rate", "grid": [0.05, 0.1], "least": 0.05, "most": 0.1},
        "set": {"hidden": [8], "epsilon": 8.0},
    }
    axes = runs.settings("adaptive")["axes"]
    monkeypatch.setattr(runs, "settings", lambda _: {"axes": axes, "groups": [group]})
    file, left = tmp_path / "cells.json", tmp_path / "left.json"
    adaptive.measure(Kept(file))
    rows = json.loads(file.read_text())
    assert len(rows) == 4 + 6  # the search, then three seeds of each method at its rate
    assert all(0 <= row["final"] <= 100 for row in rows)
    lines = adaptive.text_of(Kept(file), "tiny").splitlines()[2:]
    assert sum("best fixed" in line for line in lines) == 1
    assert all(line.count("| 3 |") == 1 for line in lines)
    left.write_text(json.dumps(rows[:3]))
    adaptive.measure(Kept(left))
    assert json.loads(left.read_text()) == rows


@pytest.mark.parametrize("method", ["adaptive, updates", "share 0.25, energy 0.8"])
def test_rules_of_the_module_are_run_by_their_names(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adaptive, "ROUNDS", 1)
    (*_, cell) = runs.cells(Kept(tmp_path / "none.json"), adaptive.NAME, method=method)
    found = adaptive.run(cell.recipe, {"rate": 0.1} | cell.changes | {"hidden": [8]}, 1)
    assert 0 <= found["final"] <= 100
