"""Comparisons of runs whose task has no accuracy."""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from simulations.studies import comparison, figures, running
from simulations.studies.jobs import jobs

CHANGES = [
    "federation.clients=20", "federation.rounds=1", "federation.rate=0.5", "training.epochs=1", "model.hidden=[4]",
    "run.seed=3", "privacy.accountant=rdp", "task.name=regression", "data={name = 'digits', partition = 'iid'}",
]  # fmt: skip


def test_a_comparison_shows_the_tasks_own_headline(tmp_path: Path) -> None:
    todo = jobs("digits", ("snr-consistent", "uniform"), 1, CHANGES)
    running.run(todo, tmp_path)
    summary = comparison.summarise(todo, tmp_path)
    assert {cell["headline"] for cell in summary["cells"]} == {"rmse"}
    assert "accuracy" not in summary["cells"][0]
    assert set(figures.draw(todo, tmp_path)) == {"rmse", "noise", "model_noise", "epsilon"}
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(figures.tables(summary))
    text = console.export_text()
    first, second = summary["cells"]
    for expected in ("Rmse (iid)", f"{first['rmse']:.4g}", f"{1 - first['rmse'] / second['rmse']:+.2%}"):
        assert expected in text
