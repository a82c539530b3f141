"""A disk that refuses a file ends every command that writes a run's folder in one sentence."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import simulations
from fedlgm.errors import DiskError, LedgerError, RunError
from fedlgm_nodes.deploy import server_entry
from simulations import launch
from simulations.runs.folder import RunFolder
from simulations.runs.row_file import RowFile

SMALL = [
    "federation.clients=20",
    "federation.rounds=2",
    "privacy.delta=1e-3",
    "privacy.accountant=rdp",
    "run.seed=none",
]
SETS = [part for text in SMALL for part in ("--set", text)]
COMMANDS = {
    "simulate": ["simulate", "digits", "--engine", "local", *SETS, "--run-dir"],
    "compare": ["compare", "digits", "--methods", "uniform,gaussian", "--seeds", 1, *SETS, "--out"],
    "tune": [
        "tune",
        "digits",
        "--search",
        "federation.server_lr=0.1,0.2",
        "--expected-runs",
        1.5,
        *SETS,
        "--out",
    ],
}
REASONS = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the file system is read-only",
}


def refuse(monkeypatch: pytest.MonkeyPatch, number: int, after: int = 0) -> list[int]:
    """Refuse every file that must be on disk after the first `after` ones; SQLite's files are not
    among them."""
    calls, real = [], os.fsync

    def fsync(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) > after:
            raise OSError(number, os.strerror(number))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    return calls


@pytest.mark.parametrize("number", REASONS)
def test_each_file_of_a_run_that_is_refused_is_said(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever is the first one; what was released is continued afterwards."""
    said: list[str] = []
    for after in range(100):
        run = tmp_path / str(after)
        with monkeypatch.context() as disk:
            refuse(disk, number, after)
            try:
                simulations.simulate(overrides=SMALL, run_dir=run)
                break
            except (LedgerError, DiskError) as error:
                said.append(str(error))
        if run.exists():
            assert simulations.resume(run)["rounds"] == 2
    assert 8 < len(said) < 100
    known = (
        REASONS[number],
        "cannot write the checkpoint",
        "nothing was released",
    )  # the last is the ledger's
    assert [text for text in said if not any(part in text for part in known)] == []


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("number", REASONS)
def test_every_command_says_it(
    name: str,
    number: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run: Callable[..., tuple[int, str, str]],
) -> None:
    def full(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(RowFile, "append", full)
    status, _, err = run(*COMMANDS[name], tmp_path / "made")
    assert status == 2
    said = " ".join(err.split())
    assert "Traceback" not in said
    if name == "tune":  # how a run of a search failed is private
        said = (tmp_path / "made" / "private" / "error.txt").read_text(encoding="utf-8")
    assert REASONS[number] in said
    assert "cannot work on the run" in said


@pytest.mark.parametrize("application", ["coordinate-descent", "pca"])
def test_applications_say_it(
    application: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run: Callable[..., tuple[int, str, str]],
) -> None:
    refuse(monkeypatch, errno.EDQUOT, 2)  # after the ledger
    status, _, err = run("apply", application, "--out", tmp_path / "made")
    assert (status, "the disk quota is used up" in " ".join(err.split())) == (2, True)
    status, _, err = run("apply", application, "--out", "/proc/made")
    assert (status, "Errno" in err) == (2, False)


def test_a_search_whose_report_is_refused_too_names_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = launch.simulate

    def full(*given: Any, **options: Any) -> None:
        refuse(monkeypatch, errno.ENOSPC)
        real(*given, **options)

    monkeypatch.setattr(launch, "simulate", full)
    with pytest.raises(
        RunError, match="its report cannot be written: the disk is full; free some space"
    ) as caught:
        simulations.tune(
            search={"federation.server_lr": [0.1, 0.2]},
            expected_runs=1.5,
            overrides=SMALL,
            folder=tmp_path / "search",
        )
    assert "0000" not in str(caught.value)


def test_a_file_in_the_place_of_the_private_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: Callable[..., tuple[int, str, str]]
) -> None:
    with monkeypatch.context() as disk:
        disk.setattr(
            RunFolder, "save", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full"))
        )
        with pytest.raises(DiskError):
            simulations.simulate(overrides=SMALL, run_dir=tmp_path / "run")
    (tmp_path / "run" / "private").rename(tmp_path / "kept")
    (tmp_path / "run" / "private").touch()
    status, _, err = run("simulate", "--resume", tmp_path / "run")
    said = "".join(err.split("\n"))
    assert (status, "Errno" in said) == (2, False)
    assert f"{tmp_path / 'run' / 'private'}: a file has the name of a folder" in said


def test_the_server_of_a_deployment_says_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last error of fedlgm in Flower's log is what `fedlgm deploy run` prints."""
    simulations.simulate(overrides=SMALL, run_dir=tmp_path / "run")
    app = server_entry.make_server_app()
    config = {
        "directory": str(tmp_path),
        "deployment": str(tmp_path),
        "run-dir": str(tmp_path / "run"),
    }
    monkeypatch.setattr(server_entry.DeploymentFolder, "open", lambda path: path)
    for write in ("private_file", "append_private"):
        monkeypatch.setattr(
            RunFolder, write, lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full"))
        )
    monkeypatch.setattr(server_entry, "_serve", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DiskError, match="the disk is full"):
        app._main(None, type("Context", (), {"run_config": config}))
