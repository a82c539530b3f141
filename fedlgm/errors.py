"""Errors that the user can fix. One clear message states the error, its place, and the remedy.

The command line prints the message and exits with status 2. Any other exception is a bug and keeps
its traceback.
"""

from __future__ import annotations

import math
import numbers
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any


class FedlgmError(Exception):
    """Base of every error caused by input rather than by a defect of fedlgm."""


class ConfigError(FedlgmError, ValueError):
    """A recipe key, an option or an argument that cannot be used."""


def check_positive(owner: str = "", /, **values: Any) -> None:
    """Refuse values that are not finite numbers above zero.

    Args:
        owner: object that the values are arguments of, for the message.
        values: the values by name.

    Raises:
        ConfigError: another value is given.

    >>> check_positive(epsilon="8")
    Traceback (most recent call last):
        ...
    fedlgm.errors.ConfigError: epsilon must be finite and positive, got '8'
    """
    _check(owner, values, lambda number: 0 < number < math.inf, "be finite and positive")


def check_share(owner: str = "", /, **values: Any) -> None:
    """Refuse values outside (0, 1); arguments and errors as in `check_positive`."""
    _check(owner, values, lambda number: 0 < number < 1, "lie in (0, 1)")


def check_below_one(owner: str = "", /, **values: Any) -> None:
    """Refuse values outside [0, 1); arguments and errors as in `check_positive`."""
    _check(owner, values, lambda number: 0 <= number < 1, "lie in [0, 1)")


def check_rate(owner: str = "", /, **values: Any) -> None:
    """Refuse values outside (0, 1]; arguments and errors as in `check_positive`."""
    _check(owner, values, lambda number: 0 < number <= 1, "lie in (0, 1]")


def check_fraction(owner: str = "", /, **values: Any) -> None:
    """Refuse values outside [0, 1]; arguments and errors as in `check_positive`."""
    _check(owner, values, lambda number: 0 <= number <= 1, "lie in [0, 1]")


def _check(
    owner: str, values: Mapping[str, Any], fits: Callable[[float], bool], wanted: str
) -> None:
    for name, value in values.items():
        if not fits(_number(value)):
            raise ConfigError(f"{_of(owner)}{name} must {wanted}, got {value!r}")


def check_count(name: str, value: Any, least: int = 1) -> int:
    """Refuse a value that is not a whole number of at least `least`.

    Args:
        name: the argument's name, for the message.
        value: the given value; a float without a fraction counts as a whole number.
        least: smallest allowed value.

    Returns:
        The number.

    Raises:
        ConfigError: any other value.

    >>> check_count("rows", 1.5)
    Traceback (most recent call last):
        ...
    fedlgm.errors.ConfigError: rows must be a whole number of at least 1, got 1.5
    """
    number = _number(value)
    if not (number % 1 == 0 and number >= least):
        raise ConfigError(f"{name} must be a whole number of at least {least}, got {value!r}")
    return int(number)


def check_known(what: str, value: Any, known: Any, owner: str = "") -> None:
    """Refuse a value that is not one of the known names.

    Args:
        what: name of the option.
        value: the value.
        known: the names, or a `Literal` of them.
        owner: beginning of the message.

    Raises:
        ConfigError: an unknown value.

    Example:
        >>> check_known("accountant", "pld", ["pld", "rdp"])
    """
    names = getattr(known, "__args__", None) or tuple(known)  # a Literal's; every plan asks
    if value not in names:
        raise ConfigError(f"{_of(owner)}unknown {what} {value!r}; known: {', '.join(names)}")


def _of(owner: str) -> str:
    return f"{owner}: " if owner else ""


def _number(value: Any) -> Any:
    """A number; NaN for anything else."""
    return value if isinstance(value, numbers.Real) and not isinstance(value, bool) else math.nan


@contextmanager
def prefix_key(
    path: str, owner: str = "", keys: Callable[[], Iterable[str]] = tuple
) -> Iterator[None]:
    """Prefix a ConfigError's message with its key; the arguments are those of `located`, with
    `keys` a function.
    """
    try:
        yield
    except ConfigError as error:
        raise ConfigError(located(path, str(error), owner, keys())) from error


