"""Comparisons of runs whose task has no accuracy."""

from __future__ import annotations

from pathlib import Path

from compared import shown, summary_of

from fedlgm_lab.studies import running
from fedlgm_lab.studies.jobs import jobs

CHANGES = [
    "federation.clients=20",
    "federation.rounds=1",
    "federation.rate=0.5",
    "training.epochs=1",
    "model.hidden=[4]",
    "run.seed=3",
    "privacy.accountant=rdp",
    "task.name=regression",
    "data={name = 'digits', partition = 'iid'}",
]


def test_a_comparison_shows_the_tasks_own_headline(tmp_path: Path) -> None:
    todo = jobs("digits", ("snr-consistent", "uniform"), 1, CHANGES)
    running.run(todo, tmp_path)
    summary = summary_of(todo, tmp_path)
    assert summary["headline"] == "rmse"
    assert "accuracy" not in summary["cells"][0]
    text = shown(summary)
    for cell in summary["cells"]:
        assert f"{cell['rmse']:.4g}" in text
