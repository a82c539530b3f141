"""Errors the user can fix: one clear message saying what, where and what would be right.

The command line prints the message and exits with status 2; anything else is a bug and keeps its traceback.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any


class FedlgmError(Exception):
    """Base of every error caused by input rather than by a defect of fedlgm."""


class ConfigError(FedlgmError, ValueError):
    """A recipe key, an option or an argument that cannot be used."""


@contextmanager
def prefix_key(path: str, owner: str = "", keys: Callable[[], Iterable[str]] = tuple) -> Iterator[None]:
    """Say before the message of a ConfigError which key it is about; arguments as for `located`, keys when needed."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(located(path, str(error), owner, keys())) from error


def located(path: str, message: str, owner: str = "", keys: Iterable[str] = ()) -> str:
    """A message with the place that it is about before it, once.

    Args:
        path: a section ("mechanism"), or one of its keys ("data.partition").
        message: as it was raised by code that does not know the recipe.
        owner: name of the thing that the section describes, which may stand before the message.
        keys: keys of the section: a message that begins with one of them is about that key.

    >>> located("mechanism", "uniform: bound must be positive", "uniform", ["bound"])
    'mechanism.bound must be positive'
    >>> located("mechanism", "unknown mechanism 'typo'")
    "mechanism.name: unknown mechanism 'typo'"
    >>> located("data.partition", "partition scheme 'iid': unknown option 'x'")
    "data.partition 'iid': unknown option 'x'"
    """
    section, thing = path.partition(".")[0], path.rpartition(".")[2].replace("_", " ")
    known, text = set(keys), message.removeprefix(f"{owner}: ") if owner else message
    unknown = re.match(r"unknown (\w+) ", text)
    named = re.match(rf"{thing.removesuffix('s')}s?( \w+)? (?=')", text)
    if text.startswith((f"{path} ", f"{path}.", f"{path}:")) and named is None:
        return text
    if named:
        return f"{path} {text[named.end() :]}"
    if text.partition(" ")[0] in known:
        return f"{section}.{text}"
    if unknown and unknown[1] in known:
        return f"{section}.{unknown[1]}: {text}"
    if text.startswith(f"unknown {thing} "):
        return f"{path if '.' in path else f'{path}.name'}: {text}"
    return f"{path} {owner!r}: {text}" if text != message else f"{path}: {text}"


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
    words = _WORDS.get(kind)
    message = problem["msg"] if words is None else words.format(path=path, **_whole(problem.get("ctx", {})))
    message = message.removeprefix("Value error, ").replace("Input should be", "must be")
    if not path:
        return str(message)
    return f"{path}: {message}" + ("" if isinstance(given, dict) else f", got {given!r}")


def _whole(values: Mapping[str, Any]) -> dict[str, Any]:
    """Whole numbers without a decimal point, large powers of two as such."""

    def shown(value: Any) -> Any:
        if isinstance(value, float) and value.is_integer():
            return int(value)
        large = isinstance(value, int) and value >= 2**64 and value.bit_count() == 1
        return f"2**{value.bit_length() - 1}" if large else value

    return {key: shown(value) for key, value in values.items()}


_WORDS = {  # in the place of pydantic's own
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "finite_number": "must be finite",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float", "int_parsing_size"), "must be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    **dict.fromkeys(("list_type", "tuple_type"), "must be a list"),
    **dict.fromkeys(("dict_type", "model_type"), "must be a section of keys, such as [{path}]"),
    "string_type": "must be text",
}


class DataError(FedlgmError):
    """A data set that is missing or damaged."""


class PrivacyError(FedlgmError):
    """A release that would break the guarantee it claims, or a budget that cannot be met."""


class LedgerError(FedlgmError):
    """A privacy ledger that is missing, damaged or belongs to another run."""


class RunError(FedlgmError):
    """A run folder that cannot be created, resumed or read, or a run that failed."""


class DivergedError(RunError):
    """Training whose model is no longer finite; the rounds before it are kept."""


class Notice(UserWarning):
    """What whoever started a run should hear, whichever process it happens in."""


class MemoryWarning(Notice):
    """Work goes on in smaller pieces because there was not enough memory."""


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on the CPU or on a GPU: PyTorch's allocators have no common error."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
