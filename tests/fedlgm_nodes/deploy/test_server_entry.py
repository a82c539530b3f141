"""What the server of a deployment writes down: of its nodes, and that it has ended."""

from __future__ import annotations

import json
import multiprocessing
import stat
import threading
import time
from types import SimpleNamespace

import pytest
from flwr.app import Context, RecordDict

from fedlgm.errors import RunError
from fedlgm_nodes.deploy import server_entry, submit
from fedlgm_nodes.deploy.server_entry import ENDED, REPORT, TOLD, NodesRecord, make_server_app
from fedlgm_nodes.server.round import RoundReport
from simulations.config import recipe as recipes
from simulations.engines.local import LocalGrid
from simulations.runs import new_folder
from simulations.runs.folder import RunFolder


def test_who_took_part_is_the_operators_alone_to_read(tmp_path):
    """Secret sampling needs it, and a folder that is shared without `private/` must not tell."""
    folder = new_folder.create(tmp_path / "run", recipes.load("nodes"))
    record = NodesRecord(folder, summed=False)
    record.say("round 1: node7 counts as zero: no answer")
    record.round(RoundReport(1, ["node3"], {"node7": "no answer"}, 0, 1.5))
    told, report = (folder.path / "private" / name for name in (TOLD, REPORT))
    assert "node7" in told.read_text()
    assert json.loads(report.read_text())["answered"] == ["node3"]
    assert {stat.S_IMODE(file.stat().st_mode) for file in (told, report)} == {0o600}
    for path in folder.path.rglob("*"):
        if path.is_file() and path.parent != told.parent:
            assert b"node3" not in path.read_bytes()
            assert b"node7" not in path.read_bytes()


def test_a_run_that_fails_is_noticed_at_once(tmp_path, monkeypatch):
    """Without the file its end is noticed after twenty seconds of silence."""

    def refuse(*_):
        raise RunError("the nodes' budgets do not suffice")

    folder = new_folder.create(tmp_path / "run", recipes.load("nodes"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(server_entry, "_serve", refuse)
    monkeypatch.setattr(server_entry.DeploymentFolder, "open", lambda path: None)
    config = {"directory": str(tmp_path), "deployment": str(tmp_path), "run-dir": str(folder.path)}
    context = Context(run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config=config)
    with pytest.raises(RunError, match="budgets"):
        make_server_app()(LocalGrid(None), context)
    assert (folder.private / ENDED).exists()

    class Flower:
        def status(self, _):
            return "finished:failed"

    begun = time.monotonic()
    assert submit._follow(Flower(), "1", folder, 0, print) == "finished:failed"
    assert time.monotonic() - begun < submit._SILENCE_S


def test_void_rounds_are_named_and_counted(tmp_path, capsys):
    """A round for which no node is left was "0 nodes asked", and the run ended as if it had been done."""
    folder = SimpleNamespace(private=tmp_path, append_private=lambda *_: None, rows=lambda: [{}, {}, {}, {}])
    reports = [{"round": 1, "answered": ["a"]}, {"round": 2, "answered": []}, {"round": 2, "answered": ["a"]}]
    reports.append({"round": 3, "answered": []})
    (tmp_path / REPORT).write_text("".join(json.dumps(report) + "\n" for report in reports), encoding="utf-8")
    record = NodesRecord(folder, summed=True)
    record.counted({"round": 4, "cohort": 0, "seconds": 0.01})
    record.ended(4)
    assert capsys.readouterr().out.splitlines() == [
        "round 4 is void and moves nothing: no node may take part in it any more",
        "4 of 4 rounds are done; 2 of them are void and moved nothing",
    ]
    record = NodesRecord(folder, summed=False)
    record.counted({"round": 4, "cohort": 0, "seconds": 0.01})
    record.ended(5)
    assert capsys.readouterr().out.splitlines() == ["round 4: 0 nodes asked, 0.01 s", "4 of 5 rounds are done"]


def _hold(path):
    with RunFolder.open(path).locked():
        time.sleep(60)


def test_a_killed_server_process_is_named_within_seconds(tmp_path):
    """Flower takes a minute or more to notice it."""
    folder = new_folder.create(tmp_path / "run", recipes.load("nodes"))
    process = multiprocessing.get_context("fork").Process(target=_hold, args=(folder.path,))
    process.start()
    while not folder.is_locked():
        time.sleep(0.01)

    class Flower:
        def status(self, _):
            return "running"

    threading.Timer(1.0, process.kill).start()
    begun = time.monotonic()
    with pytest.raises(RunError, match=r"server process has ended without an error.* resumes the run"):
        submit._follow(Flower(), "1", folder, 0, print)
    assert time.monotonic() - begun < 6
    process.join()
    assert not folder.is_locked()
