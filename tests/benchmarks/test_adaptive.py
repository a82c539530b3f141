"""The benchmark of splits: runs are appended, not made twice, and give the figures of its page."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import adaptive


@pytest.mark.slow
def test_a_second_call_goes_on_where_the_first_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive, "ROUNDS", 2)
    methods = {name: adaptive.FIXED[name] for name in ("uniform", "flat Gaussian")}
    monkeypatch.setattr(adaptive, "TASKS", {"tiny": adaptive.Task((8,), 8.0, (0.05, 0.1), methods, (1, 2))})
    file, left = tmp_path / "cells.jsonl", tmp_path / "left.jsonl"
    monkeypatch.setattr("sys.argv", ["adaptive", "--file", str(file)])
    adaptive.main()
    done = adaptive.read(file)
    assert len(done) == 4 + 4  # the search, then two seeds of each method at its rate
    assert all(0 <= accuracy <= 100 for accuracy in done.values())
    rows = adaptive.summary(done, "tiny")
    assert [row["seeds"] for row in rows] == [2, 2]
    assert min(row["change"] for row in rows) <= 0 == max(row["change"] for row in rows)
    left.write_text("".join(file.read_text().splitlines(keepends=True)[:3]))
    monkeypatch.setattr("sys.argv", ["adaptive", "--file", str(left)])
    adaptive.main()
    assert left.read_text() == file.read_text()
