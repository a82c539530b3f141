"""The rings of a run's correlated noise, in a private file with one line per round, written before
its release.

The noise of every later round depends on the rings, so a run continues only if they are complete. A
reader of the file and of the run's releases can compute the sums. The file is therefore kept under
`private/`, never in a checkpoint, and removed when the run is finished.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from fedlgm.errors import RunError
from fedlgm.files import sync_folder
from fedlgm.noise.keys import KeyRing
from fedlgm.noise.run_noise import NoiseRings


class NoiseFile(NoiseRings):
    """Rings that survive their process.

    Args:
        path: the file, which is created with the first ring.

    Raises:
        RunError: the file is damaged.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        length = 0
        for line in path.read_bytes().splitlines(keepends=True) if path.is_file() else ():
            if not line.endswith(b"\n"):
                break  # a crash cut this line short before its round was released
            try:
                round_, root = line.split()
                super().keep(int(round_), KeyRing(int(root, 16), secret=True))
            except ValueError as error:
                raise RunError(
                    f"{path} is damaged: restore it from a backup, or start a new run"
                ) from error
            length += len(line)
        self._whole = length

    def require(self, rounds: int, digest: str) -> None:
        """Refuse rings other than those of a checkpoint.

        Raises:
            RunError: the rings of its rounds have another digest.
        """
        if self.digest(rounds) != digest:
            raise RunError(
                f"{self._path} does not belong to the rounds before the last checkpoint: restore "
                "it from a backup, or start a new run"
            )

    def keep(self, round: int, ring: KeyRing) -> None:
        """Store the ring of a round on disk; the last ring of a round counts."""
        super().keep(round, ring)
        line = f"{round} {ring.root:032x}\n".encode("ascii")
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        fresh = not self._path.exists()
        with os.fdopen(
            os.open(self._path, os.O_CREAT | os.O_WRONLY, stat.S_IRUSR | stat.S_IWUSR), "wb"
        ) as file:
            file.truncate(self._whole)
            file.seek(self._whole)
            file.write(line)
            file.flush()
            os.fsync(file.fileno())
        self._whole += len(line)
        if fresh:
            sync_folder(self._path.parent)
