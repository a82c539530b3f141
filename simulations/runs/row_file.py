"""A run's rows, with one JSON object per line and round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from fedlgm.errors import RunError
from fedlgm.files import PRIVATE, PUBLIC, open_private, write_durably
from simulations.runs import strict_json
from simulations.runs.shapes import misfit


class RowFile:
    """Rows in the order of their rounds; a row truncated by a crash, and all rows after it, do not
    count.

    Args:
        path: the file, created with its first row.
        kind: type of a row.
        private: whether only its owner may read it.

    Raises:
        RunError: a complete row has another type, or the file cannot be read.
    """

    def __init__(self, path: Path, kind: Any, *, private: bool = False) -> None:
        self.path, self._kind, self._private = path, kind, private

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self.path.is_file():
            return
        lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        for number, line in enumerate(lines, start=1):
            try:
                row = strict_json.loads(line)
            except ValueError:
                return
            if not isinstance(row, dict) or "round" not in row:
                return
            wrong = misfit(row, self._kind)
            if wrong:
                raise RunError(
                    f"{self.path} was changed in line {number}: {wrong}; restore the file from a "
                    "backup"
                )
            yield row

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one round's row."""
        with self._open_to_append() as file:
            file.write(strict_json.dumps(row) + "\n")

    def truncate(self, round: int) -> None:
        """Remove rows after `round`."""
        if self.path.is_file():
            content = "".join(
                strict_json.dumps(row) + "\n" for row in self if row["round"] <= round
            )
            write_durably(self.path, content.encode(), PRIVATE if self._private else PUBLIC)

    def _open_to_append(self) -> IO[str]:
        return (
            open_private(self.path, "a") if self._private else self.path.open("a", encoding="utf-8")
        )
