"""Files that are whole after a crash: what is kept is never half-written."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import IO, Literal

PRIVATE = 0o600
"""Mode of a file that nobody but its owner may read."""
PUBLIC = 0o666
"""Mode of a file that others may read as far as the process's umask lets them."""


def write_durably(path: Path, content: bytes, mode: int = PRIVATE) -> None:
    """Write a file so that after a crash it is there whole, old or new.

    Args:
        path: the file; what was there is replaced.
        content: all of it.
        mode: of the new file, less the process's umask.
    """
    partial = path.with_name(path.name + ".partial")
    _write(partial, content, os.O_TRUNC, mode)
    partial.replace(path)
    sync_folder(path.parent)


def create_durably(path: Path, content: bytes, mode: int = PRIVATE) -> None:
    """Make a file that is there whole or not at all, and once only, however many processes make it.

    Raises:
        FileExistsError: it is there already, and stays as it is.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    draft.unlink(missing_ok=True)
    try:
        _write(draft, content, os.O_EXCL, mode)
        os.link(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def open_private(path: Path, mode: Literal["a", "w"]) -> IO[str]:
    """A text file that nobody but its owner may read, also from its first moment on.

    Args:
        path: the file; its folder is made, too.
        mode: "a" to add to it, "w" to start it anew.
    """
    path.parent.mkdir(mode=0o700, exist_ok=True)
    flags = os.O_CREAT | os.O_WRONLY | (os.O_APPEND if mode == "a" else os.O_TRUNC)
    return os.fdopen(os.open(path, flags, PRIVATE), mode, encoding="utf-8")


def sync_folder(folder: Path) -> None:
    """Have the names in a folder survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write(path: Path, content: bytes, flag: int, mode: int) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | flag, mode), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
