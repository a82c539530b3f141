"""The node's own ledger: all releases of its data set, over all runs and servers.

A release is one row, charged and on disk before anything leaves. Its inputs determine its name, so that the same
question is the same release. Rows form a hash chain; a witness file in another folder records the chain's head, so that
an older copy, another ledger or an edited row is detected. The ledger may show more than was released (a crash between
charge and reply), never less.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, cast

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
    head TEXT NOT NULL,
    protects TEXT NOT NULL DEFAULT ''
);
CREATE TABLE answers (seq INTEGER PRIMARY KEY, digest TEXT NOT NULL, answered_at TEXT NOT NULL);
"""
_ADDED = """
CREATE TABLE IF NOT EXISTS questions (digest TEXT PRIMARY KEY, request TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS agreed (cohort TEXT PRIMARY KEY, survivors TEXT NOT NULL) WITHOUT ROWID;
"""
_COLUMNS = "seq, request, event, trust, run, round, data, charged_at, head"
_OLD_EXAMPLES = ", examples"  # after the trust of rows of earlier versions that protect single examples
_locked: set[tuple[int, int]] = set()  # databases that this process holds
CLIENT, EXAMPLE = "client, replace-one", "example, add-remove"
PROTECTED: dict[str, str] = {"client": CLIENT, "example": EXAMPLE}
"""What a release protects: unit and neighbouring relation of its cost."""
_COVERS = {CLIENT: (CLIENT, EXAMPLE), EXAMPLE: (EXAMPLE,)}
"""What each also protects at the same cost: one example more or less is one way to replace all of the data."""


class _Seen(TypedDict):
    """The witness's record of a ledger: its identity, its number of rows and their last hash, and of agreed sets."""

    ledger: str
    seq: int
    head: str
    agreed: int


_SEEN = {"ledger": str, "seq": int, "head": str, "agreed": int}


@dataclass(frozen=True)
class Row:
    """One release.

    Attributes:
        seq: number, from 1.
        request: name of the release: a digest of all its inputs.
        event: its cost, JSON of `fedlgm.privacy.events.encode`.
        trust: who added the noise.
        run: label of the first run that asked.
        round: round of that run.
        data: digest of its data.
        charged_at: time of the charge, UTC.
        head: head of the chain with this row.
        stated: the protected unit, `CLIENT` or `EXAMPLE`; empty in rows of earlier versions, in which `trust` implies
            it.
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
    stated: str = ""

    @property
    def protects(self) -> str:
        """Unit and neighbouring relation of the event."""
        return _protects(self.stated, self.trust)

    def chained(self, before: str) -> str:
        """Head computed from the previous head and this row's columns."""
        columns = (self.request, self.event, self.trust, self.run, str(self.round), self.data, self.charged_at)
        return next_head(before, str(self.seq), *columns, *((self.stated,) if self.stated else ()))


