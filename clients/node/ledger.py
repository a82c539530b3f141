"""The node's own ledger: what its data set has released, in all runs, for all servers, for good.

A release is one row, charged and on disk before anything leaves. It is named by its inputs, so that the same question
is the same release. Rows form a hash chain; a witness file in another folder knows how far the chain is, so that an
older copy, another ledger or an edited row is noticed. The ledger may show more than was released (a crash between
charge and reply), never less.
"""

from __future__ import annotations

import fcntl
import json
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypedDict, cast

from fedlgm import privacy
from fedlgm.errors import LedgerError
from fedlgm.files import write_durably
from fedlgm.node_protocol import TEST, Position, digest
from fedlgm.privacy.chain import next_head

if TYPE_CHECKING:
    from dp_accounting import dp_event

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
    head TEXT NOT NULL
);
CREATE TABLE answers (seq INTEGER PRIMARY KEY, digest TEXT NOT NULL, answered_at TEXT NOT NULL);
"""
_QUESTIONS = "CREATE TABLE IF NOT EXISTS questions (digest TEXT PRIMARY KEY, request TEXT NOT NULL) WITHOUT ROWID"
_COLUMNS = "seq, request, event, trust, run, round, data, charged_at, head"


class _Seen(TypedDict):
    """What the witness has seen of a ledger: which one, its rows and their last hash."""

    ledger: str
    seq: int
    head: str


@dataclass(frozen=True)
class Row:
    """One release.

    Attributes:
        seq: number, from 1.
        request: name of the release: a digest of all its inputs.
        event: its cost, JSON of `fedlgm.privacy.events.encode`.
        trust: who added the noise.
        run: label of the run that asked first.
        round: of that run.
        data: digest of the data it was made of.
        charged_at: time of the charge, UTC.
        head: head of the chain with this row.
    """

    seq: int
    request: str
    event: str
    trust: str
    run: str
    round: int
    data: str
    charged_at: str
    head: str

    def chained(self, before: str) -> str:
        """Head that follows from the head before and this row's columns."""
        columns = (self.request, self.event, self.trust, self.run, str(self.round), self.data, self.charged_at)
        return next_head(before, str(self.seq), *columns)


