"""Ledgers that somebody changed: every edit, deletion, reordering and older copy is noticed."""

from __future__ import annotations

import errno
import itertools
import shutil
import sqlite3
import tomllib
from pathlib import Path

import pytest
import tomli_w
from hypothesis import given, settings
from hypothesis import strategies as st

from fedlgm.errors import FedlgmError, LedgerError
from fedlgm.privacy import ledger_file
from fedlgm.privacy.chain import digest
from fedlgm.privacy.charge import Head
from fedlgm.privacy.events import gaussian_event
from fedlgm.privacy.ledger import SERVER, Ledger
from simulations import launch
from simulations.runs.folder import RunFolder
from simulations.summaries.ledgers import ledger_report

EVENT = gaussian_event(2.0, 0.5)
COLUMNS = ("number", "round", "client", "key", "event", "claim", "head")


@pytest.fixture
def charged(tmp_path) -> tuple[Path, Head]:
    """A ledger of five rounds, and its head."""
    path = tmp_path / "ledger.sqlite"
    with Ledger(path, "a run") as ledger:
        for round_ in range(1, 6):
            ledger.charge(EVENT, round=round_, key=f"noise {round_}", claim={"epsilon": 0.5})
        return path, ledger.head()


def sql(path: Path, *statements: str) -> None:
    with sqlite3.connect(path) as db:
        for statement in statements:
            db.execute(statement)
    db.close()


def check(path: Path, *anchors: Head, owner: str | None = "a run", contiguous: bool = True) -> Head:
    with Ledger(path) as ledger:
        return ledger.verify(anchors, owner=owner, contiguous=contiguous)


def test_an_untouched_ledger_is_whole(charged):
    path, head = charged
    assert check(path, head) == head
    assert head.rows == 5
    assert Head.parse(str(head)) == head


EDITS = {
    "round": "99",
    "client": "7",
    "key": "'other'",
    "event": '\'{"type": "NoOpDpEvent"}\'',
    "claim": "'{}'",
    "head": "'0'",
    "number": "77",
}


@pytest.mark.parametrize("row", [1, 3, 5])
@pytest.mark.parametrize("column", EDITS)
def test_every_edit_of_one_row_is_noticed(charged, row, column):
    path, head = charged
    sql(path, f"UPDATE charges SET {column} = {EDITS[column]} WHERE number = {row}")
    with pytest.raises(LedgerError, match="was changed"):
        check(path)
    with pytest.raises(LedgerError, match="was changed"):
        check(path, head, owner=None, contiguous=False)


@pytest.mark.parametrize("row", [1, 2, 4])
def test_a_deleted_row_is_noticed_without_any_anchor(charged, row):
    path, _ = charged
    sql(path, f"DELETE FROM charges WHERE number = {row}")
    with pytest.raises(LedgerError, match="was changed"):
        check(path)


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_rows_cut_off_the_end_are_noticed_by_whoever_kept_a_head(charged, rows):
    path, head = charged
    sql(path, f"DELETE FROM charges WHERE number > {5 - rows}")
    check(path)  # what is left is a whole ledger: only a head that was kept tells
    with pytest.raises(
        LedgerError, match=f"shows {5 - rows} releases, but there were 5 .*rows were deleted"
    ):
        check(path, head)


@pytest.mark.parametrize(("one", "other"), itertools.combinations(range(1, 6), 2))
def test_two_rows_that_change_places_are_noticed(charged, one, other):
    path, _ = charged
    sql(
        path,
        f"UPDATE charges SET number = 0 WHERE number = {one}",
        f"UPDATE charges SET number = {one} WHERE number = {other}",
        f"UPDATE charges SET number = {other} WHERE number = 0",
    )
    with pytest.raises(LedgerError, match=f"was changed: row {one}"):
        check(path)


