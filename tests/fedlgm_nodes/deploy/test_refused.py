"""A run that real nodes' server refuses leaves neither a folder nor a registration; the lines of
one that is made."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedlgm.errors import RunError
from fedlgm_nodes.deploy import submit
from fedlgm_nodes.deploy.create import create
from fedlgm_nodes.deploy.deployment_folder import DeploymentFolder
from fedlgm_nodes.deploy.flower_cli import Flower
from fedlgm_nodes.deploy.server_entry import ENDED, TOLD
from fedlgm_nodes.deploy.watch import Watch
from simulations.config import recipe as recipes
from simulations.runs import new_folder


def test_a_refusal_of_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(Flower):
        def healthy(self) -> bool:
            return True

        def submit(self, app: Path, *options: str) -> str:
            raise RunError("the SuperLink refuses it")

    monkeypatch.setattr(submit, "Flower", Refusing)
    folder = create(tmp_path / "lab", 2, example=recipes.load("nodes", ["model.hidden=[8]"]))
    with pytest.raises(RunError, match="refuses"):
        submit.run(folder, recipes.load("nodes", ["model.hidden=[8]"]))
    assert list(folder.runs.iterdir()) == list(folder.signer.runs.iterdir()) == []


def test_lines_that_a_run_says_while_flower_is_asked_are_passed_on(tmp_path: Path) -> None:
    target = new_folder.create(tmp_path / "run", recipes.load("nodes", ["model.hidden=[8]"]))
    target.private_file(ENDED)
    told: list[str] = []

    class Slow:
        def status(self, run_id: str) -> str:
            target.append_private(TOLD, "round 2: 3 nodes asked")
            return "finished:completed"

    target.append_private(TOLD, "round 1: 3 nodes asked")
    watch = Watch(DeploymentFolder(tmp_path), print)
    status = submit._follow(Slow(), "1", target, 0, told.append, watch)  # type: ignore[arg-type]
    assert status == "finished:completed"
    assert told == ["round 1: 3 nodes asked", "round 2: 3 nodes asked"]


def test_a_server_process_that_was_killed_is_told_from_one_that_failed() -> None:
    log = "INFO :      Start `flwr-serverapp` process\n"
    assert submit._reason("finished:failed", log).startswith(
        "the run's server process has ended without an error"
    )
    trace = 'Traceback (most recent call last):\n  File "a.py", line 1, in <module>\nKeyError: 3\n'
    assert submit._reason("finished:failed", log + trace).startswith(
        "Flower reports finished:failed. KeyError: 3"
    )
    assert (
        submit._reason("finished:failed", log + "fedlgm.errors.RunError: no quorum\n")
        == "no quorum"
    )
