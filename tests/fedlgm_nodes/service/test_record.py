"""Approvals, pauses and the record of a real service, and files that somebody has changed."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import tomllib
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from fedlgm.errors import ConfigError, LedgerError, RunError
from fedlgm_nodes.deploy import record_commands
from fedlgm_nodes.service.approval import Approval
from fedlgm_nodes.service.folder import NodeFolder
from fedlgm_nodes.service.record import Record
from tests.support import nodes
from tests.support.nodes import WORK, NodeProcess, ask, edit, make_node, plan

PAGE = (Path(__file__).parents[3] / "docs/how-to/approve-work.md").read_text(encoding="utf-8")
OTHER = WORK | {"training": {"lr": 0.2, "epochs": 1, "batch_size": 8}}


def run(*arguments: Any) -> Any:
    app = typer.Typer()
    record_commands.add_commands(app)
    result = CliRunner().invoke(app, [str(part) for part in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return json.loads(result.stdout) if "--json" in arguments else result.stdout


def waiting(folder: NodeFolder, state: str = "waits") -> list[str]:
    listed = run("requests", folder.path, "--json")
    return [row["work"] for row in listed if row["state"] == state]


def careful(path: Path) -> NodeFolder:
    folder = make_node(path)
    edit(folder, 'approval = "policy"', 'approval = "operator"')
    return folder


def test_new_work_waits_and_any_change_is_new_work(tmp_path):
    """The whole life of a node in one service: request, approval, change, denial, pause, report."""
    folder = careful(tmp_path / "node")
    with NodeProcess(folder) as service:
        assert ask(folder)[0]["code"] == "approval"
        assert ask(folder, round=2)[0]["code"] == "approval"
        (work,) = waiting(folder)
        said = run("show", folder.path, work[:8])
        for words in ("logistic", "anybody", "10 rounds", "of the budget", "false alarms"):
            assert words in said
        run("approve", folder.path, work[:12], "--epsilon", 3, "--purpose", "sepsis study")
        service.kill()
    with NodeProcess(folder):
        assert ask(folder)[0]["ok"]
        assert ask(folder)[0]["replayed"]
        changes = (
            {"work": OTHER},
            {"text": plan(5.0).to_json()},
            {"text": plan(rounds=11).to_json()},
        )
        for change in changes:
            assert ask(folder, **change)[0]["code"] == "approval"
        assert len(waiting(folder)) == 3
        with pytest.raises(ConfigError, match="less than one release"):
            run("approve", folder.path, waiting(folder)[0], "--epsilon", 0.01)
        run("deny", folder.path, waiting(folder)[0], "--reason", "no")
        assert "denied" in ask(folder, work=OTHER)[0]["why"]
        run("pause", folder.path)
        assert ask(folder, round=2)[0]["code"] == "paused"
        run("resume", folder.path)
        assert ask(folder, round=2)[0]["ok"]
        record = run("report", folder.path, "--json")
    assert [row["purpose"] for row in record["released"]] == ["sepsis study"] * 2
    assert record["released"][0]["model"] == {"name": "logistic"}
    assert record["unrecorded"] == []
    assert {row["code"] for row in record["refusals"]} == {"approval", "paused"}
    kinds = [row["kind"] for row in record["decisions"]]
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "policy": 1, "request": 4, "approve": 1, "deny": 1, "pause": 1, "resume": 1
    }  # fmt: skip
    run("report", folder.path, "-o", tmp_path / "page.html")
    assert "sepsis study" in (tmp_path / "page.html").read_text()
    assert "2 releases" in run("verify", folder.path)
    checked = {row["check"]: row["ok"] for row in run("check", folder.path, "--json")}
    assert all(checked.values())


def test_limits_are_raised_without_a_restart(tmp_path):
    """A budget, a cap and a permission, in a service that goes on; the edit alone does nothing."""
    folder = make_node(tmp_path / "node")
    edit(folder, "releases = 1000 ", "releases = 2 ")
    edit(folder, "epsilon = 8.0", "epsilon = 2.0")
    with NodeProcess(folder):
        assert ask(folder)[0]["ok"]
        assert ask(folder, round=2)[0]["code"] == "budget-spent"
        edit(folder, "epsilon = 2.0", "epsilon = 6.0")
        assert ask(folder, round=2)[0]["code"] == "budget-spent"
        assert "epsilon 6, 2 releases" in run("reload", folder.path)
        assert ask(folder, round=2)[0]["ok"]
        assert nodes.hello(folder)["epsilon"] == 6.0
        assert "at most 2 releases" in ask(folder, round=3)[0]["why"]
        edit(folder, "releases = 2 ", "releases = 3 ")
        edit(folder, "largest_model = 20_000_000", "largest_model = 1")
        run("reload", folder.path)
        assert ask(folder, round=3)[0]["code"] == "work"  # the training process has it, too
        edit(folder, "largest_model = 1", "largest_model = 20_000_000")
        run("reload", folder.path)
        assert ask(folder, round=3)[0]["ok"]
        assert "nothing has changed" in run("reload", folder.path)
        said = run("report", folder.path, "--json")["decisions"]
    assert [row["changes"] for row in said] == [
        "", "privacy.epsilon: 2.0, now 6.0",
        "allow.largest_model: 20000000, now 1; ask.releases: 2, now 3",
        "allow.largest_model: 1, now 20000000",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("client = 0 ", "client = 1 ", "node changed"),
        ('unit = "client"', 'unit = "example"', "privacy.unit changed"),
        ("epsilon = 8.0", "epsilon = -8.0", "must be above 0"),
        ('tasks = ["classification"]', 'tasks = ["clasification"]', "classification"),
    ],
)
def test_what_a_running_service_cannot_take_over_is_refused(tmp_path, old, new, said):
    folder = make_node(tmp_path / "node")
    with pytest.raises(ConfigError, match="not started"):
        run("reload", folder.path)
    with NodeProcess(folder):
        edit(folder, old, new)
        with pytest.raises(ConfigError, match=said):
            run("reload", folder.path)
        assert ask(folder)[0]["ok"]


def test_an_approval_ends_with_its_epsilon(tmp_path):
    folder = careful(tmp_path / "node")
    with NodeProcess(folder):
        ask(folder)
        (work,) = waiting(folder)
        assert "at most 2 releases" in run("approve", folder.path, work, "--epsilon", 3.2)
        for round in (1, 2):
            assert ask(folder, round=round)[0]["ok"]
        assert "used up" in ask(folder, round=3)[0]["why"]
        assert ask(folder, round=2)[0]["replayed"]  # a lost answer is sent again
        spent = nodes.hello(folder)["epsilon_spent"]
    assert spent <= 3.2
    assert len(nodes.rows(folder)) == 2


@pytest.mark.parametrize("kind", ["of another node", "replayed", "of another work", "expired"])
def test_a_hostile_approval_permits_nothing_in_a_service_that_runs(tmp_path, kind):
    """Rows that somebody writes into the record, and approvals of something else."""
    folder = careful(tmp_path / "node")
    with NodeProcess(folder):
        ask(folder)
        ask(folder, work=OTHER)
        work, other = waiting(folder)
        with folder.ledger(readonly=True) as ledger:
            record = folder.record(ledger.identity)
        if kind == "of another work":
            run("approve", folder.path, other)
        elif kind == "expired":
            record.append("approve", **request(work=work, until="2020-01-01", releases=None))
        elif kind == "replayed":
            run("approve", folder.path, work)
            approval = folder.record_file.read_bytes().splitlines(keepends=True)[-1]
            run("deny", folder.path, work, "--reason", "no")
            with folder.record_file.open("ab") as file:
                file.write(approval)
        else:
            forged = Record(tmp_path / "r", tmp_path / "w", ledger.identity, b"x" * 32)
            for row in record.rows:
                fields = {name: row[name] for name in row.keys() - {"seq", "at", "kind", "head"}}
                forged.append(row["kind"], **fields)
            forged.append("approve", **request(work=work, until="", releases=None))
            with folder.record_file.open("ab") as file:
                file.write(forged.path.read_bytes().splitlines(keepends=True)[-1])
        said, body = ask(folder)
        assert (said["ok"], body) == (False, b"")
        assert said["code"] == ("approval" if kind in ("of another work", "expired") else "ledger")
    assert nodes.rows(folder) == []


def request(**more: Any) -> dict[str, Any]:
    return {"work": "ab" * 32, "content": {}, **more}


@pytest.fixture
def files(tmp_path: Path) -> Record:
    record = Record(tmp_path / "r", tmp_path / "w", "id", b"k" * 32)
    for kind in ("request", "deny", "pause"):
        record.append(kind, **request())
    return record


def reopened(record: Record, key: bytes = b"k" * 32, identity: str = "id") -> Record:
    return Record(record.path, record._witness, identity, key)


def test_hostile_rows_are_refused(files: Record):
    """Edited, removed, replayed, forged and older rows, and another node's."""
    content = files.path.read_bytes()
    first, second, third = content.splitlines(keepends=True)
    for changed in (
        content.replace(b'"deny"', b'"approve"'), first + third, content + second,
        first + second, b"", second + first + third, content + b"{}\n", content + b"null\n",
    ):  # fmt: skip
        files.path.write_bytes(changed)
        with pytest.raises(LedgerError):
            reopened(files)
    files.path.write_bytes(content)
    for key, identity in ((b"x" * 32, "id"), (b"k" * 32, "other")):
        with pytest.raises(LedgerError):
            reopened(files, key, identity)
    files._witness.unlink()
    with pytest.raises(LedgerError, match="witness"):
        reopened(files)