def rebuilt(path: Path, kept: list[int]) -> Head:
    """Keep some rows and compute all hashes anew, as an attacker who knows the format would."""
    db = sqlite3.connect(path)
    rows = db.execute(f"SELECT {', '.join(COLUMNS[1:6])} FROM charges ORDER BY number").fetchall()
    (owner,) = db.execute("SELECT value FROM meta WHERE key = 'owner'").fetchone()
    db.execute("DELETE FROM charges")
    head = digest("", owner)
    for number, row in enumerate((rows[i] for i in kept), start=1):
        head = digest(head, *map(str, row))
        marks = ",".join("?" * 7)
        db.execute(
            f"INSERT INTO charges ({', '.join(COLUMNS)}) VALUES ({marks})", (number, *row, head)
        )
    db.commit()
    db.close()
    return Head(len(kept), head)


@pytest.mark.parametrize("kept", [[0, 1, 2, 3], [1, 2, 3, 4], [0, 2, 4], [0, 1, 2, 4, 3], []])
def test_a_ledger_rebuilt_with_new_hashes_does_not_fit_a_kept_head(charged, kept):
    path, head = charged
    made = rebuilt(path, kept)
    assert check(path, owner=None, contiguous=False) == made  # by itself it looks whole
    with pytest.raises(LedgerError, match=r"was changed|rows were deleted"):
        check(path, head, owner=None, contiguous=False)


def test_a_round_that_is_missing_under_central_trust_is_noticed(charged):
    path, _ = charged
    rebuilt(path, [0, 1, 3, 4])
    with pytest.raises(
        LedgerError, match="no charge for round 3, though later rounds were released"
    ):
        check(path)


def test_a_ledger_of_another_recipe_is_noticed(charged):
    path, _ = charged
    with pytest.raises(LedgerError, match="does not belong to the recipe"):
        check(path, owner="another run")
    sql(path, "UPDATE meta SET value = 'another run'")
    with pytest.raises(LedgerError, match=r"was changed: row 1"):
        check(path, owner="another run")


def test_later_rows_do_not_disturb_earlier_heads(charged):
    path, head = charged
    with Ledger(path, "a run") as ledger:
        ledger.charge(EVENT, round=6, key="noise 6")
    assert check(path, head).rows == 6


@pytest.mark.parametrize("text", ["", "5", "five:abc", ":abc", "-1:abc", "5 abc"])
def test_what_is_no_head_is_refused(text):
    with pytest.raises(LedgerError, match="is not the head of a ledger"):
        Head.parse(text)


_ROWS = st.lists(st.lists(st.text(max_size=4), max_size=3), max_size=3)


@settings(max_examples=40)
@given(one=_ROWS, other=_ROWS)
def test_different_rows_have_different_heads(one, other):
    """Also where the fields read the same one after another: lengths are hashed."""

    def chained(rows):
        head = ""
        for row in rows:
            head = digest(head, *row)
        return head

    assert (chained(one) == chained(other)) == (one == other)


def charge_many(ledger: Ledger) -> None:
    for round_ in range(6, 500):
        ledger.charge(EVENT, round=round_, key="x" * 500)


