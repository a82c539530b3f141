"""How far each node's ledger was when it last answered: it shows nodes whose ledger was exchanged or rolled back."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

from fedlgm.errors import RunError
from fedlgm.node_protocol import Position


class LedgerPositions:
    """The last position of every client's ledger that its service has signed.

    Args:
        file: JSON file that keeps them over runs; None: they are forgotten with this object.

    Raises:
        RunError: the file is damaged.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._known = {} if file is None or not file.is_file() else _read(file)

    def get(self, client: int) -> Position | None:
        """The client's last position, None if it has never answered."""
        return self._known.get(client)

    def problem(self, client: int, position: Position) -> str:
        """Why this cannot be the same ledger later on; empty if it can."""
        known = self._known.get(client)
        if known is None:
            return ""
        if known.ledger != position.ledger:
            return "its ledger was exchanged for another one"
        if position.seq < known.seq or (position.seq == known.seq and position.head != known.head):
            return f"its ledger was rolled back: {position.seq} releases, {known.seq} were signed for before"
        return ""

    def put(self, client: int, position: Position) -> None:
        """Remember it, on disk before anything else happens."""
        self._known[client] = position
        if self._file is None:
            return
        text = json.dumps({str(client): position.values() for client, position in self._known.items()})
        partial = self._file.with_suffix(f".{secrets.token_hex(4)}.partial")  # two runs may share it
        with partial.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(self._file)


def _read(file: Path) -> dict[int, Position]:
    try:
        raw = json.loads(file.read_text())
        found = {int(client): Position.of(value) for client, value in raw.items()}
    except (ValueError, AttributeError) as error:
        raise RunError(f"{file} is damaged: {error}") from error
    return {client: position for client, position in found.items() if position is not None}
