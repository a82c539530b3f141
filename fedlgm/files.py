"""Functions that read files, and functions that write files so that a crash never leaves a partly
written file.
"""

from __future__ import annotations

import codecs
import errno
import os
import secrets
import shutil
import sqlite3
import stat
import threading
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, Literal

from fedlgm.errors import ConfigError, DiskError, RunError

_OF_DISKS = {
    errno.ENOSPC: "the disk is full; free some space",
    errno.EDQUOT: "the disk quota is used up; delete files of this user",
    errno.EFBIG: "the file is larger than is permitted; raise the limit of this user",
    errno.EROFS: "the file system is read-only; choose another folder",
}
_CLASH = "a file has the name of a folder, or a folder has the name of a file; choose another path"
_REASONS = _OF_DISKS | {
    errno.ENOENT: "there is no such file or folder; check the path",
    errno.EISDIR: "it is a folder; give the path of a file",
    errno.ENAMETOOLONG: "its name is too long; choose a shorter one",
    errno.EACCES: "this user may not use it; change its owner or its mode, or choose another path",
    errno.EEXIST: _CLASH,
    errno.ENOTDIR: _CLASH,
}
"""Reason and remedy for each error number of the operating system."""
PRIVATE = 0o600
"""Mode of a file that only its owner may read or write."""
PUBLIC = 0o666
"""Mode of a file that others may read and write as far as the process's umask permits."""


def path_of(name: str, value: Any) -> Path:
    """Convert an argument to a path, in which "~" stands for the user's home. The file need not
    exist.

    Raises:
        ConfigError: the value is not a path, or the operating system refuses access to it, as in a
            folder of another user.

    Example:
        >>> path_of("run_dir", "runs/first").name
        'first'
    """
    try:
        path = Path(value).expanduser()
        str(path).encode()  # the path must be text that recipes, reports and JSON can contain
        with suppress(FileNotFoundError, NotADirectoryError):
            path.lstat()
    except (
        TypeError,
        ValueError,
    ) as error:  # zero bytes and characters that UTF-8 cannot encode cause a ValueError
        raise ConfigError(f"{name} must be a path, such as 'runs/first', got {value!r}") from error
    except RuntimeError as error:
        raise ConfigError(
            f"{name} {str(value)[:80]!r}: the user's home is not known; write a name that begins "
            "with ~ as ./~..."
        ) from error
    except OSError as error:
        error.filename = None  # the name may have thousands of characters
        what = f"{name} {str(value)[:80]!r} cannot be used"
        raise ConfigError(explain_failure(what, error)) from error
    return path


def is_used(path: Path) -> bool:
    """Whether there is anything at a path except an empty folder, so that no new folder can be
    created there.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as empty:
        ...     is_used(Path(empty)), is_used(Path(empty).parent)
        (False, True)
    """
    return path.exists() and (not path.is_dir() or path.is_symlink() or any(path.iterdir()))


def read_toml(path: Path) -> dict[str, Any]:
    """Read the values in a TOML file.

    Raises:
        ConfigError: the file cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(_decode(path.read_bytes()))
    except OSError as error:
        raise ConfigError(explain_failure(f"{path} cannot be read", error)) from error
    except (
        ValueError,
        RecursionError,
    ) as error:  # numbers of thousands of digits and deeply nested lists cause other errors
        raise ConfigError(f"{path} is not valid TOML: {error}") from error


def _decode(content: bytes) -> str:
    """Decode the content of a text file. The encoding is UTF-8, with or without a byte order mark,
    or UTF-16 with such a mark, as some Windows editors write it.
    """
    wide = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    text = content.decode("utf-16" if wide else "utf-8-sig")
    return text.replace("\r\n", "\n")


class Under:
    """A class attribute for a path relative to the `path` of an object, for classes that describe
    folders.

    Args:
        place: the path relative to the folder.

    Example:
        >>> class Run:
        ...     path = Path("runs/first")
        ...     ledger_file = Under("ledger.sqlite")
        >>> Run().ledger_file.as_posix()
        'runs/first/ledger.sqlite'
    """

    def __init__(self, place: str) -> None:
        self._place = place

    def __get__(self, folder: Any, owner: type) -> Path:
        return Path(folder.path, self._place)


@contextmanager
def replacing(path: Path, mode: int = PRIVATE, *, shared: bool = False) -> Iterator[Path]:
    """Yield the path of a draft, an empty file that replaces `path` on disk when the block ends.

    If there is an error or a crash in the block, `path` remains unchanged.

    Args:
        path: the file to replace.
        mode: mode of the new file, from which the bits of the process's umask are removed. The mode
            is set before anything is written.
        shared: whether several processes or threads may write the file at once. If so, each writer
            has a separate draft, the last writer to finish determines the content, and the draft of
            a killed process remains on disk. Otherwise all writers use one name for the draft, and
            the next writer removes the draft of a killed process.

    Raises:
        OSError: the file cannot be written; errors in the block are raised unchanged.

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
        permitted = stat.S_IMODE(partial.stat().st_mode)
        yield partial
        partial.chmod(permitted)  # safetensors may have given it another mode
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync_folder(path.parent)