class TestWhatIsWrongWithTheDisk:
    """A full disk can be helped by deleting files, a read-only one cannot: the message says which
    it is."""

    def test_full(self, charged):
        path, head = charged
        ledger = Ledger(path, "a run")
        (pages,) = ledger._db.execute("PRAGMA page_count").fetchone()
        ledger._db.execute(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(
            LedgerError, match="the disk is full and the ledger is whole: free some space"
        ):
            charge_many(ledger)
        ledger.close()
        assert (
            check(path, head).rows > 5
        )  # what was charged before stands, and nothing is half-written

    @pytest.mark.parametrize("kind", [errno.ENOSPC, errno.EDQUOT])
    def test_full_before_the_ledger_exists(self, tmp_path, monkeypatch, kind):
        """No empty file stays behind, which a later start would refuse as no ledger."""

        def full(*_):
            raise OSError(kind, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(ledger_file, "create_durably", full)
            with pytest.raises(
                LedgerError,
                match=r"cannot be created, and nothing was released: the disk .*; (free some space|delete files)",
            ):
                Ledger(tmp_path / "ledger.sqlite", "a run")
        assert list(tmp_path.iterdir()) == []
        Ledger(tmp_path / "ledger.sqlite", "a run").close()

    @pytest.mark.parametrize(
        ("free", "words"), [(0, "the disk is full"), (10**9, "the disk reports an error")]
    )
    def test_no_room_for_auxiliary_files(self, tmp_path, monkeypatch, free, words):
        """SQLite reports a full disk as an error of the disk where its shared memory does not
        fit."""
        monkeypatch.setattr(
            ledger_file.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 0, free)
        )
        error = sqlite3.OperationalError("disk I/O error")
        error.sqlite_errorcode = sqlite3.SQLITE_IOERR_SHMSIZE
        assert ledger_file.remedy(error, tmp_path / "ledger.sqlite").startswith(words)

    def test_read_only(self, charged):
        path, head = charged
        with Ledger(path, "a run") as ledger:
            ledger._db.execute("PRAGMA query_only = 1")
            with pytest.raises(LedgerError, match="read-only: make it writable"):
                ledger.charge(EVENT, round=6, key="noise 6")
            ledger._db.execute("PRAGMA query_only = 0")
        assert check(path) == head

    def test_no_folder(self, tmp_path):
        with pytest.raises(
            LedgerError, match="cannot be opened here: check that its folder exists"
        ):
            Ledger(tmp_path / "nowhere" / "ledger.sqlite", "a run")


# -- whole run folders -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> Path:
    """A finished run; tests work on copies."""
    from federations import tiny_values

    from simulations.config import recipe as recipes

    raw = tiny_values()
    raw["run"] = {"block_size": 10}  # no seed
    path = tmp_path_factory.mktemp("runs") / "run"
    launch.simulate(recipes.Recipe.model_validate(raw), run_dir=path)
    return path


@pytest.fixture
def run(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


class TestRunFolders:
    def test_a_finished_run_verifies(self, run):
        report = ledger_report(run)
        assert report["ledger_head"] == RunFolder(run).result()["ledger_head"]
        assert report["anchors"] == 3  # two checkpoints and the result

    def test_every_checkpoint_holds_the_head_it_was_written_at(self, run):
        counts = [head.rows for head in RunFolder(run).anchors()]
        assert counts[-1] == 3
        assert all(2 <= count <= 3 for count in counts)

    @pytest.mark.parametrize(
        "statement",
        [
            "DELETE FROM charges WHERE round = 2",
            "DELETE FROM charges WHERE round = 3",
            "DELETE FROM charges",
            'UPDATE charges SET event = \'{"type": "NoOpDpEvent"}\' WHERE round = 1',
            "UPDATE charges SET client = 5",
            "UPDATE meta SET value = 'x'",
        ],
    )
    def test_reports_refuse_a_changed_ledger(self, run, statement):
        """Such changes lowered the reported epsilon from 8.000 to 7.413, 5.766, 0.005 and 0 without
        a word."""
        sql(run / "ledger.sqlite", statement)
        with pytest.raises(LedgerError):
            ledger_report(run)
        (run / "result.json").unlink()
        with pytest.raises(LedgerError):
            launch.resume(run)

    @pytest.mark.parametrize("kept", [[0, 1], [1, 2], []])
    def test_reports_refuse_a_rebuilt_ledger(self, run, kept):
        rebuilt(run / "ledger.sqlite", kept)
        with pytest.raises(LedgerError):
            ledger_report(run)

    @pytest.mark.parametrize(
        ("section", "key", "value"),
        [
            ("privacy", "delta", 1e-2),
            ("privacy", "epsilon", 80.0),
            ("federation", "rate", 0.1),
            ("run", "seed", 1),
        ],
    )
    def test_reports_refuse_an_edited_recipe(self, run, section, key, value):
        file = run / "recipe.toml"
        raw = tomllib.loads(file.read_text())
        raw[section][key] = value
        file.write_text(tomli_w.dumps(raw))
        with pytest.raises(LedgerError, match="does not belong to the recipe beside it"):
            ledger_report(run)

    def test_a_ledger_of_another_run_of_the_same_recipe_is_refused(self, run, tmp_path):
        """Unseeded runs have other noise, so their rows have other hashes."""
        other = tmp_path / "other"
        launch.simulate(RunFolder(run).recipe(), run_dir=other)
        shutil.copy(other / "ledger.sqlite", run / "ledger.sqlite")
        with pytest.raises(LedgerError, match="was changed: its first"):
            ledger_report(run)

    def test_a_missing_ledger_is_refused(self, run):
        (run / "ledger.sqlite").unlink()
        with pytest.raises(FedlgmError):
            ledger_report(run)

    def test_an_older_copy_of_the_ledger_is_refused(self, run):
        """Restored from a backup of the second round."""
        sql(run / "ledger.sqlite", "DELETE FROM charges WHERE number > 2")
        with pytest.raises(LedgerError, match="rows were deleted, or the file is an older copy"):
            ledger_report(run)

    @pytest.mark.slow
    def test_the_command_ends_with_status_2(self, run):
        import subprocess
        import sys

        script = "import sys; from simulations.cli import main; sys.argv[0] = 'fedlgm'; main()"
        command = [sys.executable, "-c", script, "ledger", str(run)]
        good = subprocess.run(command, capture_output=True, text=True, check=False)
        assert good.returncode == 0
        assert "verified" in good.stdout
        sql(run / "ledger.sqlite", "DELETE FROM charges WHERE round = 2")
        bad = subprocess.run(command, capture_output=True, text=True, check=False)
        assert bad.returncode == 2
        assert "was changed" in bad.stderr


def test_clients_of_another_number_are_part_of_the_hash(tmp_path):
    """A row's client, too: moving charges to other clients spreads what one of them has spent."""
    with Ledger(tmp_path / "l.sqlite", "a run") as ledger:
        for round_ in range(1, 5):
            ledger.charge(EVENT, round=round_, key="k", client=0)
        before = ledger.epsilon(1e-5)
    sql(tmp_path / "l.sqlite", "UPDATE charges SET client = round")
    with Ledger(tmp_path / "l.sqlite") as ledger:
        assert ledger.epsilon(1e-5) < before
        with pytest.raises(LedgerError, match="was changed"):
            ledger.verify()
    assert SERVER == -1


class TestWhatRowsProtect:
    """Unit and relation stand in the row and in its hash; unlike releases are not added up."""

    def test_another_protection_is_refused_before_anything_is_charged(self, tmp_path):
        with Ledger(tmp_path / "ledger.sqlite", "a run") as ledger:
            ledger.charge(EVENT, round=1, key="1", protects="client, add-remove")
            for other in ("client, replace-one", "example, add-remove"):
                with pytest.raises(
                    LedgerError,
                    match=rf"protects \(client, add-remove\), but this one protects \({other}\)",
                ):
                    ledger.charge(EVENT, round=2, key="2", protects=other)
            ledger.charge(EVENT, round=2, key="2", protects="client, add-remove")
            assert (ledger.position(), ledger.protects()) == (2, "client, add-remove")
            assert {charge.protects for charge in ledger.charges()} == {"client, add-remove"}

    @pytest.mark.parametrize("edited", ["client, zero-out", "example, add-remove", ""])
    def test_an_edit_of_it_is_noticed(self, tmp_path, edited):
        path = tmp_path / "ledger.sqlite"
        with Ledger(path, "a run") as ledger:
            ledger.charge(EVENT, round=1, key="1", protects="client, add-remove")
        sql(path, f"UPDATE charges SET protects = '{edited}'")
        with pytest.raises(LedgerError, match="row 1"):
            check(path)

    def test_it_cannot_be_given_to_rows_that_state_none(self, charged):
        path, _ = charged
        sql(path, "UPDATE charges SET protects = 'client, zero-out' WHERE number = 2")
        with pytest.raises(LedgerError, match="row 2"):
            check(path)

    @pytest.mark.parametrize("column", ["protects", "guarantee"])
    @pytest.mark.parametrize("owner", [None, "a run"])
    def test_a_ledger_without_it_is_refused_and_stays_as_it_is(self, charged, column, owner):
        path, _ = charged
        sql(path, f"ALTER TABLE charges DROP COLUMN {column}")
        before = path.read_bytes()
        with pytest.raises(LedgerError, match="of an earlier version"):
            Ledger(path, owner)
        assert path.read_bytes() == before


@pytest.mark.parametrize("text", ["abc", "3", ":x", "²:x", "-1:x"])
def test_text_that_is_no_head_is_refused(text):
    with pytest.raises(LedgerError, match="COUNT:HASH"):
        Head.parse(text)
