"""Wording of messages about settings: the key that a message concerns, similar names, and problems
in the terms of a settings file instead of pydantic's terms.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any

from fedlgm.errors import ConfigError


@contextmanager
def prefix_key(
    path: str, owner: str = "", keys: Callable[[], Iterable[str]] = tuple
) -> Iterator[None]:
    """Prefix a ConfigError's message with its key. The arguments are those of `prefix_message`, but
    `keys` is a function that returns the keys.
    """
    try:
        yield
    except ConfigError as error:
        raise ConfigError(prefix_message(path, str(error), owner, keys())) from error


def prefix_message(path: str, message: str, owner: str = "", keys: Iterable[str] = ()) -> str:
    """Prefix a message with the key that it concerns, unless it already begins with this key.

    Args:
        path: a section ("mechanism"), or a key of a section ("data.partition").
        message: the message, raised by code that does not know the recipe.
        owner: name of the object that the section describes; the message may begin with it.
        keys: keys of the section. A message that begins with a key is about this key.

    >>> prefix_message("mechanism", "uniform: bound must be positive", "uniform", ["bound"])
    'mechanism.bound must be positive'
    >>> prefix_message("mechanism", "unknown mechanism 'typo'")
    "mechanism.name: unknown mechanism 'typo'"
    >>> prefix_message("data.partition", "partition scheme 'iid': unknown option 'x'")
    "data.partition 'iid': unknown option 'x'"
    """
    section, thing = path.partition(".")[0], path.rpartition(".")[2].replace("_", " ")
    section_keys, text = set(keys), message.removeprefix(f"{owner}: ") if owner else message
    unknown = re.match(r"unknown (\w+) ", text)
    named = re.match(rf"{thing.removesuffix('s')}s?( \w+)? (?=')", text)
    if text.startswith((f"{path} ", f"{path}.", f"{path}:")) and named is None:
        return text
    if named:
        return f"{path} {text[named.end() :]}"
    if text.partition(" ")[0] in section_keys:
        return f"{section}.{text}"
    if unknown and unknown[1] in section_keys:
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
"""Names of settings in other libraries, with the names of the same settings in this library."""


def alternatives(name: object, known: Iterable[str], *others: str, listed: str = "") -> str:
    """Suggest known names in place of an unknown name: the similar ones, or all known names if none
    is similar.

    Args:
        name: the unknown name.
        known: the known names.
        others: other accepted values, which are mentioned if no known name is similar.
        listed: command that lists the known names, if they are too many for a message.

    >>> alternatives("unifrm", ["uniform", "ladp"], "your own as 'package.module:Class'")
    "did you mean 'uniform'?"
    >>> alternatives("typo", ["uniform", "ladp"], "your own as 'package.module:Class'")
    "known: uniform, ladp, or your own as 'package.module:Class'"
    """
    names = list(known)
    if FOREIGN.get(str(name)) in names:
        return f"did you mean {FOREIGN[str(name)]!r}?"
    near = get_close_matches(
        str(name).lower(), [candidate.lower() for candidate in names], n=2, cutoff=0.7
    )
    close = sorted(
        (candidate for candidate in names if candidate.lower() in near),
        key=lambda candidate: near.index(candidate.lower()),
    )
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return "known: " + ", or ".join(
        [f"those of `{listed}`" if listed else ", ".join(names), *others]
    )


def first_problem(error: Any) -> str:
    """Describe the first problem in a pydantic error by its key and reason, without the value,
    which may be of any type.
    """
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg']}"


def describe_problem(problem: Mapping[str, Any], known: Iterable[str] = ()) -> str:
    """Describe one mistake in a settings file by its key, the problem and the given value.

    Args:
        problem: an entry of pydantic's `ValidationError.errors()`.
        known: the known keys of the section in which a key is unknown.

    >>> describe_problem({"loc": ("run", "sed"), "type": "extra_forbidden", "msg": "", "input": 1}, ["seed"])
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
    return f"{path}: {message}" + ("" if isinstance(given, dict) else f", got {_shorten(given)}")


def _shorten(value: Any) -> str:
    """Write a value of a settings file as text, shortened so that it fits into a sentence."""
    try:
        text = repr(value)
    except ValueError:  # Python does not convert numbers of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _whole(values: Mapping[str, Any]) -> dict[str, Any]:
    """Format whole numbers without a decimal point, and large powers of two as powers."""

    def format_number(value: Any) -> Any:
        if isinstance(value, float) and value.is_integer():
            return int(value)
        large = isinstance(value, int) and value >= 2**64 and value.bit_count() == 1
        return f"2**{value.bit_length() - 1}" if large else value

    return {key: format_number(value) for key, value in values.items()}


_LONGEST = 200

_WORDS = {  # these replace pydantic's messages
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


def with_article(name: str) -> str:
    """The name with "a" or "an".

    >>> with_article("Observation"), with_article("task")
    ('an Observation', 'a task')
    """
    return f"an {name}" if name[0] in "AEIOaeio" and not name.startswith("One") else f"a {name}"
