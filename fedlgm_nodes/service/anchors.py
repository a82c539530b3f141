"""Heads of other parties' chains that this node has signed as a witness.

A server sends the head of its run's releases, and the node signs it. The node need not have taken
part in these releases, and its signature says only that the head existed when it was signed. The
node signs only one head for each round of a run, and afterwards no new head of an earlier round. A
server therefore cannot replace a chain under the same label. The record has the time of each
signature, for anyone who suspects that a run was rewritten under another label.
"""

from __future__ import annotations

import re
import sqlite3
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedlgm.privacy.signed import anchor_text
from fedlgm_nodes.policy import Refusal

_SCHEMA = """CREATE TABLE IF NOT EXISTS anchors (
    run TEXT, round INTEGER, head TEXT NOT NULL, signed_at TEXT NOT NULL, PRIMARY KEY (run, round)
) WITHOUT ROWID"""
_MOST = 100_000  # largest number of rows, so that no sender can fill the disk


class AnchorRecord:
    """The record of signed heads.

    Args:
        path: SQLite file, which is created when the first head is signed.
        signer: key of the node's service.
    """

    def __init__(self, path: Path, signer: Ed25519PrivateKey) -> None:
        self._path, self._signer = path, signer

    def sign(self, run: str, round: int, head: str) -> str:
        """Record a head and return its signature, in hexadecimal. The record is on disk before this
        returns.

        Args:
            run: label of the run.
            round: number of the round, from 1.
            head: head of the run's releases after this round.

        Raises:
            Refusal: the text is not a head, another head of this round or a head of a later round
                was signed, or the record is full.
        """
        if not re.fullmatch("[0-9a-f]{64}", head) or round < 1:
            raise Refusal("malformed", "an anchor needs a round and a head of 64 digits")
        with closing(sqlite3.connect(self._path)) as database, database:
            database.execute("PRAGMA synchronous = FULL")
            database.execute(_SCHEMA)
            self._record(database, run, round, head)
        return self._signer.sign(anchor_text(round, head)).hex()

    def _record(self, database: sqlite3.Connection, run: str, round: int, head: str) -> None:
        known = database.execute(
            "SELECT head FROM anchors WHERE run = ? AND round = ?", (run, round)
        ).fetchone()
        if known == (head,):
            return
        last, rows = database.execute(
            "SELECT (SELECT max(round) FROM anchors WHERE run = ?), (SELECT count(*) FROM anchors)",
            (run,),
        ).fetchone()
        if last is not None and round <= last:
            raise Refusal(
                "anchor", f"this node has signed another head of this run, of round {last}"
            )
        if rows >= _MOST:
            raise Refusal(
                "anchor", f"this node signs at most {_MOST} heads, and has already signed them"
            )
        now = datetime.now(UTC).isoformat()
        database.execute("INSERT INTO anchors VALUES (?, ?, ?, ?)", (run, round, head, now))