class NodeLedger:
    """The ledger file and its witness, held by one process at a time.

    Args:
        path: SQLite file made by `create`.
        witness: JSON file made by `create`, best on another disk or backup schedule.
        dataset: name of the data set to which it must belong.
        readonly: read while another process charges; nothing is locked or repaired.

    Raises:
        LedgerError: the ledger is missing, damaged, edited, rolled back, held by another process, or belongs to another
            data set.
    """

    def __init__(self, path: Path, witness: Path, dataset: str | None = None, *, readonly: bool = False) -> None:
        self.path, self.witness, self._readonly = path, witness, readonly
        self.identity, self.dataset, self.seq, self.head = "", "", 0, ""
        self._agreed = 0
        self._lock: int | None = None
        self._columns = _COLUMNS
        seen = self._seen()  # before the database is opened: SQLite may change what lies beside it
        if not path.is_file():
            raise LedgerError(f"the ledger {path} is gone; its witness says that it had {seen['seq']} releases")
        if not readonly:
            self._hold()
        try:
            with self._translated():
                mode = "ro" if readonly else "rw"
                self._db = sqlite3.connect(f"file:{path}?mode={mode}", uri=True, isolation_level=None, timeout=30,
                                           check_same_thread=False)  # fmt: skip
                self._db.execute("PRAGMA synchronous = FULL")
                self._extend()
                self._verify(seen, dataset)
        except BaseException:
            self.close()
            raise

    @classmethod
    def create(cls, path: Path, witness: Path, dataset: str, *, test: bool = False) -> None:
        """Make an empty ledger and its witness.

        Args:
            path: SQLite file to make.
            witness: JSON file to make.
            dataset: name of its data set.
            test: whether its releases have known noise keys; such a ledger can never be used for private releases.

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
            return [Row(*row) for row in self._db.execute(f"SELECT {self._columns} FROM releases ORDER BY seq")]

    def find(self, request: str) -> Row | None:
        """The release with that name, if it has been charged."""
        with self._translated():
            row = self._db.execute(f"SELECT {self._columns} FROM releases WHERE request = ?", (request,)).fetchone()
        return None if row is None else Row(*row)

    def head_at(self, seq: int) -> str | None:
        """Head of the chain after `seq` releases; None if there are fewer."""
        if seq == 0:
            return self.identity
        with self._translated():
            row = self._db.execute("SELECT head FROM releases WHERE seq = ?", (seq,)).fetchone()
        return None if row is None else str(row[0])

    def answered(self, seq: int) -> str | None:
        """Digest of the answer that release `seq` may have sent; None if nothing can have been sent."""
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
        """The released round of a run that is nearest to `round`; None if there is none."""
        query = "SELECT round FROM releases WHERE run = ? ORDER BY ABS(round - ?), round LIMIT 1"
        with self._translated():
            row = self._db.execute(query, (run, round)).fetchone()
        return None if row is None else int(row[0])

    def epsilon(self, delta: float, protected: str, further: dp_event.DpEvent | None = None) -> float:
        """Epsilon at `delta` of all charges, and of one further release if given, by PLD (RDP: noise in shares).

        Args:
            delta: its delta.
            protected: the protected unit, `CLIENT` or `EXAMPLE`.
            further: cost of one more release.

        Raises:
            LedgerError: charged releases protect less than this.
        """
        with self._translated():
            stated = self._columns.rpartition(", ")[2]
            kinds = self._db.execute(f"SELECT DISTINCT {stated}, trust FROM releases").fetchall()
            unlike = {_protects(*kind) for kind in kinds} - {one for one in _COVERS if protected in _COVERS[one]}
            counts = self._db.execute("SELECT event, COUNT(*) FROM releases GROUP BY event").fetchall()
        if unlike:
            raise LedgerError(
                f"this ledger holds releases that protect ({unlike.pop()}), so its epsilon cannot be one that protects "
                f"({protected}): privacy.unit stays 'example' for this data set"
            )
        events = [(privacy.events.decode(json.loads(event)), int(count)) for event, count in counts]
        if further is not None:
            events.append((further, 1))
        return privacy.composed_epsilon(events, delta, _accountant(events)) if events else 0.0

    def noise_key(self) -> str:
        """Digest of the noise key that the service has made for this ledger; empty if it has made none yet."""
        with self._translated():
            row = self._db.execute("SELECT value FROM meta WHERE key = 'noise_key'").fetchone()
        return "" if row is None else str(row[0])

    # -- charging ------------------------------------------------------------------------------------------------------

    def bind(self, noise_key: str) -> None:
        """Record the digest of the noise key that the service is about to make; returns once it is on disk."""
        with self._translated():
            self._db.execute("INSERT OR REPLACE INTO meta VALUES ('noise_key', ?)", (noise_key,))

    def asked(self, question: str) -> str | None:
        """Name of the release that answered a question; None if there is none."""
        with self._translated():
            row = self._db.execute("SELECT request FROM questions WHERE digest = ?", (question,)).fetchone()
        return None if row is None else str(row[0])

    def remember(self, question: str, request: str) -> None:
        """Record which release answers a question."""
        with self._translated():
            self._db.execute("INSERT OR IGNORE INTO questions VALUES (?, ?)", (question, request))

    def charge(
        self, request: str, event: dp_event.DpEvent, *,
        trust: str, run: str, round: int, data: str, protects: str, question: str = "",
    ) -> Row:  # fmt: skip
        """Record a release; returns only after row and witness are on disk.

        Args:
            request: name of the release.
            event: its cost.
            trust: who adds the noise.
            run: label of the run that asks.
            round: round of that run.
            data: digest of the data.
            protects: unit and relation of the cost, `CLIENT` or `EXAMPLE`.
            question: digest of the question that only this release answers.

        Raises:
            LedgerError: the ledger cannot be written.
        """
        cost = json.dumps(privacy.events.encode(event), sort_keys=True)
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        if protects not in _COVERS:
            raise LedgerError(f"a release that protects ({protects}); known: {', '.join(_COVERS)}")
        draft = Row(self.seq + 1, request, cost, trust, run, round, data, now, "", protects)
        row = replace(draft, head=draft.chained(self.head))
        with self._translated():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                self._db.execute(f"INSERT INTO releases ({self._columns}) VALUES (?,?,?,?,?,?,?,?,?,?)", astuple(row))
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
        """Record that the answer with this digest may be sent; returns only after that is on disk."""
        with self._translated():
            now = datetime.now(UTC).isoformat(timespec="milliseconds")
            self._db.execute("INSERT INTO answers VALUES (?, ?, ?)", (seq, digest, now))

    def rolled_back(self, signed: Position) -> None:
        """Keep proof that this ledger is not the one that its service has signed for: it will not open again.

        It does not open even if it has since grown longer than the signed one.
        """
        self.identity, self.seq, self.head = signed.ledger, signed.seq, signed.head
        self._witness()

    def agreed(self, cohort: str) -> str | None:
        """The set of survivors that this node has signed for a cohort of a secure sum; None if it has signed none."""
        with self._translated():
            row = self._db.execute("SELECT survivors FROM agreed WHERE cohort = ?", (cohort,)).fetchone()
        return None if row is None else str(row[0])

    def agree(self, cohort: str, survivors: str) -> None:
        """Record the only set of survivors that is ever signed for a cohort; returns after set and witness are on disk.

        Raises:
            LedgerError: one was recorded before.
        """
        with self._translated():
            self._db.execute("INSERT INTO agreed VALUES (?, ?)", (cohort, survivors))
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
        """Lock the database itself: a lock file could be removed, and two services would then spend one budget.

        Raises:
            LedgerError: another process, or another object of this one, has locked it.
        """
        held = LedgerError(f"another process holds the ledger {self.path}: is the service running already?")
        if _identity(self.path.stat()) in _locked:
            raise held  # before it is opened: closed again, that would end SQLite's own locks in this process
        self._lock = os.open(self.path, os.O_RDWR)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise held from None
        _locked.add(_identity(os.fstat(self._lock)))

    def _extend(self) -> None:
        """Read a ledger of an earlier version and, if it is writable, extend it."""
        present = {row[1] for row in self._db.execute("PRAGMA table_info(releases)")}
        if "protects" not in present and not self._readonly:
            self._db.execute("ALTER TABLE releases ADD COLUMN protects TEXT NOT NULL DEFAULT ''")
            present.add("protects")
        self._columns = f"{_COLUMNS}, {'protects' if 'protects' in present else repr('')}"
        if not self._readonly:
            self._db.executescript(_ADDED)

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
                "data set needs its own node folder"
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
        self._agreed = self._sets()
        if self._agreed < seen["agreed"]:
            raise LedgerError(
                f"the ledger {self.path} was rolled back: it has {self._agreed} sets of survivors that this node has "
                f"signed, its witness saw {seen['agreed']}"
            )
        if (self.seq, self._agreed) > (seen["seq"], seen["agreed"]) and not self._readonly:
            self._witness()  # the service ended between a row and its witness

    def _sets(self) -> int:
        """Number of signed sets of survivors; a ledger of an earlier version has none."""
        table = "SELECT COUNT(*) FROM sqlite_master WHERE name = 'agreed'"
        if not self._db.execute(table).fetchone()[0]:
            return 0
        return int(self._db.execute("SELECT COUNT(*) FROM agreed").fetchone()[0])

    def _seen(self) -> _Seen:
        try:
            seen = {"agreed": 0} | json.loads(self.witness.read_bytes())  # earlier versions wrote no number of sets
            if {name: type(value) for name, value in seen.items()} != _SEEN:
                raise ValueError("not a witness")
        except FileNotFoundError:
            raise LedgerError(f"the witness {self.witness} is gone: the ledger's last position is unknown") from None
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise LedgerError(f"the witness {self.witness} cannot be read: {error}") from error
        return cast(_Seen, seen)

    def _witness(self) -> None:
        seen: _Seen = {"ledger": self.identity, "seq": self.seq, "head": self.head, "agreed": self._agreed}
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


def _accountant(events: list[tuple[dp_event.DpEvent, int]]) -> str:
    """The accountant that covers all events."""
    in_shares = any(isinstance(privacy.events.unfolded(event, 1)[0], privacy.events.RENYI_ONLY) for event, _ in events)
    return "rdp" if in_shares else "pld"


def _protects(stated: str, trust: str) -> str:
    return stated or (EXAMPLE if trust.endswith(_OLD_EXAMPLES) else CLIENT)


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _named(dataset: str) -> str:
    """Suffix of a ledger's identity, from which its chain starts."""
    return "." + digest("data set", dataset)[:16]
