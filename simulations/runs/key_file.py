"""The root of an unseeded run's keys, in a private file until the run is finished.

A reader of the file and of the run's releases can compute the sums. The file is therefore kept
under `private/`, and a checkpoint holds only a name of the root.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fedlgm.errors import RunError
from fedlgm.files import create_durably
from fedlgm.noise.keys import KeyRing


class KeyFile:
    """A root, and the last row of the ledger whose release was made with lost keys.

    Args:
        path: the file.
        draw: draws a root; default: 128 bits from the operating system.
    """

    def __init__(self, path: Path, draw: Callable[[], int] | None = None) -> None:
        self.path = path
        self._draw = draw or (lambda: KeyRing.from_seed(None).root)

    def load_or_create(self, charged: int, needed: bool, name: str | None) -> tuple[KeyRing, int]:
        """The ring, and `charged` at the time when its root was drawn. If the file is missing, a
        root is drawn.

        Args:
            charged: position of the ledger.
            needed: whether the run cannot continue with other keys.
            name: name of the keys that the last checkpoint states; None if there is no checkpoint.

        Raises:
            RunError: the file is damaged, or the run needs its keys and the file is missing or
                holds other keys.
        """
        if not self.path.is_file():
            if charged and needed:
                raise RunError(
                    f"{self.path} is gone: without it, neither the next participants nor the noise "
                    "of the released rounds can be determined; restore it from a backup, "
                    "or start a new run"
                )
            self.create(charged)
        try:
            ring, since = self.read()
        except ValueError as error:
            lost = (
                "delete it; the run then repeats the releases since its last checkpoint with "
                "fresh noise, which costs privacy again"
            )
            raise RunError(
                f"{self.path} is damaged: restore it from a backup, or "
                f"{'start a new run' if needed else lost}"
            ) from error
        if needed and name not in (None, name_of(ring)):
            raise RunError(
                f"{self.path} does not belong to the rounds before the last checkpoint: with other "
                "keys clients would take part sooner than they may; restore it from a backup, or "
                "start a new run"
            )
        return ring, since

    def create(self, charged: int) -> None:
        """Draw a root. If another process was faster, that process's root is kept.

        Args:
            charged: position of the ledger.
        """
        self.path.parent.mkdir(mode=0o700, exist_ok=True)
        with suppress(FileExistsError):
            create_durably(self.path, f"{self._draw():032x} {charged}\n".encode("ascii"))

    def forget(self) -> None:
        """Remove the file, and drafts of processes that were killed while writing it."""
        self.path.unlink(missing_ok=True)
        for draft in self.path.parent.glob(f".{self.path.name}.*"):
            draft.unlink(missing_ok=True)

    def read(self) -> tuple[KeyRing, int]:
        """The key ring, and `charged` at the time when the root was drawn.

        Raises:
            ValueError: the file is damaged.
        """
        root, charged = self.path.read_text(encoding="ascii").split()
        return KeyRing(int(root, 16), secret=True), int(charged)


def name_of(keys: KeyRing) -> str:
    """Name of a ring, hexadecimal, which reveals nothing about it."""
    return hashlib.sha256(keys.derive(b"name").root.to_bytes(16, "little")).hexdigest()
