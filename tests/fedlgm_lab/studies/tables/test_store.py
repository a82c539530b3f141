"""Figures by name: measured once, kept in a file, not measured when the time is over."""

from __future__ import annotations

from pathlib import Path

import pytest
from diverging import install

from fedlgm_lab.studies.tables.store import OutOfTimeError, Values, figures


def test_a_figure_is_measured_once_and_outlives_the_process(tmp_path: Path) -> None:
    file, measured = tmp_path / "new" / "figures.json", []

    def measure() -> list[float]:
        measured.append(1)
        return [0.25, 1e-9]

    assert [Values(file).get("a", measure), Values(file).get("a", measure)] == [[0.25, 1e-9]] * 2
    assert len(measured) == 1
    with pytest.raises(OutOfTimeError):
        Values(file, {"minutes": 0}).get("b", measure)
    assert Values(file, {"minutes": 0}).get("a", measure) == [0.25, 1e-9]
    assert len(measured) == 1


def test_a_run_that_diverges_has_the_worst_figure_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search goes on past a server learning rate that is far too large."""
    install(tmp_path / "modules", monkeypatch)
    changes = [
        "federation.rounds=4",
        "federation.server_optimizer=my_diverging:Step",
        "privacy.accountant=rdp",
    ]
    found = figures("digits", changes, seed=1)
    assert (found["final"], found["diverged"], found["curve"]) == (0.0, True, [])
