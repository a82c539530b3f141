"""A node's state in rounds of secure aggregation. It is on disk before the node sends an answer
that depends on it.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedlgm.errors import LedgerError
from fedlgm.files import explain_failure, transaction
from fedlgm_nodes.protocol.messages import digest
from fedlgm_nodes.secagg.cohort import Survivors
from fedlgm_nodes.service.ledger import NodeLedger

_SCHEMA = """
CREATE TABLE IF NOT EXISTS sessions (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    attempt TEXT NOT NULL UNIQUE,
    state TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS vectors (attempt TEXT PRIMARY KEY, words BLOB NOT NULL);
"""
_FORGET = """
DELETE FROM sessions
    WHERE number NOT IN (SELECT number FROM sessions ORDER BY number DESC LIMIT :kept)
    AND number NOT IN (SELECT number FROM sessions WHERE json_extract(state, '$.revealed') = '{}'
        ORDER BY number DESC LIMIT :kept)
"""


@dataclass
class Session:
    """The node's progress in one attempt at one round. It holds the node's secrets until `revealed`
    is set.

    Attributes:
        terms, advert: the terms and the node's advert, as plain values.
        sealing, masking, seed: the node's secrets, hexadecimal digits; empty once they are no
            longer needed.
        commitment: SHA-256 of the seed.
        cohort: digest of the only cohort with which the secrets are shared; empty until they are
            shared.
        members: the adverts of the cohort, as plain values.
        outgoing: client -> the sealed shares for this client, in base 64.
        sharing: all clients that shared secrets, including this node (U1); empty until its vector
            is stored.
        held: client -> this node's shares of that client's seed and masking key, hexadecimal
            digits.
        revealed: client -> the only share for this client that this node reveals, hexadecimal
            digits.
    """

    terms: dict[str, Any]
    advert: dict[str, Any]
    sealing: str
    masking: str
    seed: str = ""
    commitment: str = ""
    cohort: str = ""
    members: list[dict[str, Any]] = field(default_factory=list)
    outgoing: dict[str, str] = field(default_factory=dict)
    sharing: list[int] = field(default_factory=list)
    held: dict[str, list[str]] = field(default_factory=dict)
    revealed: dict[str, str] = field(default_factory=dict)


class SessionStore:
    """The newest few sessions in a file, and all agreements in the node's ledger.

    An agreement is the only cohort with which an advert's keys are shared, or the only set of
    survivors that is signed for a cohort.

    Only the process that holds the ledger may use the store.

    Args:
        path: SQLite file of the sessions; created if missing.
        ledger: the node's ledger.
        kept: number of open sessions that are stored. A run has up to two open sessions. Older open
            sessions are deleted with their secrets, and their rounds continue without this node. In
            addition, the newest sessions are stored up to the same number, open or finished.

    Raises:
        LedgerError: the file cannot be used.
    """

    def __init__(self, path: Path, ledger: NodeLedger, kept: int = 8) -> None:
        self._path, self._ledger, self.kept = path, ledger, kept
        with self._translate_errors():
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._db = sqlite3.connect(
                path, isolation_level=None, timeout=30, check_same_thread=False
            )
            # a commit returns only when the removal of the journal is also on disk
            self._db.execute("PRAGMA synchronous = EXTRA")
            self._db.execute("PRAGMA secure_delete = ON")
            self._db.executescript(_SCHEMA)

    def session(self, attempt: str) -> Session | None:
        """The session of an attempt; None if there is none, or if it has been deleted."""
        with self._translate_errors():
            row = self._db.execute(
                "SELECT state FROM sessions WHERE attempt = ?", (attempt,)
            ).fetchone()
        return None if row is None else Session(**json.loads(row[0]))

    def open(self, attempt: str, session: Session) -> None:
        """Store a new session, and delete each session that is neither among the newest sessions
        nor among the newest open sessions.
        """
        with self._translate_errors(), transaction(self._db):
            self._db.execute(
                "INSERT INTO sessions (attempt, state) VALUES (?, ?)", (attempt, _text(session))
            )
            self._db.execute(_FORGET, {"kept": self.kept})
            self._db.execute(
                "DELETE FROM vectors WHERE attempt NOT IN (SELECT attempt FROM sessions)"
            )

    def keep(self, attempt: str, session: Session, vector: bytes | None = None) -> None:
        """Replace the state of a session, add its masked vector if one is given, and return once
        both are on disk. After an error, neither is stored.

        Raises:
            LedgerError: the session is gone, or the file cannot be used.
        """
        with self._translate_errors(), transaction(self._db):
            if vector is not None:
                self._db.execute("INSERT INTO vectors VALUES (?, ?)", (attempt, vector))
            changed = self._db.execute(
                "UPDATE sessions SET state = ? WHERE attempt = ?", (_text(session), attempt)
            )
            if changed.rowcount != 1:
                raise LedgerError(f"the session {attempt} is gone from {self._path}")

    def vector(self, attempt: str) -> bytes | None:
        """The masked vector that may have been sent in an attempt; None if no vector is stored."""
        with self._translate_errors():
            row = self._db.execute(
                "SELECT words FROM vectors WHERE attempt = ?", (attempt,)
            ).fetchone()
        return None if row is None else row[0]

    def bind_keys(self, masking: str, cohort: str) -> str:
        """The only cohort with which the keys of an advert are shared. The first call for the keys
        records its cohort on disk, and later calls return the same cohort.

        Args:
            masking: the public masking key of the advert.
            cohort: digest of a cohort.
        """
        keys = digest("secagg keys", masking)
        first = self._ledger.agreement(keys)
        if first is None:
            self._ledger.agree(keys, cohort)
        return first or cohort

    def signed_survivors(self, cohort: str) -> tuple[Survivors, str] | None:
        """The set of survivors that this node has signed for a cohort, and the signature; None if
        it has signed none.

        Raises:
            LedgerError: the ledger's record cannot be read.
        """
        agreement = self._ledger.agreement(cohort)
        if agreement is None:
            return None
        try:
            fields = json.loads(agreement)
            return Survivors(cohort, tuple(fields["sharing"]), tuple(fields["answered"])), str(
                fields["signature"]
            )
        except (ValueError, KeyError, TypeError) as error:
            raise LedgerError(
                f"the ledger's set of survivors of {cohort} cannot be read: {error!r}"
            ) from error

    def sign(self, survivors: Survivors, signature: str) -> None:
        """Record the only set that is ever signed for its cohort, and return once it is on disk.

        Raises:
            LedgerError: a set was recorded before.
        """
        agreement = {
            "sharing": survivors.sharing,
            "answered": survivors.answered,
            "signature": signature,
        }
        self._ledger.agree(survivors.cohort, json.dumps(agreement))

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError, ValueError, TypeError) as error:
            what = f"the rounds of secure aggregation in {self._path} cannot be used"
            raise LedgerError(explain_failure(what, error)) from error


def _text(session: Session) -> str:
    return json.dumps(vars(session))
