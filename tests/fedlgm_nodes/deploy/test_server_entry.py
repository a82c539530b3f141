"""What the server of a deployment writes down: of its nodes, and that it has ended."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import stat
import threading
import time
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
from flwr.app import Context, RecordDict
from typer.testing import CliRunner

from fedlgm.errors import RunError
from fedlgm_nodes.deploy import deployment_commands as commands
from fedlgm_nodes.deploy import server_entry, submit
from fedlgm_nodes.deploy.deployment_folder import DeploymentFolder
from fedlgm_nodes.deploy.server_entry import (
    ENDED,
    REPORT,
    TOLD,
    NodesRecord,
    make_server_app,
    recipe_for_nodes,
)
from fedlgm_nodes.deploy.watch import Watch
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


@pytest.mark.parametrize("fails", [True, False])
def test_the_end_of_a_run_is_noticed_at_once(tmp_path, monkeypatch, fails):
    """Without the file it is noticed after twenty seconds of silence. Flower is asked, for a second,
    what became of a run only if the ServerApp has not completed it."""

    def serve(*_):
        if fails:
            raise RunError("the nodes' budgets do not suffice")

    folder = new_folder.create(tmp_path / "run", recipes.load("nodes"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(server_entry, "_serve", serve)
    monkeypatch.setattr(server_entry.DeploymentFolder, "open", lambda path: None)
    config = {"directory": str(tmp_path), "deployment": str(tmp_path), "run-dir": str(folder.path)}
    context = Context(run_id=1, node_id=2, node_config={}, state=RecordDict(), run_config=config)
    with pytest.raises(RunError, match="budgets") if fails else nullcontext():
        make_server_app()(LocalGrid(None), context)
    assert (folder.private / ENDED).exists()
    asked = []

    class Flower:
        def status(self, run_id):
            asked.append(run_id)
            return "finished:failed"

    begun = time.monotonic()
    watch = Watch(DeploymentFolder(tmp_path), print)
    status = submit._follow(Flower(), "1", folder, 0, print, watch)
    assert status == ("finished:failed" if fails else "finished:completed")
    assert asked == ["1"] * fails
    assert time.monotonic() - begun < submit._SILENCE_S


def record_of(tmp_path, reports, rows, summed=True):
    """A record of these reports, as (round, whether it answered), and rows, as (round, nodes
    drawn)."""
    rows = [{"round": number, "cohort": cohort, "seconds": 0.01} for number, cohort in rows]
    folder = SimpleNamespace(
        private=tmp_path, append_private=lambda *_: None, rows=lambda private=False: rows
    )
    lines = [
        json.dumps({"round": number, "answered": ["a"] * answered, "lost": {}}) + "\n"
        for number, answered in reports
    ]
    (tmp_path / REPORT).write_text("".join(lines), encoding="utf-8")
    return NodesRecord(folder, summed)


def test_void_rounds_are_named_and_counted(tmp_path, capsys):
    """A round for which no node is left was "0 nodes asked", and the run ended as if it had been
    done."""
    reports = [(1, True), (2, False), (2, True), (3, False)]
    record = record_of(tmp_path, reports, [(1, 3), (2, 3), (3, 3), (4, 0)])
    record.print_round({"round": 4, "cohort": 0, "seconds": 0.01})
    record.print_totals(4)
    assert capsys.readouterr().out.splitlines() == [
        "round 4 is void and leaves the model unchanged: no node may take part in it any more",
        "2 of 4 rounds are done; 2 are void and left the model unchanged",
    ]
    record = record_of(tmp_path, reports, [(1, 3), (2, 3), (3, 3), (4, 0)], summed=False)
    record.print_round({"round": 4, "cohort": 0, "seconds": 0.01})
    record.print_totals(5)
    assert capsys.readouterr().out.splitlines() == [
        "round 4: 0 nodes asked, 0.01 s",
        "4 of 5 rounds are done",
    ]


@pytest.mark.parametrize(
    ("reports", "rows", "void"),
    [
        pytest.param([(1, True), (1, False)], [(1, 3)], 1, id="the second attempt is void"),
        pytest.param([(1, True)], [(1, 0)], 1, id="no node is left for the second attempt"),
        pytest.param([(1, False), (1, True)], [(1, 3)], 0, id="the second attempt gives a sum"),
        pytest.param([(1, True), (2, False)], [(1, 3)], 0, id="the void round is not done"),
    ],
)
def test_after_a_kill_between_report_and_row_the_last_attempt_decides(
    tmp_path, capsys, reports, rows, void
):
    record = record_of(tmp_path, reports, rows)
    assert record.void() == void
    record.print_totals(2)
    assert capsys.readouterr().out.startswith(f"{1 - void} of 2 rounds are done")


def test_a_round_that_releases_nothing_is_not_void(tmp_path):
    record = record_of(tmp_path, [(1, True)], [(1, 3), (2, 3)])
    record._folder.rows()[1]["skipped"] = True
    assert record.void() == 0


def test_the_last_lines_name_each_node_whose_answer_is_missing(tmp_path, capsys):
    folder = new_folder.create(tmp_path / "run", recipe_for_nodes(recipes.load("nodes"), 3))
    record = NodesRecord.of(folder)
    for number, lost in [(1, {}), (2, {"c": "no answer"}), (3, {"c": "is busy", "b": "is down"})]:
        record.round(RoundReport(number, ["a"], lost, 0, 1.5))
    record.round(RoundReport(2, ["a", "b", "c"], {}, 0, 1.5))  # the round's second attempt
    assert record.silent() == [
        "b counted as zero in 1 round: is down",
        "c counted as zero in 1 round: is busy",
    ]
    record.print_totals(3)
    assert capsys.readouterr().out.splitlines()[:2] == record.silent()
    assert NodesRecord.of(new_folder.create(tmp_path / "new", folder.recipe())).silent() == []


def test_the_federations_page_names_each_node_after_a_round(tmp_path):
    folder = new_folder.create(tmp_path / "run", recipe_for_nodes(recipes.load("nodes"), 3))
    record = NodesRecord.of(folder)
    record.round(RoundReport(1, ["a"], {"c": "no <answer>"}, 0, 1.5))
    record.round(RoundReport(2, ["a", "c"], {}, 0, 1.5))
    record.write_page({"a": 2, "b": None, "c": 1}, ["tls.crt ends tomorrow"])
    file = folder.private / "federation.html"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    page = re.sub("<[^>]*>", " ", file.read_text().partition("</style>")[2])
    page = " ".join(page.split())
    for words in ("a 2 0 2", "c 1 1 no &lt;answer&gt; 1", "tls.crt ends tomorrow", "2 a, c 1.5"):
        assert words in page


@pytest.mark.parametrize(
    ("answered", "lost"),
    [(True, {}), (False, {}), (True, {"node1": "its service does not answer"})],
)
def test_a_run_with_void_rounds_or_missing_nodes_ends_with_status_1(
    tmp_path, monkeypatch, answered, lost
):
    folder = new_folder.create(
        tmp_path / "run", recipe_for_nodes(recipes.load("distributed-digits"), 30)
    )
    folder.append({"round": 1, "noise_norm": 1.0, "noise_scale": 1.0}, {"round": 1, "cohort": 30})
    NodesRecord.of(folder).round(RoundReport(1, ["node3"] * answered, lost, 0, 1.5))
    monkeypatch.setattr(submit, "run", lambda *_, **__: {"run": str(folder.path)})
    monkeypatch.setattr(DeploymentFolder, "open", lambda path: None)
    said = CliRunner().invoke(commands.app, ["run", "distributed-digits", str(tmp_path), "--json"])
    assert json.loads(said.stdout) == {"run": str(folder.path)}
    assert said.exit_code == (0 if answered and not lost else 1)


def _hold(path):
    with RunFolder.open(path).lock():
        time.sleep(60)


def _worked_on(path):
    """A run folder, and a process that works on it."""
    folder = new_folder.create(path, recipes.load("nodes"))
    process = multiprocessing.get_context("fork").Process(target=_hold, args=(folder.path,))
    process.start()
    while folder.worker() is None:
        time.sleep(0.01)
    return folder, process


def test_a_killed_server_process_is_named_within_seconds(tmp_path):
    """Flower takes a minute or more to notice it."""
    folder, process = _worked_on(tmp_path / "run")
    assert folder.worker() == (process.pid, True)
    watch = Watch(DeploymentFolder(tmp_path), print)
    watch.target = folder

    class Flower:
        def status(self, _):
            return "running"

    threading.Timer(0.3, process.kill).start()
    begun = time.monotonic()
    says = rf"server process \(process {process.pid}\) has ended without an error.* resumes the run"
    with pytest.raises(RunError, match=says):
        submit._follow(Flower(), "1", folder, 0, print, watch)
    assert time.monotonic() - begun < 6
    process.join()
    assert folder.worker() == (process.pid, False)
    with folder.lock():
        assert folder.worker() == (os.getpid(), True)
        with folder.lock():  # the same lock
            pass
        assert folder.worker() == (os.getpid(), True)
        with (
            pytest.raises(RunError, match="another process is working on the run"),
            RunFolder(folder.path).lock(),
        ):
            pass
        assert folder.worker() == (os.getpid(), True)
    assert folder.worker() is None


def test_a_repeated_command_follows_a_server_process_that_still_works(tmp_path):
    """It said "wait for it", and nothing of the run's progress or end."""
    folder, process = _worked_on(tmp_path / "run")
    record, said = NodesRecord(folder, summed=False), list[str]()
    record.say("before")
    threading.Timer(0.5, record.say, ["round 1"]).start()
    threading.Timer(1.5, process.kill).start()
    submit._follow_worker(folder, said.append)
    process.join()
    assert said[0].startswith(f"process {process.pid} works on {folder.path}")
    assert said[1:] == ["round 1"]
    submit._follow_worker(folder, said.append)  # nothing works on it
    assert len(said) == 2