class NodeLedger:
    """The ledger file and its witness, held by one process at a time.

    Args:
        path: SQLite file made by `create`.
        witness: JSON file made by `create`, best on another disk or backup schedule.
        dataset: name of the data set that it must belong to.
        readonly: read beside the process that charges; nothing is locked or repaired.

    Raises:
        LedgerError: missing, damaged, edited, rolled back, held by another process, or of another data set.
    """

    def __init__(self, path: Path, witness: Path, dataset: str | None = None, *, readonly: bool = False) -> None:
        self.path, self.witness, self._readonly = path, witness, readonly
        self.identity, self.dataset, self.seq, self.head = "", "", 0, ""
        self._lock: IO[bytes] | None = None
        seen = self._seen()  # before the database is opened: SQLite may change what lies beside it
        if not path.is_file():
            raise LedgerError(f"the ledger {path} is gone; its witness says that it had {seen['seq']} releases")
        if not readonly:
            self._lock = path.with_name("ledger.lock").open("wb")
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                self._lock.close()
                raise LedgerError(f"another process holds the ledger {path}: is the service running already?") from None
        try:
            with self._translated():
                mode = "ro" if readonly else "rw"
                self._db = sqlite3.connect(f"file:{path}?mode={mode}", uri=True, isolation_level=None, timeout=30,
                                           check_same_thread=False)  # fmt: skip
                self._db.execute("PRAGMA synchronous = FULL")
                self._verify(seen, dataset)
                if not readonly:
                    self._db.execute(_QUESTIONS)  # ledgers of earlier versions have none
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(cls, path: Path, witness: Path, dataset: str, *, test: bool = False) -> None:
        """Make an empty ledger and its witness.

        Args:
            path: SQLite file to make.
            witness: JSON file to make.
            dataset: name of the data set that it belongs to.
            test: its releases will have known noise keys; such a ledger can never be used for private releases.

        Raises:
            LedgerError: one of them exists.
        """
        for file in (path, witness):
            if file.exists():
                raise LedgerError(f"{file} exists already: a ledger is made once, for the life of its data set")
        identity = TEST * test + secrets.token_hex(16) + _named(dataset)
        meta = {"ledger": identity, "dataset": dataset}
        with sqlite3.connect(path, isolation_level=None) as db:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
            db.executescript(_SCHEMA)
            db.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
        db.close()
        path.chmod(0o600)
        write_durably(witness, json.dumps({"ledger": identity, "seq": 0, "head": identity}).encode())

    @property
    def test(self) -> bool:
        """Whether its releases have known noise keys, so that they protect nothing."""
        return self.identity.startswith(TEST)

    # -- reading -------------------------------------------------------------------------------------------------------

    def rows(self) -> list[Row]:
        """All releases, oldest first."""
        with self._translated():
            return [Row(*row) for row in self._db.execute(f"SELECT {_COLUMNS} FROM releases ORDER BY seq")]

    def find(self, request: str) -> Row | None:
        """The release of that name, if it has been charged."""
        with self._translated():
            row = self._db.execute(f"SELECT {_COLUMNS} FROM releases WHERE request = ?", (request,)).fetchone()
        return None if row is None else Row(*row)

    def head_at(self, seq: int) -> str | None:
        """Head of the chain after `seq` releases; None if there have not been as many."""
        if seq == 0:
            return self.identity
        with self._translated():
            row = self._db.execute("SELECT head FROM releases WHERE seq = ?", (seq,)).fetchone()
        return None if row is None else str(row[0])

    def answered(self, seq: int) -> str | None:
        """Digest of the answer that release `seq` may have left with; None if nothing can have left."""
        with self._translated():
            row = self._db.execute("SELECT digest FROM answers WHERE seq = ?", (seq,)).fetchone()
        return None if row is None else str(row[0])

    def count(self, *, run: str | None = None, since: str | None = None) -> int:
        """Number of releases: all, those whose run has that label, or those charged since a time (UTC, ISO)."""
        query, values = "SELECT COUNT(*) FROM releases WHERE 1", list[str]()
        if run is not None:
            query, values = query + " AND run = ?", [*values, run]
        if since is not None:
            query, values = query + " AND charged_at >= ?", [*values, since]
        with self._translated():
            return int(self._db.execute(query, values).fetchone()[0])

    def nearest(self, run: str, round: int) -> int | None:
        """The round of a run that was released and is nearest to `round`; None if none was."""
        query = "SELECT round FROM releases WHERE run = ? ORDER BY ABS(round - ?), round LIMIT 1"
        with self._translated():
            row = self._db.execute(query, (run, round)).fetchone()
        return None if row is None else int(row[0])

    def epsilon(self, delta: float, further: dp_event.DpEvent | None = None) -> float:
        """Epsilon at `delta` of everything charged, and of a further release if one is given; replace-one, by PLD."""
        with self._translated():
            counts = self._db.execute("SELECT event, COUNT(*) FROM releases GROUP BY event").fetchall()
        events = [(privacy.events.decode(json.loads(event)), int(count)) for event, count in counts]
        if further is not None:
            events.append((further, 1))
        return privacy.composed_epsilon(events, delta) if events else 0.0

    # -- charging ------------------------------------------------------------------------------------------------------

    def asked(self, question: str) -> str | None:
        """Name of the release that answered a question; None if none has."""
        with self._translated():
            row = self._db.execute("SELECT request FROM questions WHERE digest = ?", (question,)).fetchone()
        return None if row is None else str(row[0])

    def remember(self, question: str, request: str) -> None:
        """Record which release answers a question."""
        with self._translated():
            self._db.execute("INSERT OR IGNORE INTO questions VALUES (?, ?)", (question, request))

    def charge(
        self, request: str, event: dp_event.DpEvent, *,
        trust: str, run: str, round: int, data: str, question: str = "",
    ) -> Row:  # fmt: skip
        """Record a release; returns only after row and witness are on disk.

        Args:
            request: name of the release.
            event: its cost.
            trust: who adds the noise.
            run: label of the run that asks.
            round: of that run.
            data: digest of the data.
            question: digest of the question that it answers, which no other release will.

        Raises:
            LedgerError: it cannot be written.
        """
        cost = json.dumps(privacy.events.encode(event), sort_keys=True)
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        draft = Row(self.seq + 1, request, cost, trust, run, round, data, now, "")
        row = replace(draft, head=draft.chained(self.head))
        with self._translated():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._db.execute(f"INSERT INTO releases ({_COLUMNS}) VALUES (?,?,?,?,?,?,?,?,?)", astuple(row))
                if question:
                    self._db.execute("INSERT INTO questions VALUES (?, ?)", (question, request))
                self._db.execute("COMMIT")
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
        self.seq, self.head = row.seq, row.head
        self._witness()
        return row

    def answer(self, seq: int, digest: str) -> None:
        """Record that the answer with this digest may leave now; returns only after that is on disk."""
        with self._translated():
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            self._db.execute("INSERT INTO answers VALUES (?, ?, ?)", (seq, digest, now))

    def rolled_back(self, signed: Position) -> None:
        """Keep proof that this ledger is not the one that its service has signed for: it will not open again.

        Nor if it has grown since, and is now longer than what was signed.
        """
        self.identity, self.seq, self.head = signed.ledger, signed.seq, signed.head
        self._witness()

    def close(self) -> None:
        """Close the file and let go of it."""
        if hasattr(self, "_db"):
            self._db.close()
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> NodeLedger:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # -- integrity -----------------------------------------------------------------------------------------------------

    def _verify(self, seen: _Seen, dataset: str | None) -> None:
        damage = self._db.execute("PRAGMA quick_check(1)").fetchone()[0]
        if damage != "ok":
            raise LedgerError(f"the ledger {self.path} is damaged ({damage}); restore the newest backup")
        meta = dict(self._db.execute("SELECT key, value FROM meta").fetchall())
        self.identity, self.dataset = meta["ledger"], meta["dataset"]
        if seen["ledger"] != self.identity:
            raise LedgerError(f"the ledger {self.path} is not the one that its witness has seen: it was exchanged")
        if "." in self.identity and not self.identity.endswith(_named(self.dataset)):
            raise LedgerError(f"the ledger {self.path} was edited: it was made for another data set")
        if dataset is not None and dataset != self.dataset:
            raise LedgerError(
                f"the ledger belongs to the data set {self.dataset!r}, the policy's data.name is {dataset!r}: another "
                "data set needs a node folder of its own"
            )
        self.seq, self.head = 0, self.identity
        passed = seen["seq"] == 0 and seen["head"] == self.head
        for row in self.rows():
            if row.seq != self.seq + 1 or row.chained(self.head) != row.head:
                raise LedgerError(f"release {row.seq} of the ledger {self.path} was changed, or one before it removed")
            self.seq, self.head = row.seq, row.head
            passed |= (self.seq, self.head) == (seen["seq"], seen["head"])
        if self.seq < seen["seq"]:
            raise LedgerError(
                f"the ledger {self.path} was rolled back: it has {self.seq} releases, its witness saw {seen['seq']}"
            )
        if not passed:
            raise LedgerError(f"the ledger {self.path} is not the one that its witness has seen: rows were exchanged")
        if self.seq > seen["seq"] and not self._readonly:
            self._witness()  # the service ended between the charge and its witness

    def _seen(self) -> _Seen:
        try:
            seen = json.loads(self.witness.read_bytes())
            if {name: type(value) for name, value in seen.items()} != {"ledger": str, "seq": int, "head": str}:
                raise ValueError("not a witness")
        except FileNotFoundError:
            raise LedgerError(f"the witness {self.witness} is gone: nobody knows how far the ledger was") from None
        except (OSError, ValueError, AttributeError) as error:
            raise LedgerError(f"the witness {self.witness} cannot be read: {error}") from error
        return cast(_Seen, seen)

    def _witness(self) -> None:
        seen = {"ledger": self.identity, "seq": self.seq, "head": self.head}
        try:
            write_durably(self.witness, json.dumps(seen).encode())
        except OSError as error:
            raise LedgerError(f"the witness {self.witness} cannot be written: {error}") from error

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, KeyError, ValueError, TypeError, AttributeError) as error:
            raise LedgerError(f"the ledger {self.path} cannot be used: {error!r}") from error


def _named(dataset: str) -> str:
    """End of a ledger's identity, with which its chain begins."""
    return "." + digest("data set", dataset)[:16]
