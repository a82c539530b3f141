"""The node's ledger, which lists all releases of its data set for all runs and servers.

A release is one row, which is charged and on disk before any of its numbers leave the node. Its
inputs determine its name, so the same question is the same release. Rows form a hash chain. A
witness file in another folder records the chain's head, which reveals an older copy, another ledger
or an edited row. After a crash between charge and reply the ledger lists a release that was not
sent, but it never omits one that was sent.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import astuple, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedlgm import privacy
from fedlgm.errors import LedgerError
from fedlgm.files import transaction
from fedlgm.privacy.guarantee import COVERS, ONE_EXAMPLE, covers
from fedlgm_nodes.protocol.messages import TEST, Position, digest
from fedlgm_nodes.service.row import Row
from fedlgm_nodes.service.witness import Seen
from fedlgm_nodes.service.witness import read as read_witness
from fedlgm_nodes.service.witness import write as write_witness

if TYPE_CHECKING:  # loads the accountant's libraries, which the service's own process does not
    from fedlgm.privacy.past import Past

_SCHEMA = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE releases (
    seq INTEGER PRIMARY KEY,
    request TEXT NOT NULL UNIQUE,
    event TEXT NOT NULL,
    trust TEXT NOT NULL,
    run TEXT NOT NULL,
    round INTEGER NOT NULL,
    data TEXT NOT NULL,
    charged_at TEXT NOT NULL,
    head TEXT NOT NULL,
    protects TEXT NOT NULL
);
CREATE TABLE answers (seq INTEGER PRIMARY KEY, digest TEXT NOT NULL, answered_at TEXT NOT NULL);
CREATE TABLE questions (digest TEXT PRIMARY KEY, request TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE agreed (cohort TEXT PRIMARY KEY, survivors TEXT NOT NULL) WITHOUT ROWID; -- see `agree`
"""
_COLUMNS = "seq, request, event, trust, run, round, data, charged_at, head, protects"
_locked: set[tuple[int, int]] = set()  # databases that this process holds