def located(path: str, message: str, owner: str = "", keys: Iterable[str] = ()) -> str:
    """A message prefixed, once, with the key that it concerns.

    Args:
        path: a section ("mechanism"), or one of its keys ("data.partition").
        message: the message, raised by code that does not know the recipe.
        owner: name of the object that the section describes; the message may begin with it.
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


FOREIGN = {
    "target_epsilon": "epsilon",
    "target_delta": "delta",
    "learning_rate": "lr",
    "client_lr": "lr",
    "local_epochs": "epochs",
    "num_epochs": "epochs",
    "max_grad_norm": "bound",
    "clipping_norm": "bound",
    "clip_norm": "bound",
    "fraction_fit": "rate",
    "fraction_train": "rate",
}
"""Names of settings in other libraries, with those of the same settings here."""


def alternatives(name: object, known: Iterable[str], *others: str, listed: str = "") -> str:
    """Suggestions for an unknown name: similar known names, or all known names if none is similar.

    Args:
        name: the unknown name.
        known: the known names.
        others: what else is accepted; mentioned if no known name is similar.
        listed: command that lists the known names, if they are too many for a message.

    >>> alternatives("unifrm", ["uniform", "ladp"], "your own as 'package.module:Class'")
    "did you mean 'uniform'?"
    >>> alternatives("typo", ["uniform", "ladp"], "your own as 'package.module:Class'")
    "known: uniform, ladp, or your own as 'package.module:Class'"
    """
    names = list(known)
    if FOREIGN.get(str(name)) in names:
        return f"did you mean {FOREIGN[str(name)]!r}?"
    near = get_close_matches(str(name).lower(), [one.lower() for one in names], n=2, cutoff=0.7)
    close = sorted(
        (one for one in names if one.lower() in near), key=lambda one: near.index(one.lower())
    )
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return "known: " + ", or ".join(
        [f"those of `{listed}`" if listed else ", ".join(names), *others]
    )


def first_problem(error: Any) -> str:
    """Key and reason of the first problem in a pydantic error, without the value, which may be of
    any kind.
    """
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def explained(problem: Mapping[str, Any], known: Iterable[str] = ()) -> str:
    """Describe one mistake in a settings file: key, problem, given value.

    Args:
        problem: one of pydantic's `ValidationError.errors()`.
        known: the known keys of the section that holds an unknown one.

    >>> explained({"loc": ("run", "sed"), "type": "extra_forbidden", "msg": "", "input": 1}, ["seed"])
    "run.sed: unknown key; did you mean 'seed'?"
    """
    path, kind, given = ".".join(map(str, problem["loc"])), problem["type"], problem["input"]
    if kind == "extra_forbidden":
        names = list(known)
        return f"{path}: unknown key" + (
            f"; {alternatives(problem['loc'][-1], names)}" if names else ""
        )
    if kind == "missing":
        return f"{path}: is required, but missing"
    words = _WORDS.get(kind)
    message = (
        problem["msg"]
        if words is None
        else words.format(path=path, **_whole(problem.get("ctx", {})))
    )
    message = message.removeprefix("Value error, ").replace("Input should be", "must be")
    if not path:
        return str(message)
    return f"{path}: {message}" + ("" if isinstance(given, dict) else f", got {_shown(given)}")


def _shown(value: Any) -> str:
    """A value of a settings file, shortened to a sentence's length."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no number of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _whole(values: Mapping[str, Any]) -> dict[str, Any]:
    """Format whole numbers without a decimal point, and large powers of two as powers."""

    def shown(value: Any) -> Any:
        if isinstance(value, float) and value.is_integer():
            return int(value)
        large = isinstance(value, int) and value >= 2**64 and value.bit_count() == 1
        return f"2**{value.bit_length() - 1}" if large else value

    return {key: shown(value) for key, value in values.items()}


_LONGEST = 200
_WORDS = {  # instead of pydantic's words
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "string_too_long": "must have at most {max_length} characters",
    "finite_number": "must be finite",
    **dict.fromkeys(
        ("int_type", "int_parsing", "int_from_float", "int_parsing_size"), "must be a whole number"
    ),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    **dict.fromkeys(("list_type", "tuple_type"), "must be a list"),
    **dict.fromkeys(("dict_type", "model_type"), "must be a section of keys, such as [{path}]"),
    "string_type": "must be text",
    "string_pattern_mismatch": "must have the form {pattern}",
    "too_short": "must have at least {min_length} entries",
}


class DataError(FedlgmError):
    """A missing or damaged data set."""


class PrivacyError(FedlgmError):
    """A release that would break its claimed guarantee, or a budget that cannot be met."""


class LedgerError(FedlgmError):
    """A privacy ledger that is missing, damaged or belongs to another run."""


class RunError(FedlgmError):
    """A run folder that cannot be created, resumed or read, or a run that failed."""


class OtherObjectsError(RunError):
    """A run that was made with other Python objects than those now given."""


class DiskError(RunError):
    """A run's files cannot be written or read, for example because the disk is full."""


class DivergedError(RunError):
    """Training whose model is no longer finite; the rounds before it are kept.

    Attributes:
        largest: (client, l2 norm) of the last round's largest contributions, largest first, if each
            arrived separately. The message omits them, because only the operator may know who took
            part.
    """

    largest: tuple[tuple[int, float], ...] = ()


class Notice(UserWarning):
    """A warning for the user who started a run, from any of its processes."""


class MemoryWarning(Notice):
    """A warning that work continues in smaller pieces for lack of memory."""


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on the CPU or on a GPU: PyTorch's allocators have no common error."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def with_article(name: str) -> str:
    """The name with "a" or "an".

    >>> with_article("Observation"), with_article("task")
    ('an Observation', 'a task')
    """
    return f"an {name}" if name[0] in "AEIOaeio" and not name.startswith("One") else f"a {name}"
