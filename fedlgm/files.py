"""Files that are whole after a crash: what is kept is never half-written."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Literal

PRIVATE = 0o600
"""Mode of a file that nobody but its owner may read."""
PUBLIC = 0o666
"""Mode of a file that others may read as far as the process's umask lets them."""


@contextmanager
def replacing(path: Path, mode: int = PRIVATE, *, shared: bool = False) -> Iterator[Path]:
    """A file to write in the place of `path`, which takes that place, on disk, when the block ends.

    After an error or a crash `path` is what it was before, whole.

    Args:
        path: the file; what was there is replaced.
        mode: of the new file, less the process's umask; it has it from the start, before anything is written.
        shared: whether several processes or threads may write it at once: then the last to end counts. Each writes a
            file of its own, which stays behind where the process is killed; otherwise the next writer removes it.

    Raises:
        OSError: it cannot be written; the block's own errors pass unchanged.

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "figures.json"
        >>> with replacing(target) as partial:
        ...     _ = partial.write_text("[1, 2]")
        ...     target.exists()
        False
        >>> target.read_text(), [file.name for file in target.parent.iterdir()]
        ('[1, 2]', ['figures.json'])
    """
    partial = _draft(path) if shared else path.with_name(path.name + ".partial")
    partial.unlink(missing_ok=True)
    try:
        os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode))
        yield partial
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


def write_durably(path: Path, content: bytes, mode: int = PRIVATE, *, shared: bool = False) -> None:
    """Write a file so that after a crash it is there whole, old or new.

    Args:
        path: the file; what was there is replaced.
        content: all of it.
        mode: see `replacing`.
        shared: see `replacing`.
    """
    with replacing(path, mode, shared=shared) as partial:
        partial.write_bytes(content)


def create_durably(path: Path, content: bytes, mode: int = PRIVATE) -> None:
    """Make a file that is there whole or not at all, and once only, however many processes make it.

    Raises:
        FileExistsError: it is there already, and stays as it is.
    """
    draft = _draft(path)
    draft.unlink(missing_ok=True)
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
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


def _draft(path: Path) -> Path:
    """A name beside `path` that no other process or thread uses."""
    return path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