def explain_failure(what: str, error: Exception, remedy: str = "") -> str:
    """Write a sentence that says what failed, why, and what to do.

    Args:
        what: what failed, and where. If the error names a file that is not in this text, the name
            is added.
        error: an error of the operating system, or of a library that has read the file.
        remedy: what to do; by default the usual remedy for the error.

    Example:
        >>> explain_failure("no.csv cannot be read", FileNotFoundError(errno.ENOENT, "", "no.csv"))
        'no.csv cannot be read: there is no such file or folder; check the path'
    """
    said = str(getattr(error, "strerror", None) or error).strip() or type(error).__name__
    unknown = f"{said.splitlines()[0]}; check the content and the owner of the file"
    reason, _, usual = _REASONS.get(getattr(error, "errno", None) or 0, unknown).rpartition("; ")
    file = str(getattr(error, "filename", None) or "")
    where = what if file in what else f"{what}: {file}"
    return f"{where}: {reason}; {remedy or usual}"


@contextmanager
def disk_errors(folder: Path, what: str) -> Iterator[None]:
    """Replace errors of the operating system in a block that writes to a folder with a DiskError
    whose message is one sentence. Other errors are raised unchanged.

    Args:
        folder: the folder that the block works on.
        what: noun for the folder in the message.

    Raises:
        DiskError: a disk is full or read-only, or a file in the folder cannot be used.

    Example:
        >>> with disk_errors(Path("runs/first"), "run"):
        ...     raise OSError(errno.ENOSPC, "No space left on device")
        Traceback (most recent call last):
            ...
        fedlgm.errors.DiskError: cannot work on the run runs/first: the disk is full; ...
    """
    try:
        yield
    except OSError as error:
        named = (
            Path(os.fsdecode(error.filename))
            if isinstance(error.filename, str | bytes | os.PathLike)
            else None
        )
        inside = named is not None and named.absolute().is_relative_to(folder.absolute())
        if error.errno not in _OF_DISKS and not inside:
            raise
        raise DiskError(
            explain_failure(
                f"cannot work on the {what} {folder}",
                error,
                "the user must own the files, and the disk must be writable and have free space",
            )
        ) from error


def write_whole(target: Path, save: Callable[[Path], Any]) -> None:
    """Write a file for the user, either completely or not at all.

    Args:
        target: the file.
        save: function that writes the content to a given path, whose suffix may differ from the
            target's.

    Raises:
        RunError: the file cannot be written.
    """
    if not target.parent.is_dir():
        raise RunError(
            f"cannot write {target}: there is no folder {target.parent}; create it first"
        )
    try:
        with replacing(target, PUBLIC, shared=True) as partial:
            save(partial)
    except (
        Exception
    ) as error:  # safetensors, zipfile and the operating system raise errors of different types
        raise RunError(explain_failure(f"cannot write {target}", error)) from error


@contextmanager
def draft_folder(path: Path) -> Iterator[Path]:
    """Yield the path of a draft folder, which the block creates and which is renamed to `path` when
    the block ends. If there is an error in the block, the draft is removed.

    Raises:
        OSError: the draft cannot be renamed; errors in the block are raised unchanged.
    """
    draft = path.with_name(f".{path.name}.draft-{secrets.token_hex(4)}")
    try:
        yield draft
        draft.rename(path)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    sync_folder(path.parent)


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Run the block as one write transaction, which is committed when the block ends and rolled
    back after an error.
    """
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # SQLite itself has already rolled back if the disk is full
            db.execute("ROLLBACK")
        raise


def write_durably(path: Path, content: bytes, mode: int = PRIVATE, *, shared: bool = False) -> None:
    """Write a file so that a crash leaves either the old or the new content.

    Args:
        path: the file to replace.
        content: the new content.
        mode: see `replacing`.
        shared: see `replacing`.
    """
    with replacing(path, mode, shared=shared) as partial:
        partial.write_bytes(content)


def create_durably(path: Path, content: bytes, mode: int = PRIVATE) -> None:
    """Create a file, either completely or not at all. If several processes try this at once, only
    one of them succeeds.

    Raises:
        FileExistsError: the file already exists; it is not changed.
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
    sync_folder(path.parent)


def open_private(path: Path, mode: Literal["a", "w"]) -> IO[str]:
    """Open a text file for writing. A new file is created with a mode that lets only its owner read
    or write it.

    Args:
        path: the file. Its folder is created if it does not exist.
        mode: "a" to append, "w" to overwrite.
    """
    flags = os.O_CREAT | os.O_WRONLY | (os.O_APPEND if mode == "a" else os.O_TRUNC)
    try:
        descriptor = os.open(path, flags, PRIVATE)
    except FileNotFoundError:
        path.parent.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(path, flags, PRIVATE)
    return os.fdopen(descriptor, mode, encoding="utf-8")


def close_folder(folder: Path) -> None:
    """Remove other users' rights to a folder and its contents, if the folder exists. Paths whose
    rights cannot be changed are skipped.
    """
    for path in (folder, *folder.rglob("*")) if folder.is_dir() else ():
        mode = stat.S_IMODE(path.lstat().st_mode)
        if mode & 0o077 and not path.is_symlink():
            with suppress(OSError):  # another user owns it, or the file system has no modes
                path.chmod(mode & 0o700)


def sync_folder(folder: Path) -> None:
    """Flush a folder to disk, so that its file names survive a crash."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _draft(path: Path) -> Path:
    """Return a path in the same folder as `path` that no other process or thread uses."""
    return path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
