"""The node's ledger: every row on disk before it counts, every change noticed."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from fedlgm.errors import LedgerError
from fedlgm.privacy import DpEvent, composed_epsilon
from fedlgm.privacy.events import gaussian_event, laplace_event, repeat_event
from fedlgm_nodes.service import ledger
from fedlgm_nodes.service.ledger import NodeLedger
from fedlgm_nodes.service.row import CLIENT, EXAMPLE

EVENT = gaussian_event(2.0)


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    found = tmp_path / "ledger.sqlite", tmp_path / "seen.json"
    NodeLedger.create(*found, "hearts")
    return found


def charge(ledger: NodeLedger, *names: str) -> None:
    for name in names:
        ledger.charge(name, EVENT, trust="local", run="run", round=1, data="d", protects=CLIENT)


def test_what_was_charged_is_there_and_chained(paths):
    with NodeLedger(*paths, "hearts") as ledger:
        charge(ledger, "a", "b", "c")
        assert [row.seq for row in ledger.rows()] == [1, 2, 3]
        assert ledger.find("b").seq == 2
        assert ledger.find("x") is None
        assert ledger.head_at(0) == ledger.identity
        assert ledger.head_at(3) == ledger.head
        assert ledger.head_at(4) is None
        assert json.loads(paths[1].read_text()) == {
            "ledger": ledger.identity,
            "seq": 3,
            "head": ledger.head,
            "agreed": 0,
        }
        assert ledger.count(run="run") == 3
        assert ledger.count(run="other") == 0
        assert ledger.count(since="2000-01-01") == 3
        assert ledger.count(since="9000-01-01") == 0
        with pytest.raises(LedgerError):
            charge(ledger, "a")  # one release, one row
        assert ledger.seq == 3


def test_epsilon_is_that_of_the_composition(paths):
    laplace = laplace_event(0.5, 1.0, "replace-one")
    with NodeLedger(*paths) as ledger:
        assert ledger.epsilon(1e-5, CLIENT) == 0
        assert ledger.epsilon(1e-5, CLIENT, EVENT) == composed_epsilon([(EVENT, 1)], 1e-5)
        charge(ledger, "a", "b")
        ledger.charge("c", laplace, trust="local", run="run", round=1, data="d", protects=CLIENT)
        expected = composed_epsilon([(EVENT, 2), (laplace, 1)], 1e-5)
        assert ledger.epsilon(1e-5, CLIENT) == pytest.approx(expected, rel=1e-6)


def _sql(statement: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        with sqlite3.connect(path) as database:
            database.execute(statement)
        database.close()

    return change


@pytest.mark.parametrize(
    "statement",
    [
        'UPDATE releases SET event = \'{"type": "NoOpDpEvent"}\' WHERE seq = 2',
        "UPDATE releases SET run = 'x' WHERE seq = 1",
        "UPDATE releases SET round = 9 WHERE seq = 3",
        "UPDATE releases SET charged_at = '2000' WHERE seq = 3",
        "UPDATE releases SET request = 'z' WHERE seq = 3",
        "UPDATE releases SET head = 'z' WHERE seq = 3",
        "UPDATE releases SET protects = 'example, add-remove' WHERE seq = 3",
        "UPDATE releases SET protects = '' WHERE seq = 1",
        "DELETE FROM releases WHERE seq = 2",
        "DELETE FROM releases WHERE seq = 3",
        "DELETE FROM releases",
        "UPDATE meta SET value = 'x' WHERE key = 'ledger'",
        "UPDATE meta SET value = 'x' WHERE key = 'dataset'",
        "DELETE FROM meta",
        "DROP TABLE releases",
    ],
)
def test_every_edit_is_noticed(paths, statement):
    with NodeLedger(*paths) as ledger:
        charge(ledger, "a", "b", "c")
    _sql(statement)(paths[0])
    with pytest.raises(LedgerError):
        NodeLedger(*paths)
    with pytest.raises(LedgerError):
        NodeLedger(*paths, readonly=True)


@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(at=st.integers(0, 10**9), flip=st.integers(1, 255))
@example(at=224739164, flip=1)  # makes a text a blob
def test_a_damaged_file_is_refused_or_whole(tmp_path_factory, at, flip):
    folder = tmp_path_factory.mktemp("damaged")
    paths = folder / "ledger.sqlite", folder / "seen.json"
    NodeLedger.create(*paths, "hearts")
    with NodeLedger(*paths) as ledger:
        charge(ledger, "a", "b")
        rows = ledger.rows()
    data = bytearray(paths[0].read_bytes())
    data[at % len(data)] ^= flip
    paths[0].write_bytes(data)
    try:
        with NodeLedger(*paths) as ledger:
            assert ledger.rows() == rows
    except LedgerError:
        pass


def test_a_charge_without_its_witness_is_caught_up(paths):
    with NodeLedger(*paths) as ledger:
        charge(ledger, "a")
        before = paths[1].read_bytes()
        charge(ledger, "b")
    paths[1].write_bytes(before)
    with NodeLedger(*paths) as ledger:
        assert ledger.seq == 2
    assert json.loads(paths[1].read_text())["seq"] == 2


def test_a_witness_of_rows_that_are_not_there(paths):
    with NodeLedger(*paths) as ledger:
        charge(ledger, "a", "b")
    seen = json.loads(paths[1].read_text())
    paths[1].write_text(json.dumps(seen | {"head": "0" * 64}))
    with pytest.raises(LedgerError, match="rows were replaced"):
        NodeLedger(*paths)
    paths[1].write_text(json.dumps(seen | {"seq": 9}))
    with pytest.raises(LedgerError, match=r"rolled back: it has 2 releases, but its witness saw 9"):
        NodeLedger(*paths)
    for damaged in ("", "[]", '{"seq": "9"}'):
        paths[1].write_text(damaged)
        with pytest.raises(LedgerError, match="witness"):
            NodeLedger(*paths)


def test_the_ledger_belongs_to_its_data_set(paths):
    with pytest.raises(LedgerError, match="another data set needs its own node folder"):
        NodeLedger(*paths, "lungs")


def test_a_ledger_is_made_once(paths):
    with pytest.raises(LedgerError, match="made once"):
        NodeLedger.create(*paths, "hearts")


def test_one_process_at_a_time_charges_and_any_number_reads(paths):
    with NodeLedger(*paths) as ledger:
        with pytest.raises(LedgerError, match="another process holds"):
            NodeLedger(*paths)
        charge(ledger, "a")
        with NodeLedger(*paths, readonly=True) as reader:
            assert reader.seq == 1


def test_a_test_ledger_stays_one(tmp_path):
    paths = tmp_path / "ledger.sqlite", tmp_path / "seen.json"
    NodeLedger.create(*paths, "hearts", test=True)
    with NodeLedger(*paths) as ledger:
        assert ledger.test


def test_a_full_disk_charges_nothing(paths, monkeypatch):
    with NodeLedger(*paths) as ledger:
        charge(ledger, "a")
        ledger._db.execute(
            f"PRAGMA max_page_count = {ledger._db.execute('PRAGMA page_count').fetchone()[0]}"
        )
        with pytest.raises(LedgerError, match="full"):
            charge(ledger, *(f"n{number}" for number in range(1000)))
        seq, head = ledger.seq, ledger.head
    with NodeLedger(*paths) as ledger:
        assert (ledger.seq, ledger.head) == (seq, head)


class TestWhatRowsProtect:
    """Unit and relation are in the row and in its hash; costs of unlike rows add up only where that
    is proven."""

    def test_a_release_that_protects_all_of_the_data_protects_an_example_too(self, paths):
        with NodeLedger(*paths) as ledger:
            charge(ledger, "a")
            ledger.charge("b", EVENT, trust="local", run="run", round=2, data="d", protects=EXAMPLE)
            assert [row.protects for row in ledger.rows()] == [CLIENT, EXAMPLE]
            assert ledger.epsilon(1e-5, EXAMPLE) == composed_epsilon([(EVENT, 2)], 1e-5)

    def test_and_not_the_other_way_round(self, paths):
        with NodeLedger(*paths) as ledger:
            charge(ledger, "a")
            assert ledger.epsilon(1e-5, CLIENT) > 0
            ledger.charge("b", EVENT, trust="local", run="run", round=2, data="d", protects=EXAMPLE)
            with pytest.raises(
                LedgerError,
                match=r"protect \(example, add-remove\).* keep privacy.unit = 'example'",
            ):
                ledger.epsilon(1e-5, CLIENT)

    @pytest.mark.parametrize("protects", ["", "client, add-remove", "household"])
    def test_a_row_that_says_something_else_is_refused(self, paths, protects):
        with NodeLedger(*paths) as ledger:
            with pytest.raises(
                LedgerError, match="known: client, replace-one, example, add-remove"
            ):
                ledger.charge(
                    "a", EVENT, trust="local", run="run", round=1, data="d", protects=protects
                )
            assert ledger.rows() == []

    @pytest.mark.parametrize("readonly", [True, False])
    def test_a_ledger_without_it_is_refused(self, paths, readonly):
        NodeLedger(*paths).close()
        with sqlite3.connect(paths[0]) as database:
            database.execute("ALTER TABLE releases DROP COLUMN protects")
        database.close()
        with pytest.raises(LedgerError, match="cannot be used: no such column: protects"):
            NodeLedger(*paths, readonly=readonly)


def test_removing_a_lock_file_lets_no_second_process_in(paths):
    """The database itself is locked: there is nothing beside it that could be removed."""
    with NodeLedger(*paths):
        for file in paths[0].parent.glob("*lock*"):
            file.unlink()
        code = (
            "import sys; from pathlib import Path; from fedlgm_nodes.service.ledger import "
            "NodeLedger; NodeLedger(Path(sys.argv[1]), Path(sys.argv[2]))"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, *map(str, paths)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert "another process holds the ledger" in done.stderr
        other = paths[0].with_name("link.sqlite")
        other.hardlink_to(paths[0])
        with pytest.raises(LedgerError, match="another process holds"):
            NodeLedger(other, paths[1])
    with NodeLedger(*paths) as ledger:
        charge(ledger, "a")


def test_a_long_ledger_of_many_plans_does_not_slow_a_charge(paths, monkeypatch):
    """10,000 releases of 100 distinct example-level plans."""
    monkeypatch.setattr(ledger, "write_witness", lambda *_: None)  # its disk is not what is timed

    def cost(plan: int) -> DpEvent:
        step = gaussian_event(2.0 + plan / 50, 1e-3 + plan * 1e-5)
        return repeat_event(step, 5 + plan % 7)

    def charge(opened: NodeLedger, number: int) -> None:
        opened.charge(
            f"{number:064x}", cost(number % 100), trust="local", run="r", round=number, data="d",
            protects=EXAMPLE,
        )  # fmt: skip

    with NodeLedger(*paths) as opened:
        opened._db.execute("PRAGMA synchronous = OFF")
        for number in range(10_000):
            charge(opened, number)
        opened.epsilon(1e-5, EXAMPLE, cost(0))  # the service does so when it starts
        seconds = []
        for number in (10_003, 10_050, 10_097):
            started = time.process_time()
            assert opened.find(f"{number:064x}") is None
            assert opened.epsilon(1e-5, EXAMPLE, cost(number % 100)) < 8
            charge(opened, number)
            opened.epsilon(1e-5, EXAMPLE)
            seconds.append(time.process_time() - started)
    assert max(seconds) < 0.15, seconds
