"""Older, other and edited ledgers are refused by a node's service."""

from __future__ import annotations

import shutil
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from fedlgm.privacy.events import laplace_event
from fedlgm_nodes.service.folder import NodeFolder
from fedlgm_nodes.service.ledger import NodeLedger
from fedlgm_nodes.service.row import CLIENT
from fedlgm_nodes.service.service import Service
from tests.support import nodes
from tests.support.nodes import NodeProcess, ask, edit, hello, make_node, refused, rows, served


def test_an_older_ledger_is_refused(tmp_path):
    folder = make_node(tmp_path / "node")
    with served(folder):
        ask(folder)
    older = folder.ledger_file.read_bytes()
    with served(folder):
        ask(folder, round=2)
    folder.ledger_file.write_bytes(older)
    assert "rolled back: it has 1 releases, but its witness saw 2" in refused(folder)


def test_an_older_ledger_beside_a_log_that_a_crash_left_loses_nothing(tmp_path):
    folder = make_node(tmp_path / "node")
    older = folder.ledger_file.read_bytes()
    process = NodeProcess(folder)
    ask(folder)
    ask(folder, round=2)
    process.kill()
    assert folder.ledger_file.with_name("ledger.sqlite-wal").exists()
    folder.ledger_file.write_bytes(older)
    said = ""
    try:
        process = NodeProcess(folder)
    except AssertionError as error:
        said = str(error)
    else:
        process.stop()
    assert "rolled back" in said or "cannot be used" in said or len(rows(folder)) == 2


def test_another_nodes_ledger_is_refused(tmp_path):
    folder, other = make_node(tmp_path / "node"), make_node(tmp_path / "other")
    folder.ledger_file.write_bytes(other.ledger_file.read_bytes())
    assert "was replaced" in refused(folder)


def test_ledger_and_witness_restored_together_are_refused_once_the_server_says_what_it_saw(
    tmp_path,
):
    folder = make_node(tmp_path / "node")
    with served(folder):
        ask(folder)
    shutil.copytree(folder.path, tmp_path / "snapshot")
    with served(folder):
        seen = ask(folder, round=2)[0]["position"]
    shutil.rmtree(folder.path)
    shutil.copytree(tmp_path / "snapshot", folder.path)
    with served(folder):
        assert ask(folder, round=3, expect=seen)[0]["code"] == "rolled-back"
        assert ask(folder, round=3)[0]["code"] == "rolled-back"  # from then on, whoever asks
    assert "rolled back" in refused(folder)  # and after a restart


def test_a_restored_ledger_that_has_grown_since_is_refused_after_a_restart_too(tmp_path):
    """Whoever may ask can make it longer than what was signed before anybody says what that was."""
    folder = make_node(tmp_path / "node")
    shutil.copytree(folder.path, tmp_path / "snapshot")
    with served(folder):
        seen = ask(folder)[0]["position"]
    shutil.copytree(folder.path, tmp_path / "right")
    shutil.rmtree(folder.path)
    shutil.copytree(tmp_path / "snapshot", folder.path)
    with served(folder):
        assert [ask(folder, round=round_)[0]["ok"] for round_ in (2, 3)] == [True, True]
        assert ask(folder, round=4, expect=seen)[0]["code"] == "rolled-back"
    assert "rows were replaced" in refused(folder)
    shutil.rmtree(folder.path / "state")  # the right ledger is taken back by the same witness
    shutil.copytree(tmp_path / "right" / "state", folder.path / "state")
    with served(folder):
        assert ask(folder, round=4, expect=seen)[0]["ok"]


def test_an_exchanged_ledger_is_refused_after_a_restart_too(tmp_path):
    """Another ledger with its own witness, as a folder made anew around the old keys has."""
    folder, other = make_node(tmp_path / "node"), make_node(tmp_path / "other")
    with served(folder):
        seen = ask(folder)[0]["position"]
    for file in ("ledger_file", "witness_file"):
        getattr(folder, file).write_bytes(getattr(other, file).read_bytes())
    assert "the noise key" in refused(folder)  # which was made for the ledger that is gone
    (folder.path / "state/noise.key").unlink()
    assert "record" in refused(folder)  # whose chain starts from the ledger that is gone
    for file in (folder.record_file, folder.record_witness):
        file.unlink()
    with served(folder):
        assert ask(folder, round=2, expect=seen)[0]["code"] == "rolled-back"
    assert "was replaced" in refused(folder)


