"""A public file that records a run's divergence, for processes that wait for its server and for
later readers.

Round and message are functions of released models, so they reveal nothing more.
"""

from __future__ import annotations

from pathlib import Path

from fedlgm.errors import DivergedError
from simulations.runs import strict_json


class DivergedFile:
    """Record of a run's divergence, if its last attempt diverged.

    Args:
        path: the file, in the run's folder.
    """

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, error: DivergedError) -> DivergedError:
        """Write the record.

        Returns:
            The error with the folder in its message.
        """
        strict_json.write(self._path, {"message": str(error)})
        return self._error(str(error))

    def read(self) -> DivergedError | None:
        """The error; None if there is none."""
        try:
            return self._error(
                str(strict_json.loads(self._path.read_text(encoding="utf-8"))["message"])
            )
        except (OSError, ValueError, TypeError, KeyError):  # missing or edited
            return None

    def forget(self) -> None:
        """Remove the record, because the run is tried again."""
        self._path.unlink(missing_ok=True)

    def _error(self, message: str) -> DivergedError:
        return DivergedError(f"{message}. The earlier rounds are in {self._path.parent}")
