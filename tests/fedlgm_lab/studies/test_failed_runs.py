"""A run that fails leaves the other runs of a comparison theirs, and is shown."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from compared import shown, summary_of
from diverging import install

from fedlgm.errors import ConfigError, LedgerError, RunError
from fedlgm_lab.studies import running
from fedlgm_lab.studies.jobs import Job, jobs
from simulations import launch

SMALL = [
    "federation.clients=20",
    "federation.rounds=4",
    "federation.rate=0.5",
    "training.epochs=1",
    "model.hidden=[4]",
    "run.evaluate_every=1",
    "run.seed=3",
    "privacy.accountant=rdp",
]


@pytest.fixture(autouse=True)
def _diverging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path / "modules", monkeypatch)


def compared(*diverge: str, seeds: int = 2) -> list[Job]:
    own = [f"{method}/federation.server_optimizer=my_diverging:Step" for method in diverge]
    return jobs("digits", ["uniform", "gaussian"], seeds, [*SMALL, *own])


def test_the_other_runs_of_a_comparison_go_on(tmp_path: Path) -> None:
    todo, out = compared("uniform"), tmp_path / "set"
    for _ in range(2):  # the second time from what is there
        failed = running.run(todo, out)
        assert sorted(failed) == sorted(job.folder for job in todo if job.method == "uniform")
        assert all("training diverged in round 3" in message for message in failed.values())
    summary = summary_of(todo, out, failed)
    assert [cell["method"] for cell in summary["cells"]] == ["gaussian"]
    assert [run["method"] for run in summary["runs"]] == ["gaussian"] * 2
    assert [(run["method"], run["repetition"]) for run in summary["failed"]] == [
        ("uniform", 0),
        ("uniform", 1),
    ]
    assert summary["together"]["runs"] == 4  # what diverged was released, too
    assert summary["differences"] == []  # the first method has no runs to compare with
    assert summary["failed"][0]["reason"].startswith("training diverged")
    text = " ".join(shown(summary).split())
    assert "│ uniform │ 8 │ dirichlet │ diverged │" in text
    assert "note: uniform, run 0: training diverged in round 3" in text


def test_a_comparison_of_which_nothing_is_left_says_why(tmp_path: Path) -> None:
    todo = compared("uniform", "gaussian", seeds=1)
    failed = running.run(todo, tmp_path / "set")
    with pytest.raises(
        RunError, match=r"no run of the study is finished: training diverged in round 3"
    ):
        summary_of(todo, tmp_path / "set", failed)


def test_the_command_compares_what_is_left(
    tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    sets = [*SMALL, "uniform/federation.server_optimizer=my_diverging:Step"]
    arguments = [
        "compare",
        "digits",
        "--methods",
        "uniform,gaussian",
        "--seeds",
        1,
        "--out",
        tmp_path / "set",
        "--json",
    ]
    status, out, err = run(*arguments, *(part for text in sets for part in ("--set", text)))
    assert status == 0, err
    assert [one["method"] for one in json.loads(out)["failed"]] == ["uniform"]


def test_what_failed_otherwise_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    todo, out = compared(seeds=1), tmp_path / "set"
    real = launch.simulate

    def full(recipe, **options):
        result = real(recipe, **options)
        if recipe.mechanism.name == "uniform":
            (out / todo[0].folder / "result.json").unlink()
            raise RunError("cannot write the checkpoint: no space left")
        return result

    monkeypatch.setattr(launch, "simulate", full)
    assert running.run(todo, out) == {todo[0].folder: "cannot write the checkpoint: no space left"}
    monkeypatch.undo()
    assert running.run(todo, out) == {}
    assert summary_of(todo, out)["failed"] == []


def test_a_mistake_in_what_is_asked_for_is_said_at_once(tmp_path: Path) -> None:
    todo = jobs(
        "digits",
        ["uniform", "gaussian"],
        1,
        [*SMALL, "federation.server_optimizer=my_diverging:Absent"],
    )
    with pytest.raises(ConfigError, match="has no 'Absent'"):
        running.run(todo, tmp_path / "set")


def test_a_ledger_that_does_not_fit_ends_the_set(tmp_path: Path) -> None:
    """Else the figures of what all runs cost together would be too small."""
    todo, out = compared("uniform", seeds=1), tmp_path / "set"
    running.run(todo, out)
    (out / todo[0].folder / "ledger.sqlite").unlink()
    with pytest.raises(LedgerError, match="their cost is not known"):
        running.run(todo, out)
