"""Errors the user can fix: one clear message saying what, where and what would be right.

The command line prints the message and exits with status 2; anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any


class FedlgmError(Exception):
    """Base of every error caused by input rather than by a defect of fedlgm."""


class ConfigError(FedlgmError, ValueError):
    """A recipe key, an option or an argument that cannot be used."""


@contextmanager
def prefix_key(path: str) -> Iterator[None]:
    """Put a key's path before the message of a ConfigError."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error


def alternatives(name: object, known: Iterable[str], *others: str) -> str:
    """What could stand in the place of an unknown name: those much like it, else all.

    Args:
        name: as it was given.
        known: the known names.
        others: what may be given besides, said where no known name is much like the given one.

    >>> alternatives("unifrm", ["uniform", "ladp"], "your own as 'package.module:Class'")
    "did you mean 'uniform'?"
    >>> alternatives("typo", ["uniform", "ladp"], "your own as 'package.module:Class'")
    "known: uniform, ladp, or your own as 'package.module:Class'"
    """
    names = list(known)
    close = get_close_matches(str(name), names, n=2, cutoff=0.75)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return "known: " + ", or ".join([", ".join(names), *others])


def explained(problem: Mapping[str, Any], known: Iterable[str] = ()) -> str:
    """One mistake in a file of settings: where it is, what is wrong, what was given.

    Args:
        problem: one of pydantic's `ValidationError.errors()`.
        known: the keys that are known where an unknown one stands.

    >>> explained({"loc": ("run", "sed"), "type": "extra_forbidden", "msg": "", "input": 1}, ["seed"])
    "run.sed: unknown key; did you mean 'seed'?"
    """
    path, kind, given = ".".join(map(str, problem["loc"])), problem["type"], problem["input"]
    if kind == "extra_forbidden":
        names = list(known)
        return f"{path}: unknown key" + (f"; {alternatives(problem['loc'][-1], names)}" if names else "")
    if kind == "missing":
        return f"{path}: is missing, it is required"
    message = problem["msg"].removeprefix("Value error, ")
    if not path:
        return str(message)
    return f"{path}: {message}" + ("" if isinstance(given, dict) else f", got {given!r}")


class DataError(FedlgmError):
    """A data set that is missing or damaged."""


class PrivacyError(FedlgmError):
    """A release that would break the guarantee it claims, or a budget that cannot be met."""


class LedgerError(FedlgmError):
    """A privacy ledger that is missing, damaged or belongs to another run."""


class RunError(FedlgmError):
    """A run folder that cannot be created, resumed or read, or a run that failed."""


class Notice(UserWarning):
    """What whoever started a run should hear, whichever process it happens in."""


class MemoryWarning(Notice):
    """Work goes on in smaller pieces because there was not enough memory."""


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on the CPU or on a GPU: PyTorch's allocators have no common error."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
