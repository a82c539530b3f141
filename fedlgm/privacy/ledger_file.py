"""The ledger's SQLite file: its tables, its creation and opening, and remedies for errors."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

from fedlgm.errors import LedgerError
from fedlgm.files import PUBLIC, create_durably, explain_failure
from fedlgm.package_conflicts import refuse_windows

refuse_windows()
import fcntl  # noqa: E402

SCHEMA = """
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS charges (
    number INTEGER PRIMARY KEY,
    round INTEGER NOT NULL,
    client INTEGER NOT NULL,
    key TEXT NOT NULL,
    event TEXT NOT NULL,
    claim TEXT NOT NULL,
    head TEXT NOT NULL,
    protects TEXT NOT NULL DEFAULT '', -- unit and relation
    guarantee TEXT NOT NULL DEFAULT '', -- in JSON, of a user's mechanism: no recipe gives it
    charged_on TEXT NOT NULL DEFAULT (date('now')), -- no time of day: how long rounds take shows how many took part
    UNIQUE (round, client, key)
);
"""
_ROOM = 2**18
"""If fewer bytes are free, an input or output error counts as the error of a full disk, because
SQLite's auxiliary files need this space.
"""
_REMEDIES = {
    sqlite3.SQLITE_FULL: "the disk is full and the ledger is whole: free some space and continue "
    "the run",
    sqlite3.SQLITE_READONLY: "the file or its folder is read-only: make it writable and continue "
    "the run",
    sqlite3.SQLITE_CANTOPEN: "it cannot be opened here: check that its folder exists and may be "
    "read and written",
    sqlite3.SQLITE_PERM: "this user may not access it: check the permissions of the file and its "
    "folder",
    sqlite3.SQLITE_BUSY: "another process is writing it: wait for it, or stop it",
    sqlite3.SQLITE_IOERR: "the disk reports an error: check it, then restore the ledger from a "
    "backup",
}


def create(path: Path, owner: str) -> None:
    """Create an empty ledger, either completely or not at all, because a partly written file would
    look like a ledger whose rows were deleted.

    Raises:
        LedgerError: the disk is full.
    """
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript(SCHEMA)
        db.executemany(
            "INSERT INTO meta VALUES (?, ?)",
            [("owner", owner), ("identity", secrets.token_hex(16))],
        )
        db.commit()
        data = db.serialize()
    try:
        create_durably(path, data, PUBLIC)
    except OSError as error:  # SQLite will explain other errors better
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            what = f"the ledger {path} cannot be created, and nothing was released"
            raise LedgerError(explain_failure(what, error)) from error


def connect(path: Path, *, reading: bool) -> sqlite3.Connection:
    """Open a ledger, read-only or for charges."""
    if not reading:
        return sqlite3.connect(path, isolation_level=None, timeout=30)
    # A ledger that nobody writes is opened as immutable, because otherwise SQLite would leave files
    # beside it, or fail in a read-only folder.
    closed = not path.with_name(path.name + "-wal").exists()
    address = f"{path.resolve().as_uri()}?mode=ro{'&immutable=1' if closed else ''}"
    return sqlite3.connect(address, uri=True, isolation_level=None, timeout=30)


def prepare(db: sqlite3.Connection, path: Path, owner: str | None) -> None:
    """Check an opened ledger. If it is opened for charges, complete its tables if they are missing.

    Raises:
        LedgerError: the file is not a ledger, is damaged, or belongs to another run.
    """
    if owner is not None:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
    damage = db.execute("PRAGMA quick_check(1)").fetchone()[0]
    if damage != "ok":
        raise LedgerError(f"the ledger {path} is damaged ({damage}); restore it from a backup")
    if (
        owner is None
        and not db.execute("SELECT 1 FROM sqlite_master WHERE name='charges'").fetchone()
    ):
        raise LedgerError(
            f"{path} is not a fedlgm ledger: restore it from a backup or start a new run"
        )
    if owner is not None:
        db.executescript(SCHEMA)
    columns = {row[1] for row in db.execute("PRAGMA table_info(charges)")}
    if missing := {"head", "protects", "guarantee"} - columns:
        raise LedgerError(
            f"the ledger {path} is of an earlier version of fedlgm, whose rows have no "
            f"{min(missing)}"
        )
    if owner is None:
        return
    db.execute("INSERT OR IGNORE INTO meta VALUES ('owner', ?)", (owner,))
    (stored_owner,) = db.execute("SELECT value FROM meta WHERE key = 'owner'").fetchone()
    if stored_owner != owner:
        raise LedgerError(f"the ledger {path} belongs to another run; give this run its own folder")


@contextmanager
def hold(path: Path) -> Iterator[None]:
    """Within the block, keep other runs from holding a ledger. The lock is on a separate file
    beside the ledger. This file is never deleted.

    If the lock were on the ledger itself, closing it would release the locks that SQLite holds on
    the ledger in this process.

    Raises:
        LedgerError: another run holds the ledger, or the file cannot be locked.
    """
    target = path.resolve()  # the ledger may be a link
    place = target.with_name(target.name + ".lock")
    with ExitStack() as stack:
        try:
            descriptor = os.open(place, os.O_RDONLY | os.O_CREAT, PUBLIC)
            stack.callback(os.close, descriptor)
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LedgerError(
                f"another run is charging the ledger {path}: wait until it ends, or name a new file"
            ) from error
        except OSError as error:
            what = f"the ledger {path} cannot be held"
            raise LedgerError(explain_failure(what, error)) from error
        yield


def remedy(error: Exception, path: Path) -> str:
    """Remedy for an SQLite error about a ledger, as the end of a sentence."""
    code = (
        getattr(error, "sqlite_errorcode", None) or 0
    ) & 0xFF  # the low byte of an extended code is the primary code
    # SQLite reports a full disk for its auxiliary files as an input or output error.
    if code == sqlite3.SQLITE_IOERR and _is_full(path.parent):
        code = sqlite3.SQLITE_FULL
    return _REMEDIES.get(code, "restore it from a backup or start a new run")


def _is_full(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < _ROOM
    except OSError:
        return False