class NodeLedger:
    """The ledger file and its witness. Only one process at a time can hold them for writing.

    Args:
        path: SQLite file made by `create`.
        witness: JSON file made by `create`, best kept on another disk or in another backup.
        dataset: name of the data set to which the ledger must belong.
        readonly: whether to only read, possibly while another process charges. Nothing is then
            locked or repaired.

    Raises:
        LedgerError: the ledger is missing, damaged, edited, rolled back, held by another process,
            or belongs to another data set.
    """

    def __init__(
        self, path: Path, witness: Path, dataset: str | None = None, *, readonly: bool = False
    ) -> None:
        self.path, self.witness, self._readonly = path, witness, readonly
        self.identity, self.dataset, self.seq, self.head = "", "", 0, ""
        self._agreed = 0
        self._past: Past | None = None
        self._lock: int | None = None
        # this is read before the database is opened, because SQLite may change files in the
        # database's folder
        seen = read_witness(self.witness)
        if not path.is_file():
            raise LedgerError(
                f"the ledger {path} is gone; its witness says that it had {seen.seq} releases"
            )
        if not readonly:
            self._hold()
        try:
            with self._translate_errors():
                mode = "ro" if readonly else "rw"
                self._db = sqlite3.connect(
                    f"file:{path}?mode={mode}",
                    uri=True,
                    isolation_level=None,
                    timeout=30,
                    check_same_thread=False,
                )
                self._db.execute("PRAGMA synchronous = FULL")
                self._verify(seen, dataset)
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(cls, path: Path, witness: Path, dataset: str, *, test: bool = False) -> None:
        """Create an empty ledger and its witness.

        Args:
            path: SQLite file to make.
            witness: JSON file to make.
            dataset: name of the ledger's data set.
            test: whether its releases have known noise keys. Such a ledger can never be used for
                releases that protect anything.

        Raises:
            LedgerError: one of the files exists.
        """
        for file in (path, witness):
            if file.exists():
                raise LedgerError(
                    f"{file} already exists: a ledger is made once, for the life of its data set"
                )
        identity = TEST * test + secrets.token_hex(16) + _identity_suffix(dataset)
        meta = {"ledger": identity, "dataset": dataset}
        with sqlite3.connect(path, isolation_level=None) as db:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
            db.executescript(_SCHEMA)
            db.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
        db.close()
        path.chmod(0o600)
        write_witness(witness, Seen(identity, 0, identity, 0))

    @property
    def test(self) -> bool:
        """Whether the releases have known noise keys, so that they protect nothing."""
        return self.identity.startswith(TEST)

    # -- reading -------------------------------------------------------------------------------------------------------

    def rows(self) -> list[Row]:
        """All releases, oldest first."""
        with self._translate_errors():
            return [
                Row(*row)
                for row in self._db.execute(f"SELECT {_COLUMNS} FROM releases ORDER BY seq")
            ]

    def find(self, request: str) -> Row | None:
        """The release with this name; None if no such release has been charged."""
        with self._translate_errors():
            row = self._db.execute(
                f"SELECT {_COLUMNS} FROM releases WHERE request = ?", (request,)
            ).fetchone()
        return None if row is None else Row(*row)

    def head_at(self, seq: int) -> str | None:
        """The head of the chain after `seq` releases; None if there are fewer releases."""
        if seq == 0:
            return self.identity
        return self._one("SELECT head FROM releases WHERE seq = ?", seq)

    def answer_digest(self, seq: int) -> str | None:
        """Digest of the answer that may have been sent for release `seq`; None if no answer can
        have been sent.
        """
        return self._one("SELECT digest FROM answers WHERE seq = ?", seq)

    def count(self, *, run: str | None = None, since: str | None = None) -> int:
        """Number of releases. If given, only releases of the run with this label count, and only
        those charged at or after the time `since` (UTC, ISO).
        """
        wanted = {" AND run = ?": run, " AND charged_at >= ?": since}
        given = {clause: value for clause, value in wanted.items() if value is not None}
        return int(
            self._one("SELECT COUNT(*) FROM releases WHERE 1" + "".join(given), *given.values())
            or 0
        )

    def nearest(self, run: str, round: int) -> int | None:
        """The round nearest to `round` among the rounds of a run with a release; None if there is
        none.
        """
        query = "SELECT round FROM releases WHERE run = ? ORDER BY ABS(round - ?), round LIMIT 1"
        value = self._one(query, run, round)
        return None if value is None else int(value)

    def epsilon(
        self, delta: float, protected: str, further: privacy.DpEvent | None = None
    ) -> float:
        """Epsilon at `delta` of all charges, together with one further release if given. The
        accountant is PLD, or RDP if any of the noise is added in shares.

        Args:
            delta: the delta for which epsilon is computed.
            protected: the protected unit, `CLIENT` or `EXAMPLE`.
            further: cost of one more release.

        Raises:
            LedgerError: a charged release does not protect this unit.
        """
        with self._translate_errors():
            stated = {
                kind for (kind,) in self._db.execute("SELECT DISTINCT protects FROM releases")
            }
            counts = self._db.execute(
                "SELECT event, COUNT(*) FROM releases GROUP BY event"
            ).fetchall()
        unlike = [protection for protection in stated if not covers(protection, protected)]
        if unlike:
            remedy = "keep privacy.unit = 'example' for this data set"
            if " at " in protected:
                remedy = "privacy.overlap cannot grow after a release; use another data set"
            raise LedgerError(
                f"this ledger holds releases that protect ({unlike[0]}), so its epsilon cannot "
                f"protect ({protected}): {remedy}"
            )
        if not counts and further is None:
            return 0.0
        from fedlgm.privacy.past import Past

        self._past = self._past or Past()
        events = [(privacy.events.decode(json.loads(event)), int(count)) for event, count in counts]
        both = [event for event, _ in events] + ([] if further is None else [further])
        accountant = privacy.events.accountant_of(both)
        return self._past.epsilon(events, delta, further, accountant)

    def noise_key(self) -> str:
        """Digest of the noise key that the service has made for this ledger; empty if the service
        has made none yet.
        """
        return self._one("SELECT value FROM meta WHERE key = 'noise_key'") or ""

    # -- charging ------------------------------------------------------------------------------------------------------

    def bind(self, noise_key: str) -> None:
        """Record the digest of the noise key that the service is about to write, and return once
        the digest is on disk.
        """
        self._require_held()
        with self._translate_errors():
            self._db.execute("INSERT OR REPLACE INTO meta VALUES ('noise_key', ?)", (noise_key,))

    def release_for(self, question: str) -> str | None:
        """Name of the release that is recorded for a question's digest, a cohort's digest or a
        lasting name (`Naming.lasting_name`); None if there is no such release.
        """
        return self._one("SELECT request FROM questions WHERE digest = ?", question)

    def remember(self, question: str, request: str) -> None:
        """Record which release belongs to a question's digest or a lasting name, unless one is
        recorded already.
        """
        with self._translate_errors():
            self._db.execute("INSERT OR IGNORE INTO questions VALUES (?, ?)", (question, request))

    def charge(
        self, request: str, event: privacy.DpEvent | Mapping[str, Any], *,
        trust: str, run: str, round: int, data: str, protects: str, only_for: Iterable[str] = (),
    ) -> Row:  # fmt: skip
        """Record a release, and return only after row and witness are on disk.

        Args:
            request: name of the release.
            event: cost of the release, as an event or in the JSON form of
                `fedlgm.privacy.events.encode`.
            trust: trust model of the release.
            run: label of the run that asks.
            round: round of that run.
            data: digest of the data.
            protects: unit and relation of the cost, `CLIENT` or `EXAMPLE`.
            only_for: digests of the question and of the cohort, and the lasting name. No other
                release can be charged for any of them (see `release_for`).

        Raises:
            LedgerError: the ledger cannot be written.
        """
        self._require_held()
        values = event if isinstance(event, Mapping) else privacy.events.encode(event)
        cost = json.dumps(values, sort_keys=True)
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        if not covers(protects, ONE_EXAMPLE):
            raise LedgerError(f"a release that protects ({protects}); known: {', '.join(COVERS)}")
        draft = Row(self.seq + 1, request, cost, trust, run, round, data, now, "", protects)
        row = replace(draft, head=draft.head_after(self.head))
        with self._translate_errors(), transaction(self._db):
            self._db.execute(
                f"INSERT INTO releases ({_COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?,?)", astuple(row)
            )
            self._db.executemany(
                "INSERT INTO questions VALUES (?, ?)", [(key, request) for key in only_for]
            )
        self.seq, self.head = row.seq, row.head
        self._witness()
        return row

    def answer(self, seq: int, digest: str) -> None:
        """Record that the answer with this digest may be sent, and return only after the record is
        on disk.
        """
        with self._translate_errors():
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            self._db.execute("INSERT INTO answers VALUES (?, ?, ?)", (seq, digest, now))

    def rolled_back(self, signed: Position) -> None:
        """Record in the witness a position that the service has signed and this ledger does not
        have. The ledger then does not open again, even if it grows longer than the signed ledger.
        """
        self.identity, self.seq, self.head = signed.ledger, signed.seq, signed.head
        self._witness()

    def agreement(self, subject: str) -> str | None:
        """The agreement that is recorded for a subject (see `agree`); None if there is none."""
        return self._one("SELECT survivors FROM agreed WHERE cohort = ?", subject)

    def agree(self, subject: str, agreement: str) -> None:
        """Record the only agreement that is ever made about a subject, and return once the
        agreement and the witness are on disk.

        Args:
            subject: digest of a cohort, or of a node's keys for an attempt.
            agreement: the set of survivors signed for the cohort, or the cohort with which the keys
                are shared.

        Raises:
            LedgerError: an agreement was recorded before.
        """
        self._require_held()
        with self._translate_errors():
            self._db.execute("INSERT INTO agreed VALUES (?, ?)", (subject, agreement))
        self._agreed += 1
        self._witness()

    def close(self) -> None:
        """Close the file and release its lock."""
        if hasattr(self, "_db"):
            self._db.close()
        if self._lock is not None:
            _locked.discard(_identity(os.fstat(self._lock)))
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> NodeLedger:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _hold(self) -> None:
        """Lock the database file itself. A separate lock file could be removed, and two services
        would then spend one budget.

        Raises:
            LedgerError: another process, or another object in this process, has locked the file.
        """
        held = LedgerError(
            f"another process holds the ledger {self.path}: is the service running already?"
        )
        if _identity(self.path.stat()) in _locked:
            # this is checked before the file is opened, because closing the file would release the
            # locks that SQLite holds in this process
            raise held
        self._lock = os.open(self.path, os.O_RDWR)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise held from None
        _locked.add(_identity(os.fstat(self._lock)))

    def _require_held(self) -> None:
        """Refuse to write if another file has replaced the ledger's file, because another service
        could lock and charge the new file.

        Raises:
            LedgerError: the file was replaced or removed, for example by a restored backup.
        """
        try:
            replaced = self._lock is None or _identity(self.path.stat()) != _identity(
                os.fstat(self._lock)
            )
        except FileNotFoundError:
            replaced = True
        if replaced:
            raise LedgerError(
                f"the ledger {self.path} was replaced or removed while the service held it: stop "
                "the service before a backup is restored"
            )

    # -- integrity -----------------------------------------------------------------------------------------------------

    def _verify(self, seen: Seen, dataset: str | None) -> None:
        damage = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if damage != "ok":
            raise LedgerError(
                f"the ledger {self.path} is damaged ({damage}); restore the newest backup"
            )
        meta = dict(self._db.execute("SELECT key, value FROM meta").fetchall())
        self.identity, self.dataset = meta["ledger"], meta["dataset"]
        if seen.ledger != self.identity:
            raise LedgerError(
                f"the ledger {self.path} is not the one that its witness has seen: it was replaced"
            )
        if not self.identity.endswith(_identity_suffix(self.dataset)):
            raise LedgerError(
                f"the ledger {self.path} was edited: it was made for another data set"
            )
        if dataset is not None and dataset != self.dataset:
            raise LedgerError(
                f"the ledger belongs to the data set {self.dataset!r}, but the policy's data.name "
                f"is {dataset!r}: another data set needs its own node folder"
            )
        self.seq, self.head = 0, self.identity
        passed = seen.seq == 0 and seen.head == self.head
        for row in self.rows():
            if row.seq != self.seq + 1 or row.head_after(self.head) != row.head:
                raise LedgerError(
                    f"release {row.seq} of the ledger {self.path} was changed, or an earlier "
                    "release was removed"
                )
            self.seq, self.head = row.seq, row.head
            passed |= (self.seq, self.head) == (seen.seq, seen.head)
        if self.seq < seen.seq:
            raise LedgerError(
                f"the ledger {self.path} was rolled back: it has {self.seq} releases, but its "
                f"witness saw {seen.seq}"
            )
        if not passed:
            raise LedgerError(
                f"the ledger {self.path} is not the one that its witness has seen: rows were "
                "replaced"
            )
        self._agreed = int(self._db.execute("SELECT COUNT(*) FROM agreed").fetchone()[0])
        if self._agreed < seen.agreed:
            raise LedgerError(
                f"the ledger {self.path} was rolled back: it has {self._agreed} agreements in "
                f"secure sums, but its witness saw {seen.agreed}"
            )
        if (self.seq, self._agreed) > (seen.seq, seen.agreed) and not self._readonly:
            # the service was ended between writing a row and writing the witness
            self._witness()

    def _witness(self) -> None:
        write_witness(self.witness, Seen(self.identity, self.seq, self.head, self._agreed))

    def _one(self, query: str, *values: str | int) -> str | None:
        """The first column of the first row, as text; None if there is no row."""
        with self._translate_errors():
            row = self._db.execute(query, values).fetchone()
        return None if row is None else str(row[0])

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, KeyError, ValueError, TypeError, AttributeError) as error:
            said = error if isinstance(error, sqlite3.Error) else repr(error)
            raise LedgerError(f"the ledger {self.path} cannot be used: {said}") from error


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _identity_suffix(dataset: str) -> str:
    """Suffix of a ledger's identity, which ties the ledger to its data set. The chain starts from
    the identity.
    """
    return "." + digest("data set", dataset)[:16]
