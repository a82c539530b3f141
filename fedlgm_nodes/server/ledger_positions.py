"""The ledger position of each node at its last answer, by which replaced and rolled back ledgers
are detected.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Mapping
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from fedlgm.errors import RunError
from fedlgm.files import PUBLIC, write_durably
from fedlgm_nodes.protocol.messages import Position, record_of


class LedgerPositions:
    """For every client, the last position of its ledger that its enrolled service has signed.

    Positions that another service has signed under the client's number, such as the service of a
    replaced node, do not count. Several runs may share the file.

    Args:
        file: JSON file that keeps the positions for later runs; None if they are kept only in this
            object.
        keys: client -> public key of its enrolled service.

    Raises:
        RunError: the file is damaged.
    """

    def __init__(self, file: Path | None, keys: Mapping[int, Ed25519PublicKey]) -> None:
        self._file, self._keys = file, keys
        self._known: dict[int, Position] = {}
        self._stored: dict[int, Position] = {}
        self._read_at: tuple[int, ...] | None = None
        self._read()

    def get(self, client: int) -> Position | None:
        """The client's last position, from this run or another; None if the client has never
        answered.

        `problem` compares an answer's position with the position that this call returned when the
        question was made, because two runs may receive one node's answers in a different order.
        """
        position = self._own(client, self._read())
        if position is not None:
            self._known[client] = position
        return self._known.get(client)

    def problem(self, client: int, position: Position) -> str:
        """The reason why this position cannot be the same or a later state of the client's known
        ledger; empty if it can.
        """
        previous = self._known.get(client)
        if previous is None:
            return ""
        if previous.ledger != position.ledger:
            return "its ledger was replaced by another one"
        if position.seq < previous.seq or (
            position.seq == previous.seq and position.head != previous.head
        ):
            return (
                f"its ledger was rolled back: it has {position.seq} releases, but its service "
                f"signed for {previous.seq} earlier"
            )
        return ""

    def put(self, client: int, position: Position) -> None:
        """Store a client's position, on disk if there is a file."""
        self._known[client] = position
        if self._file is None:
            return
        with self._file.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            stored = dict(self._read())
            other = self._own(client, stored)
            if other is None or (other.ledger == position.ledger and other.seq < position.seq):
                stored[client] = position
                text = json.dumps(
                    {str(client): position.values() for client, position in stored.items()}
                )
                write_durably(self._file, text.encode(), PUBLIC)

    def _own(self, client: int, stored: Mapping[int, Position]) -> Position | None:
        """A client's position in `stored`; None if there is none that its enrolled service has
        signed.
        """
        position = stored.get(client)
        return (
            position
            if position is not None and client in self._keys and position.valid(self._keys[client])
            else None
        )

    def _read(self) -> Mapping[int, Position]:
        """Read the positions of the file, if it has changed since it was last read."""
        if self._file is None or not self._file.is_file():
            return self._stored
        status = self._file.stat()
        state = status.st_ino, status.st_mtime_ns, status.st_size
        if state != self._read_at:
            self._stored, self._read_at = _parse(self._file), state
        return self._stored


def _parse(file: Path) -> dict[int, Position]:
    try:
        raw = json.loads(file.read_text())
        entries = {int(client): record_of(Position, value) for client, value in raw.items()}
    except (ValueError, AttributeError) as error:
        raise RunError(f"{file} is damaged: {error}") from error
    positions = {client: position for client, position in entries.items() if position is not None}
    if len(positions) < len(entries):
        raise RunError(f"{file} is damaged: an entry is not the position of a ledger")
    return positions
