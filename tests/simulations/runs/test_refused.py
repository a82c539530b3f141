"""A run that is refused before its first round is charged leaves no folder, wherever it was
started."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import Context, RecordDict, UserConfig

import simulations
from clients import LayerwiseClient
from fedlgm.errors import FedlgmError, LedgerError, RunError
from fedlgm.privacy.ledger import Ledger
from simulations import launch
from simulations.config.recipe import Recipe
from simulations.engines import flower_entry
from simulations.engines.local import LocalGrid
from simulations.runs import new_folder
from simulations.runs.rows import RoundRow
from strategies import LayerwiseFedAvg


class Offline:
    """A tracker whose server does not answer."""

    def start(self, run: Any) -> None:
        raise ConnectionError("no server")

    def round(self, row: Any) -> None: ...

    def end(self, summary: Any) -> None: ...


@pytest.fixture
def failing_clients(monkeypatch: pytest.MonkeyPatch) -> None:
    def train(self: LayerwiseClient, message: Any, context: Any) -> Any:
        raise RunError("the client has no data")

    monkeypatch.setattr(LayerwiseClient, "train", train)


def test_a_tracker_or_a_client_that_refuses_leaves_nothing(
    tiny: Callable[..., Recipe], tmp_path: Path, failing_clients: None
) -> None:
    for trackers in ([Offline()], []):
        with pytest.raises(RunError):
            launch.simulate(tiny(), run_dir=tmp_path / "some" / "runs" / "run", trackers=trackers)
        assert list(tmp_path.iterdir()) == []


def test_a_first_round_that_is_charged_is_kept(
    tiny: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(row: RoundRow) -> None:
        raise RunError("the reader is gone")

    with pytest.raises(RunError, match="reader"):
        launch.simulate(tiny(), run_dir=tmp_path / "run", progress=crash)
    assert launch.resume(tmp_path / "run")["rounds"] == tiny().federation.rounds


def test_an_interruption_keeps_the_folder_of_a_run(
    tiny: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LayerwiseFedAvg, "configure_train", stop)
    with pytest.raises(KeyboardInterrupt):
        launch.simulate(tiny(), run_dir=tmp_path / "run")
    monkeypatch.undo()
    assert launch.resume(tmp_path / "run")["rounds"] == tiny().federation.rounds


def test_a_refused_command_offers_nothing_to_continue(
    tiny: Callable[..., Recipe], tmp_path: Path, run: Any, failing_clients: None
) -> None:
    (tmp_path / "tiny.toml").write_text(tiny().to_toml())
    status, _, err = run("simulate", tmp_path / "tiny.toml", "--engine", "local")
    assert (status, err) == (2, "error: the client has no data\n")
    assert list(Path().iterdir()) == []


def test_a_study_whose_runs_are_all_refused_leaves_nothing(
    tmp_path: Path, failing_clients: None
) -> None:
    small = {"federation.clients": 20, "federation.rounds": 2, "data.partition": "iid"}
    with pytest.raises(FedlgmError, match="the client has no data"):
        simulations.study(overrides=small, seeds=2, folder=tmp_path / "study", progress=False)
    assert list(tmp_path.iterdir()) == []


def test_a_search_that_cannot_be_charged_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise LedgerError("the disk is full")

    monkeypatch.setattr(Ledger, "charge", full)
    with pytest.raises(LedgerError):
        simulations.tune(
            search={"training.lr": [0.1, 0.2]},
            overrides={"federation.rounds": 2},
            folder=tmp_path / "search",
        )
    assert list(tmp_path.iterdir()) == []


def test_the_flower_app_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RunError("no node is connected")

    monkeypatch.setattr(flower_entry, "serve", refuse)
    config: UserConfig = {
        "run-dir": str(tmp_path / "run"),
        "recipe": "digits",
        "set": "",
        "nodes": "workers",
    }
    context = Context(run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config=config)
    with pytest.raises(RunError, match="no node"):
        flower_entry.make_server_app()(LocalGrid(None), context)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


def test_nodes_may_have_charged_a_round_of_a_run_with_an_empty_ledger(
    tiny: Callable[..., Recipe], tmp_path: Path
) -> None:
    folder = new_folder.create(tmp_path / "run", tiny())
    with (
        pytest.raises(RunError),
        new_folder.removed_if_refused(folder, asks_nodes=True),
        Ledger(folder.ledger_file, folder.owner()),
    ):
        raise RunError("no node answered")
    assert folder.path.exists()