def test_a_question_that_waits_while_a_rollback_is_found_out_is_refused(tmp_path):
    folder = make_node(tmp_path / "node")
    shutil.copytree(folder.path, tmp_path / "snapshot")
    with served(folder):
        seen = ask(folder)[0]["position"]
    shutil.rmtree(folder.path)
    shutil.copytree(tmp_path / "snapshot", folder.path)

    def slow() -> None:
        admit = Service.admit
        Service.admit = lambda *given: (time.sleep(0.5), admit(*given))[1]

    with NodeProcess(folder, before=slow), ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask, folder, round=3, expect=seen)
        time.sleep(0.2)
        second = pool.submit(ask, folder, round=4)
        assert first.result()[0]["code"] == "rolled-back"
        assert second.result()[0].get("code") == "rolled-back"


def test_after_a_full_disk_the_service_ends_so_that_the_next_start_verifies_its_ledger(tmp_path):
    """It stayed alive and refused everything for good, although space was free again."""
    folder = make_node(tmp_path / "node")

    def full() -> None:
        def charge(ledger: NodeLedger, *given: object, **more: object) -> None:
            with ledger._translate_errors():
                raise sqlite3.OperationalError("database or disk is full")

        NodeLedger.charge = charge

    node = NodeProcess(folder, before=full)
    with node:
        answer = ask(folder)[0]
        assert (answer["code"], answer["why"]) == (
            "ledger",
            "its ledger cannot be used: the service ends, see its log",
        )
        node.wait()
        assert "database or disk is full" in node.log.read_text()
    assert rows(folder) == []
    with served(folder):
        assert ask(folder)[0]["ok"]


def test_a_ledger_is_used_by_one_service(node):
    sock = node.socket.stat().st_ino
    copy = NodeFolder(node.path)
    process = nodes._fork.Process(
        target=nodes._serve, args=(copy, node.path.with_name("second.log"), None)
    )
    process.start()
    process.join(30)
    assert "another process holds the ledger" in node.path.with_name("second.log").read_text()
    assert node.socket.stat().st_ino == sock
    assert hello(node)["ok"]


def test_a_second_service_does_not_take_the_socket_of_one_whose_ledger_was_replaced(tmp_path):
    """Each would hold the lock of its own file, and the first one could not be asked any more."""
    folder = make_node(tmp_path / "node")
    with served(folder):
        copy = folder.ledger_file.with_name("restored")
        shutil.copyfile(folder.ledger_file, copy)
        copy.replace(folder.ledger_file)
        log = tmp_path / "second.log"
        process = nodes._fork.Process(target=nodes._serve, args=(folder, log, None))
        process.start()
        process.join(30)
        assert "another service listens at" in log.read_text()
        assert not ask(folder)[0]["ok"]  # the first service answers still, and charges nothing


def test_an_edited_cost_is_refused(tmp_path):
    folder = make_node(tmp_path / "node")
    with served(folder):
        ask(folder)
    with sqlite3.connect(folder.ledger_file) as database:
        database.execute("UPDATE releases SET event = replace(event, '2', '9')")
    database.close()
    assert "was changed" in refused(folder)


@pytest.mark.parametrize("gone", ["ledger_file", "witness_file"])
def test_a_missing_file_is_refused(tmp_path, gone):
    folder = make_node(tmp_path / "node")
    getattr(folder, gone).unlink()
    assert "is gone" in refused(folder)


def test_a_ledger_that_no_finite_epsilon_covers_is_told(tmp_path):
    """At another delta than the one that it was charged under; Renyi orders do not cover this
    event."""
    folder = make_node(tmp_path / "node")
    with folder.ledger() as ledger:
        ledger.charge(
            "x",
            laplace_event(0.5, 0.5, "replace-one"),
            trust="local",
            run="run",
            round=1,
            data="d",
            protects=CLIENT,
        )
    edit(folder, "delta = 1e-05", "delta = 1e-20")
    with served(folder):
        said = hello(folder)
        assert (said["code"], said["why"]) == (
            "budget-spent",
            "what was released has no finite epsilon at delta 1e-20",
        )
        assert ask(folder)[0]["code"] == "budget-spent"


@pytest.mark.parametrize("replace", [True, False], ids=["replaced", "removed"])
def test_a_ledger_whose_file_was_replaced_is_not_charged(tmp_path, replace):
    """The lock follows the file: a second service could lock and charge a backup that was restored
    in its place."""
    folder = make_node(tmp_path / "node")
    backup = folder.ledger_file.read_bytes()
    with served(folder):
        folder.ledger_file.unlink()
        if replace:
            folder.ledger_file.write_bytes(backup)
        assert ask(folder)[0]["code"] == "ledger"
    if replace:
        assert rows(folder) == []
