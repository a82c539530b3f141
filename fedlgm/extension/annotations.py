"""Arguments compared with a function's annotations, for the message of a call that failed."""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Hashable, Iterable, Mapping
from itertools import islice
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

_NUMBERS = {float: numbers.Real, int: numbers.Integral}
_WORDS = {
    "float": "a number",
    "int": "a whole number",
    "str": "a string",
    "bool": "True or False",
    "NoneType": "None",
    "Callable": "a function",
    "Mapping": "a dict",
    "ndarray": "a NumPy array",
    "Tensor": "a tensor",
    "Module": "an nn.Module",
}
_LONGEST = 60  # characters of a value in a message
_MOST = 100  # items of a sequence that are looked at


def mistyped(function: Any, *arguments: Any, **options: Any) -> list[str]:
    """One phrase for each argument whose type contradicts its annotation, such as "lr must be a
    number, got '0.1'".

    Annotations that cannot be read, and protocols, are taken to fit.

    >>> def train(model, *, lr: float, sizes: tuple[int, ...] = ()): ...
    >>> mistyped(train, 3, lr="0.1", sizes=[1, "b"])
    ["lr must be a number, got '0.1'", "sizes must be a sequence of whole numbers, got [1, 'b']"]
    """
    signature = inspect.signature(function)
    wrong = []
    for name, value in signature.bind(*arguments, **options).arguments.items():
        parameter = signature.parameters[name]
        hint = _read(parameter.annotation, function)
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) or _fits(
            value, hint
        ):
            continue
        wrong.append(f"{name} must be {_described(hint)}, got {_shown(value)}")
    return wrong


def _read(annotation: Any, function: Any) -> Any:
    """The annotated type; `Any` where there is none, or its name was imported only for type
    checkers.
    """
    if not isinstance(annotation, str):
        return Any if annotation is inspect.Parameter.empty else annotation
    try:
        return eval(annotation, function.__globals__)
    except Exception:
        return Any


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value may be of an annotated type."""
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    if kind is Literal:
        return isinstance(value, Hashable) and value in parts
    if _is_sequence(kind):
        return _items_fit(value, kind, parts)
    try:
        return isinstance(value, _NUMBERS.get(kind, kind))
    except TypeError:  # `Any`, and protocols without a runtime check
        return True


def _items_fit(value: Any, kind: Any, parts: tuple[Any, ...]) -> bool:
    """Whether a value may be a sequence of the annotated items; an array is one of numbers."""
    if isinstance(value, str | Mapping) or not hasattr(value, "__iter__"):
        return False
    items = list(islice(value, _MOST))
    if kind is tuple and parts and Ellipsis not in parts:
        return len(items) == len(parts) and all(map(_fits, items, parts))
    if parts and hasattr(value, "shape") and parts[0] not in _NUMBERS:
        return False
    return not parts or all(_fits(one, parts[0]) for one in items)


def _is_sequence(kind: Any) -> bool:
    """Whether an annotation is one of Python's own sequences or iterables, not text or a
    mapping.
    """
    return (
        isinstance(kind, type)
        and kind.__module__ in ("builtins", "collections.abc")
        and issubclass(kind, Iterable)
        and not issubclass(kind, str | bytes | Mapping)
    )


def _described(hint: Any) -> str:
    kind, parts = get_origin(hint) or hint, get_args(hint)
    if kind in (Union, UnionType):
        return " or ".join(dict.fromkeys(map(_described, parts)))
    if kind is Literal:
        return " or ".join(map(repr, parts))
    if kind is tuple and parts and Ellipsis not in parts:
        return f"a tuple ({', '.join(map(_described, parts))})"
    if _is_sequence(kind):
        return f"a sequence of {_several(parts[0])}" if parts else "a sequence"
    name = getattr(kind, "__name__", str(kind))
    return _WORDS.get(name, with_article(name))


def _several(hint: Any) -> str:
    words = _described(hint)
    return (
        f"items, each {words}" if " or " in words or "(" in words else f"{words.partition(' ')[2]}s"
    )


def with_article(name: str) -> str:
    """The name with "a" or "an".

    >>> with_article("Observation"), with_article("task")
    ('an Observation', 'a task')
    """
    return f"an {name}" if name[0] in "AEIOaeio" and not name.startswith("One") else f"a {name}"


def _shown(value: Any) -> str:
    """A value in a message: as Python writes it if that is short, else its type."""
    text = repr(value)
    if len(text) <= _LONGEST and text.isprintable() and not text.startswith("<"):
        return text
    name = type(value).__name__
    return _WORDS.get(name, with_article(name))
