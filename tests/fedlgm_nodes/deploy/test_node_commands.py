"""`fedlgm node`: what an operator types, and what it says."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import psutil
import pytest
from patience import wait_until
from typer.testing import CliRunner, Result

from fedlgm.errors import ConfigError, DataError, LedgerError, RunError
from fedlgm_nodes.deploy.node_commands import app
from fedlgm_nodes.protocol import frames
from fedlgm_nodes.service.folder import NodeFolder
from tests.support import nodes
from tests.support.nodes import NodeProcess, ask, make_node, served


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(app, [str(one) for one in arguments])


def test_init_states_at_how_many_nodes_a_person_has_rows(tmp_path):
    assert run("init", tmp_path / "a", "--overlap", 3).exit_code == 0
    assert NodeFolder(tmp_path / "a").policy().privacy.overlap == 3
    wrong = run("init", tmp_path / "b", "--overlap", 0)
    assert wrong.exit_code == 2
    assert not (tmp_path / "b").exists()


def test_init_writes_a_policy_for_the_data_it_is_given(tmp_path):
    from PIL import Image

    np.savez(tmp_path / "d.npz", x=np.zeros((2, 3)), y=np.zeros(2))
    for name in ("x-ubyte", "y-ubyte"):
        (tmp_path / name).touch()
    rows = pandas.DataFrame({"age": [52, 61, 40], "ill": [2, 0, 1]})
    rows.to_parquet(tmp_path / "d.parquet")
    rows.assign(ill=["yes", "no", "yes"]).to_csv(tmp_path / "d.csv", index=False)
    rows.assign(ill=[0.5, 1.5, 2.0]).to_csv(tmp_path / "dose.csv", index=False)
    public = pandas.DataFrame({"age": [20.0, 60.0], "ill": ["no", "yes"]})
    public.to_csv(tmp_path / "public.csv", index=False)
    for name in ("benign", "malignant"):
        (tmp_path / "scans" / name).mkdir(parents=True)
        Image.fromarray(np.zeros((4, 4), np.uint8)).save(tmp_path / "scans" / name / "a.png")
    cases = {
        "plain": ([], {"kind": "numpy", "path": "data.npz"}),
        "numpy": (
            ["--data", tmp_path / "d.npz", "--shape", "3", "--classes", 1],
            {"kind": "numpy", "classes": 1},
        ),
        "images": (
            ["--data", tmp_path / "scans", "--shape", "1,4,4"],
            {"kind": "images", "class_names": ("benign", "malignant"), "classes": 2},
        ),
        "pictures": (["--data", tmp_path / "scans"], {"shape": (3, 64, 64)}),
        "csv": (
            ["--data", tmp_path / "d.csv", "--target", "ill"],
            {"kind": "csv", "labels": "ill", "features": ("age",), "class_names": ("no", "yes")}
            | {"classes": 2, "shape": (1,), "standardise": {}},
        ),
        "public": (
            ["--data", tmp_path / "d.csv", "--target", "ill", "--test", tmp_path / "public.csv"],
            {"class_names": ("no", "yes"), "standardise": {"age": (40.0, 20.0)}},
        ),
        "dose": (["--data", tmp_path / "dose.csv", "--target", "ill"], {"classes": 1}),
        "idx": (
            ["--data", tmp_path / "x-ubyte", "--labels", tmp_path / "y-ubyte"],
            {"kind": "idx"},
        ),
        "parquet": (
            ["--data", tmp_path / "d.parquet", "--labels", "ill"],
            {"kind": "parquet", "labels": "ill", "classes": 3, "class_names": ()},
        ),
        "loader": (["--kind", "loader", "--data", "package.module:load"], {"kind": "loader"}),
    }
    for name, (arguments, expected) in cases.items():
        done = run(
            "init", tmp_path / name, *arguments, "--client", 2, "--population", 5, "--epsilon", 3
        )
        assert done.exit_code == 0, (name, done.output, done.exception)
        policy = NodeFolder(tmp_path / name).policy()
        assert (policy.node.client, policy.node.population, policy.privacy.epsilon) == (2, 5, 3.0)
        assert {key: getattr(policy.data, key) for key in expected} == expected
    done = run("init", tmp_path / "examples", "--unit", "example")
    policy = NodeFolder(tmp_path / "examples").policy()
    assert policy.privacy.unit == "example"
    assert {"dp-sgd", "snr-consistent"} <= set(policy.allow.mechanisms)
    assert run("init", tmp_path / "wrong", "--unit", "household").exit_code != 0
    said = run("init", tmp_path / "again", "--json")
    assert (
        json.loads(said.stdout)["service_key"]
        == NodeFolder(tmp_path / "again").public()["service_key"]
    )
    assert isinstance(run("init", tmp_path / "again").exception, RunError)


def test_a_table_is_read_before_a_folder_is_made(tmp_path):
    table, public = tmp_path / "d.csv", tmp_path / "public.csv"
    table.write_text("age,site,ill\n52,a,yes\n61,b,no\n")
    public.write_text("age,site,ill\n52,1,yes\n61,2,maybe\n")
    for options, words in (
        ((), "--target: name the column"),
        (("--target", "il"), "no column 'il'; did you mean 'ill'"),
        (("--target", "ill"), "column 'site' holds text, not numbers"),
        (("--target", "ill", "--test", public), "column 'site' holds text, not numbers"),
        (("--target", "ill", "--test", tmp_path / "none.csv"), "there is no file"),
        (("--target", "age"), "column 'site' holds text, not numbers"),
    ):
        said = run("init", tmp_path / "node", "--data", table, *options)
        assert isinstance(said.exception, ConfigError | DataError), (options, said.exception)
        assert words in str(said.exception)
    table.write_text("age,ill\n52,yes\n61,no\n")
    public.write_text("age,ill\n52,yes\n61,maybe\n")
    said = run("init", tmp_path / "node", "--data", table, "--target", "ill", "--test", public)
    assert "1 targets in column 'ill', the first in row 1" in str(said.exception)
    table.write_text("age,ill\n52,0\n61,2\n")
    public.write_text("age,ill\n52,0\n61,1\n")
    said = run("init", tmp_path / "node", "--data", table, "--target", "ill", "--test", public)
    assert "labels must be whole numbers in [0, 2)" in str(said.exception)
    assert not (tmp_path / "node").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--shape", "8x8"), "--shape takes sizes such as 64 or 1,28,28, got '8x8'"),
        (("--shape", "(64,)"), "--shape takes sizes such as 64 or 1,28,28, got '(64,)'"),
        (("--client", 5, "--population", 3), "client = 5 must be below population = 3"),
        (("--data", "nothere.npz"), "--data: there is nothing at nothere.npz"),
        (("--data", __file__), "test_node_commands.py is not .npz, .npy, .csv, .parquet, IDX"),
        (
            ("--data", __file__, "--kind", "idx", "--labels", "nothere"),
            "--labels: there is no file nothere",
        ),
        (("--name", "St. Mary"), "must be at most 64 letters, digits, '_', '.' and '-'"),
    ],
)
def test_a_folder_is_not_made_from_a_mistake(tmp_path, options, words):
    said = run("init", tmp_path / "node", *options)
    assert isinstance(said.exception, ConfigError)
    assert words in str(said.exception)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            RunError("it cannot be reached: Permission denied"),
            "not answering: it cannot be reached: Permission denied\n",
        ),
        (
            {"ok": False, "code": "ledger", "why": "its ledger cannot be used"},
            "refuses (ledger): its ledger cannot be",
        ),
    ],
)
def test_a_service_that_was_started_is_not_to_be_started(tmp_path, monkeypatch, answer, words):
    def exchange(*given: Any, **options: Any) -> Any:
        if isinstance(answer, RunError):
            raise answer
        return answer, b""

    monkeypatch.setattr(frames, "exchange", exchange)
    found = run("status", make_node(tmp_path / "node").path)
    assert found.exit_code == 1
    assert words in found.stdout
    assert "start it" not in found.stdout


def test_status_and_ledger(tmp_path):
    folder = make_node(tmp_path / "node")
    assert run("status", folder.path).exit_code == 1
    with socket.socket(socket.AF_UNIX) as killed:  # a service that is killed leaves its socket
        killed.bind(str(folder.socket))
    said = run("status", folder.path).stdout
    assert "not answering: the release service at " in said
    assert (
        "cannot be reached: Connection refused; see its log, or start it: fedlgm node serve" in said
    )
    folder.socket.unlink()
    with served(folder):
        ask(folder)
        ask(folder, round=2)
        said = run("status", folder.path)
        assert said.exit_code == 0
        assert "998 releases left" in said.stdout
        while_serving = json.loads(run("ledger", folder.path, "--json").stdout)
    report = json.loads(run("ledger", folder.path, "--json").stdout)
    assert report == while_serving
    assert (report["releases"], report["runs"], report["trust"]) == (2, {"run": 2}, ["local"])
    assert report["epsilon_spent"] + report["epsilon_left"] == pytest.approx(8.0)
    assert (report["unit"], report["relation"]) == ("client", "replace-one")
    table = run("ledger", folder.path)
    assert f"of 8 spent at delta 1e-05, {8 - report['epsilon_spent']:.4g} left" in table.stdout
    assert "NOT PRIVATE" not in table.stdout
    assert "DpEvent" not in table.stdout
    assert "Gaussian" in table.stdout


@pytest.mark.parametrize("label", ["[/]", "[red]x", "x\x1b[2J\nepsilon 0 of 8 spent"])
def test_a_strangers_label_of_a_run_does_nothing_to_the_terminal(tmp_path, label):
    folder = make_node(tmp_path / "node")
    with served(folder):
        assert ask(folder, run=label)[0]["ok"]
    said = run("ledger", folder.path)
    assert said.exit_code == 0, said.exception
    assert "\x1b" not in said.stdout
    assert not any(line.startswith("epsilon 0 ") for line in said.stdout.splitlines())
    if label.startswith("["):
        assert label in said.stdout


def test_a_test_node_says_so(tmp_path):
    folder = make_node(tmp_path / "node", test_seed=3)
    with served(folder):
        assert ask(folder)[0]["test"]
        assert "NOT PRIVATE" in run("status", folder.path).stdout
    assert "NOT PRIVATE" in run("ledger", folder.path).stdout


def test_what_is_wrong(tmp_path):
    assert isinstance(run("status", tmp_path).exception, RunError)
    folder = make_node(tmp_path / "node")
    nodes.edit(folder, "epsilon = 8.0", "epsilon = -1.0")
    assert isinstance(run("ledger", folder.path).exception, ConfigError)
    assert isinstance(run("serve", folder.path).exception, ConfigError)
    folder = make_node(tmp_path / "other")
    folder.witness_file.unlink()
    assert isinstance(run("ledger", folder.path).exception, LedgerError)
    (tmp_path / "empty.npz").unlink(missing_ok=True)


def test_serve_refuses_missing_data(tmp_path: Path):
    from fedlgm.errors import DataError

    folder = NodeFolder.create(tmp_path / "node")
    assert isinstance(run("serve", folder.path).exception, DataError)


def test_status_names_a_service_that_a_signal_has_stopped(tmp_path):
    """It waited for a minute, and named no process."""
    with NodeProcess(make_node(tmp_path / "node")) as service:
        os.kill(service.pid, signal.SIGSTOP)
        wait_until(lambda: psutil.Process(service.pid).status() == psutil.STATUS_STOPPED)
        begun = time.monotonic()
        said = run("status", service.folder.path)
        assert time.monotonic() - begun < 30
        os.kill(service.pid, signal.SIGCONT)
        assert said.exit_code == 1
        assert (
            f"the release service (process {service.pid}) is stopped by a signal: `kill -CONT"
            in said.stdout
        )
        assert run("status", service.folder.path).exit_code == 0


def test_a_tilde_is_the_users_home_where_no_shell_says_so(tmp_path, monkeypatch):
    """A folder of the name ~ was created."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    assert run("init", "~/node").exit_code == 0
    assert run("ledger", "~/node").exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["home"]
