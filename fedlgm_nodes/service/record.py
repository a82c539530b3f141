"""The node's record of requests, decisions, releases, refusals, policies and pauses, as one chain
of rows.

Each row is one line of JSON. Its head is a keyed digest of the row and of the head before it, so a
row that was edited, removed, copied or written without the node's service key is recognised. A
witness file in another folder holds the newest head, which reveals an older copy. The service and
the operator's commands append rows under one lock, and a row is on disk before it takes effect.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedlgm.errors import LedgerError
from fedlgm.files import explain_failure
from fedlgm_nodes.protocol.messages import canonical
from fedlgm_nodes.service.witness import Seen
from fedlgm_nodes.service.witness import read as read_witness
from fedlgm_nodes.service.witness import write as write_witness

KINDS = ("request", "approve", "deny", "release", "refusal", "policy", "pause", "resume")
# largest number of refusals that are recorded per day, because anyone may be able to cause refusals
_MOST_REFUSALS = 100


class Record:
    """The record's file, and the state that follows from its rows.

    Args:
        path: file of JSON lines, created with the first row.
        witness: JSON file, created with the first row, best kept on another disk.
        ledger: identity of the node's ledger, from which the chain starts.
        key: the node's service key, a secret of 32 bytes.

    Raises:
        LedgerError: a row was changed or removed, or the file is older than its witness.
    """

    def __init__(self, path: Path, witness: Path, ledger: str, key: bytes) -> None:
        self.path, self._witness, self._ledger = path, witness, ledger
        self._key = hmac.digest(key, b"fedlgm record", "sha256")
        self.rows: list[dict[str, Any]] = []
        self.requests: dict[str, dict[str, Any]] = {}
        self.paused: dict[str, Any] | None = None
        self._decisions: dict[str, dict[str, Any]] = {}
        self._releases: dict[int, str] = {}
        self._counts: dict[str, int] = {}
        self._refusals: dict[str, set[tuple[str, str]]] = {}  # by day
        self.policy: dict[str, Any] = {}
        """The newest row that records a policy; empty if there is none."""
        self._read, self._head = 0, ledger
        seen = read_witness(witness) if witness.exists() else Seen(ledger, 0, ledger, 0)
        self.refresh()
        if len(self.rows) > 1 and not witness.exists():
            raise LedgerError(f"the witness {witness} of the record is gone; restore it")
        heads = [ledger, *(row["head"] for row in self.rows)]
        if seen.ledger != ledger or seen.seq >= len(heads) or heads[seen.seq] != seen.head:
            raise LedgerError(
                f"the record {path} is not the one that its witness has seen, or is older; restore "
                "the newest backup"
            )

    def refresh(self) -> None:
        """Read the rows that another process has appended.

        Raises:
            LedgerError: see `Record`.
        """
        try:
            size = self.path.stat().st_size
        except FileNotFoundError:
            size = 0
        if size == self._read:
            return
        if size < self._read:
            raise LedgerError(f"the record {self.path} was cut short or replaced while it was read")
        try:
            with self.path.open("rb") as file:
                file.seek(self._read)
                lines = file.read()
        except OSError as error:
            raise LedgerError(
                explain_failure(f"the record {self.path} cannot be read", error)
            ) from error
        # Text after the last end of a line is an incomplete row, whose writer was killed. Such a
        # row has no effect.
        for line in lines[: lines.rfind(b"\n") + 1].splitlines(keepends=True):
            self._take(line)

    def _take(self, line: bytes) -> None:
        number = len(self.rows) + 1
        try:
            row = json.loads(line)
            head = row.pop("head")
            valid = row["seq"] == number and row["kind"] in KINDS
            valid &= hmac.compare_digest(head, self._head_after(row))
        except (ValueError, KeyError, TypeError, AttributeError):
            valid = False
        if not valid:
            raise LedgerError(
                f"row {number} of the record {self.path} was changed, or was not written by this "
                "node; restore the newest backup"
            )
        self._read, self._head = self._read + len(line), head
        self.rows.append(row | {"head": head})
        self._understand(row)

    def _understand(self, row: dict[str, Any]) -> None:
        kind, work = row["kind"], row.get("work", "")
        if kind == "request":
            self.requests[work] = row
        elif kind in ("approve", "deny"):
            self._decisions[work] = row
        elif kind == "release":
            self._releases[row["release"]] = row["ledger_head"]
            self._counts[work] = self._counts.get(work, 0) + 1
        elif kind == "refusal":
            self._refusals.setdefault(row["at"][:10], set()).add((row["code"], row["why"]))
        elif kind == "policy":
            self.policy = row
        elif kind in ("pause", "resume"):
            self.paused = row if kind == "pause" else None

    def _head_after(self, row: dict[str, Any]) -> str:
        text = f"{self._head} {canonical(row)}".encode()
        return hmac.new(self._key, text, hashlib.sha256).hexdigest()

    def append(self, kind: str, **fields: Any) -> None:
        """Append one row, and return once the row and the witness are on disk.

        Raises:
            LedgerError: the row cannot be written, or the record was changed.
        """
        with self._locked() as file:
            self.refresh()
            row: dict[str, Any] = {
                "seq": len(self.rows) + 1,
                "at": datetime.now(UTC).isoformat(),
                "kind": kind,
            }
            row |= fields
            head = self._head_after(row)
            os.ftruncate(file, self._read)  # removes an incomplete row, whose writer was killed
            line = canonical(row | {"head": head}).encode() + b"\n"
            if os.pwrite(file, line, self._read) != len(line):
                raise OSError("the disk is full")
            os.fsync(file)
            self._take(line)
            write_witness(self._witness, Seen(self._ledger, row["seq"], head, 0))

    @contextmanager
    def _locked(self) -> Iterator[int]:
        try:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                yield file
            finally:
                os.close(file)
        except OSError as error:
            what = f"the record {self.path} cannot be written"
            raise LedgerError(explain_failure(what, error)) from error

    def refuse(self, code: str, why: str, asked_by: str, run: str) -> None:
        """Record a refusal, unless it was recorded with the same code and reason today, or 100
        refusals were recorded today.
        """
        today = datetime.now(UTC).date().isoformat()
        recorded = self._refusals.get(today, set())
        if (code, why) not in recorded and len(recorded) < _MOST_REFUSALS:
            self.append("refusal", code=code, why=why, asked_by=asked_by, run=run)

    def forget(self, ledger: str) -> None:
        """Make the witness accept any record that belongs to `ledger`. This is for a node whose
        ledger was rolled back.

        The service refuses to start until the right ledger is restored, together with its record.
        """
        write_witness(self._witness, Seen(ledger, 0, ledger, 0))

    def note_policy(self, policy: str, values: dict[str, Any]) -> None:
        """Record a policy, unless it equals the newest recorded policy.

        Args:
            policy: digest of the policy's file.
            values: values of the policy, as in JSON.

        Raises:
            LedgerError: see `append`.
        """
        if (policy, values) != (self.policy.get("policy"), self.policy.get("values")):
            self.append("policy", policy=policy, values=values)

    def recorded(self, release: int) -> bool:
        """Whether the release with this number in the ledger has a row in this record."""
        return release in self._releases

    def release_heads(self) -> dict[int, str]:
        """For each recorded release, its number and the head of the ledger's chain after it."""
        return dict(self._releases)

    def state(self, work: str) -> str:
        """The state of a work: "waits", "approved", "denied", "expired" or "used up".

        Args:
            work: digest of the work.
        """
        decision = self._decisions.get(work)
        if decision is None:
            return "waits"
        if decision["kind"] == "deny":
            return "denied"
        if decision["until"] and datetime.now(UTC).date().isoformat() > decision["until"]:
            return "expired"
        most = decision["releases"]
        used = self._counts.get(work, 0)
        return "approved" if most is None or used < most else "used up"

    def find(self, prefix: str) -> dict[str, Any]:
        """The only request whose digest begins with `prefix`, which must have at least 8 digits.

        Raises:
            LedgerError: the prefix is too short, or no request or more than one has such a digest.
        """
        fits = [work for work in self.requests if len(prefix) >= 8 and work.startswith(prefix)]
        if len(fits) != 1:
            raise LedgerError(
                f"{len(fits)} requests have a digest that begins with {prefix[:64]!r} (8 digits or "
                "more are needed); `fedlgm node requests` lists them"
            )
        return self.requests[fits[0]]
