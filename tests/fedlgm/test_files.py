from __future__ import annotations

import ast
import builtins
import errno
import os
import re
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedlgm import files
from fedlgm.files import PRIVATE, PUBLIC, create_durably, draft_folder, replacing, write_durably
from fedlgm.package_conflicts import PACKAGES


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("shared", [False, True])
def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path: Path, shared: bool) -> None:
    path = tmp_path / "kept"
    write_durably(path, b"old", PUBLIC, shared=shared)

    def failing() -> None:
        with replacing(path, shared=shared) as partial:
            partial.write_bytes(b"new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("shared", [False, True])
def test_a_file_has_its_mode_from_the_start_whatever_was_there(
    tmp_path: Path, shared: bool
) -> None:
    path = tmp_path / "kept"
    path.write_bytes(b"old")
    path.chmod(0o644)
    (tmp_path / "kept.partial").write_bytes(b"of a process that was killed")
    with replacing(path, PRIVATE, shared=shared) as partial:
        assert (mode(partial), partial.read_bytes()) == (0o600, b"")
        partial.write_bytes(b"new")
    assert (mode(path), path.read_bytes()) == (0o600, b"new")
    before = os.umask(0o022)
    try:
        write_durably(path, b"newer", PUBLIC, shared=shared)
    finally:
        os.umask(before)
    assert (mode(path), path.read_bytes()) == (0o644, b"newer")


@pytest.mark.parametrize("wanted", [0o600, 0o644])
def test_a_library_that_writes_another_file_changes_no_mode(tmp_path: Path, wanted: int) -> None:
    """As safetensors does, whose files only their owner could read."""
    before = os.umask(0o022)
    try:
        with replacing(tmp_path / "model", {0o600: PRIVATE, 0o644: PUBLIC}[wanted]) as partial:
            other = tmp_path / "other"
            other.write_bytes(b"new")
            other.chmod(0o640)
            other.rename(partial)
    finally:
        os.umask(before)
    assert (mode(tmp_path / "model"), (tmp_path / "model").read_bytes()) == (wanted, b"new")


def test_a_partial_file_of_a_killed_process_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "kept.partial").write_bytes(b"cut short")
    write_durably(tmp_path / "kept", b"whole")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("kept", b"whole")]


def test_two_may_write_one_file_at_once_where_it_is_shared(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    with replacing(path, shared=True) as partial:
        partial.write_bytes(b"slow")
        other = threading.Thread(target=lambda: write_durably(path, b"fast", shared=True))
        other.start()
        other.join()
        assert path.read_bytes() == b"fast"
    assert path.read_bytes() == b"slow"
    assert list(tmp_path.iterdir()) == [path]


def test_contents_and_names_are_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a library writes by renaming a file of its own over the partial one is synced, too."""
    synced, fsync = [], os.fsync

    def noted(descriptor: int) -> None:
        synced.append(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    with replacing(tmp_path / "kept") as partial:
        (tmp_path / "draft").write_bytes(b"whole")
        (tmp_path / "draft").replace(partial)
    assert synced == [(tmp_path / "kept").stat().st_ino, tmp_path.stat().st_ino]


def test_a_file_is_created_once(tmp_path: Path) -> None:
    create_durably(tmp_path / "key", b"first")
    with pytest.raises(FileExistsError):
        create_durably(tmp_path / "key", b"second")
    assert [(file.name, file.read_bytes(), mode(file)) for file in tmp_path.iterdir()] == [
        ("key", b"first", 0o600)
    ]


def test_names_of_new_files_and_folders_are_on_disk_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power failure can take a run's keys, or a search's charge, after what they allowed has
    left."""
    seen: list[list[str]] = []

    def synced(folder: Path) -> None:
        seen.append(sorted(path.name for path in folder.iterdir()))

    monkeypatch.setattr(files, "sync_folder", synced)
    create_durably(tmp_path / "keys", b"root")
    with draft_folder(tmp_path / "run") as draft:
        draft.mkdir()
    assert seen == [["keys"], ["keys", "run"]]


ROOT = Path(__file__).parents[2]
SYSTEM = {
    name
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, OSError)
}
SENTENCES = {"explain_failure"}


def own_messages(source: str) -> Iterator[str]:
    """Messages that a handler of errors of the system makes itself from the error's text."""
    for handler in ast.walk(ast.parse(source)):
        if not isinstance(handler, ast.ExceptHandler) or not handler.name or not handler.type:
            continue
        if SYSTEM & {node.id for node in ast.walk(handler.type) if isinstance(node, ast.Name)}:
            for statement in handler.body:
                yield from texts_of(statement, handler.name)


def texts_of(node: ast.AST, error: str) -> Iterator[str]:
    """Parts of a message that show the error, outside calls of `SENTENCES`."""
    pending = [(node, "")]
    while pending:
        part, shown = pending.pop(0)
        called = part.func if isinstance(part, ast.Call) else None
        name = called.id if isinstance(called, ast.Name) else ""
        if name in SENTENCES:
            continue
        if isinstance(part, ast.FormattedValue) or name == "str":
            shown = ast.unparse(getattr(part, "value", part))
        if isinstance(part, ast.Name) and part.id == error and shown:
            yield shown
        pending += [(child, shown) for child in ast.iter_child_nodes(part)]


@pytest.mark.parametrize("package", PACKAGES)
def test_one_function_says_what_the_system_refused(package: str) -> None:
    found = {
        f"{file.relative_to(ROOT)}: {message}"
        for file in sorted((ROOT / package).rglob("*.py"))
        for message in own_messages(file.read_text(encoding="utf-8"))
    }
    assert found == set(), "make the message with fedlgm.files.explain_failure"


def test_a_message_without_a_remedy_is_found() -> None:
    source = """
try:
    work()
except (OSError, ValueError) as error:
    raise RunError(f"{path} cannot be read: {error.strerror}") from error
except PermissionError as refused:
    said = str(refused)
except OSError as error:
    raise RunError(explain_failure(f"{path} cannot be read", error)) from error
except KeyError as error:
    raise RunError(f"{error}") from error
"""
    assert [*own_messages(source)] == ["error.strerror", "str(refused)"]


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file", "no.csv"), "no such file or folder"),
        (PermissionError(errno.EACCES, "Permission denied", "no.csv"), "may not use it"),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "no.csv"), "it is a folder"),
        (OSError(errno.ENOSPC, "No space left on device", "no.csv"), "the disk is full"),
        (OSError(errno.EIO, "Input/output error", "no.csv"), "Input/output error"),
        (OSError("short read"), "short read"),
        (ValueError("line 3 is cut off\nand more"), "line 3 is cut off"),
        (EOFError(), "EOFError"),
    ],
)
def test_a_failure_is_explained_with_a_remedy(error: Exception, message: str) -> None:
    said = files.explain_failure("no.csv cannot be read", error)
    assert re.fullmatch(rf"no\.csv cannot be read: [^:;\n]*{message}; [^;\n]+", said)
    assert said.count("no.csv") == 1
    other = files.explain_failure("the file cannot be read", error, "restore it")
    assert other.endswith(f"{message}; restore it")
    assert ("no.csv: " in other) == (getattr(error, "filename", None) is not None)