def test_a_row_whose_writer_was_killed_has_no_effect(files: Record):
    with files.path.open("ab") as file:
        file.write(b'{"kind":"resume"')
    record = reopened(files)
    assert record.paused is not None
    record.append("resume")
    files.refresh()  # another process
    assert files.paused is reopened(files).paused is None


def test_an_expired_approval_ends(files: Record):
    today = datetime.now(UTC).date()
    for day, state in ((today, "approved"), (today - timedelta(days=1), "expired")):
        files.append("approve", **request(until=day.isoformat(), releases=None))
        assert files.state("ab" * 32) == state
    with pytest.raises(LedgerError, match="8 digits"):
        files.find("ab")
    with pytest.raises(LedgerError, match="0 requests"):
        files.find("cd" * 32)


def test_refusals_are_recorded_once_a_day_and_not_without_limit(files: Record):
    for number in range(300):
        files.refuse("work", f"reason {number // 2}", "", "run")
    assert len(files.rows) == 103


def test_the_commands_of_the_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (policy,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    assert tomllib.loads(policy) == {"ask": {"approval": "operator"}}
    folder = careful(tmp_path / "node")
    commands = re.findall(r"^    fedlgm node (.*)$", PAGE, re.MULTILINE)
    with NodeProcess(folder):
        ask(folder)
        (work,) = waiting(folder)
        for command in commands:
            here = command.replace("/srv/node/service", str(folder.path)).replace("DIGEST", work)
            assert run(*shlex.split(here)) or "report" in here
            assert ask(folder)[0].get("code") != "failed"
    assert len(commands) == 10
    assert "no agreement" in (tmp_path / "report.html").read_text()


def test_a_charge_before_a_crash_counts_once_it_is_released(tmp_path):
    """Else a crash between charge and record would let a work cost more than was approved."""
    folder = careful(tmp_path / "node")

    def crash() -> None:
        Approval.record_release = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore

    with NodeProcess(folder):
        ask(folder)
        (work,) = waiting(folder)
        run("approve", folder.path, work, "--epsilon", 2.2)
    with NodeProcess(folder, before=crash), pytest.raises(RunError):
        ask(folder)
    with NodeProcess(folder):
        assert run("verify", folder.path, "--json")["unrecorded"] == [1]
        assert ask(folder, round=2)[0]["ok"]
        assert "used up" in ask(folder)[0]["why"]


BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)


@pytest.mark.skipif(not BROWSER, reason="no headless browser is installed")
def test_a_browser_shows_the_report_on_a_narrow_screen(tmp_path):
    """It is read as a person would: its text is shown, and the page is not wider than the screen."""
    folder = make_node(tmp_path / "node")
    with NodeProcess(folder):
        assert ask(folder)[0]["ok"]
    file = tmp_path / "report.html"
    run("report", folder.path, "--output", file)
    measure = "<script>document.title=document.documentElement.scrollWidth</script></html>"
    file.write_text(file.read_text().replace("</html>", measure))
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--window-size=390,844",
         f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", file.as_uri()],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    (width,) = re.findall(r"<title>(\d+)</title>", done.stdout)
    assert int(width) <= 500  # a browser without a screen has a least width of its own
    assert "1 release spent an epsilon of" in done.stdout
