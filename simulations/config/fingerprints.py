"""Hashes by which a run recognises its Python objects in any process.

An object's text often contains its address, which differs between processes, so the text cannot
serve as a hash.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import nn

from fedlgm.extension.loader import package_of
from fedlgm.package_conflicts import PACKAGES

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_KNOWN = {*PACKAGES, "abc", "builtins", "flwr", "torch", "typing"}
"""Packages whose classes are hashed by name only, because a run's provenance holds the packages'
versions.
"""


def array_digest(*arrays: Any) -> str:
    """SHA-256 of arrays: their types, shapes and values."""
    digest = hashlib.sha256()
    for array in arrays:
        values = np.ascontiguousarray(array.numpy() if isinstance(array, torch.Tensor) else array)
        digest.update(f"{values.dtype}{values.shape}".encode())
        digest.update(values.tobytes())
    return digest.hexdigest()


def object_digest(value: Any, *, state: bool = True) -> str:
    """SHA-256 of a function or object: its name, code and values.

    >>> object_digest(lambda x: x + 1) == object_digest(lambda x: x + 2)
    False

    Args:
        value: the object.
        state: whether the attributes that change from round to round also count: arrays, counters
            and objects. Otherwise only settings count: texts, truth values and fractions.
    """
    return _hash_words(_words(value, state, frozenset()))


def module_digest(module: nn.Module) -> str:
    """SHA-256 of a model's structure: its modules by name, their settings, and the code of users'
    modules.

    It does not include values of tensors (see `fixed_digest`).

    >>> from torch import nn
    >>> module_digest(nn.Sequential(nn.Tanh())) == module_digest(nn.Sequential(nn.ReLU()))
    False
    """
    words: list[str] = []
    for name, child in module.named_modules():
        words += [name, *_class_words(type(child))]
        if _is_known(type(child)):
            words.append(child.extra_repr())
            continue
        for key, value in sorted(vars(child).items()):
            if key.startswith("_") or key == "training":
                continue
            if isinstance(value, (*_PLAIN, tuple, list)):
                words += [key, *_words(value, True, frozenset())]
            elif isinstance(value, (FunctionType, BuiltinFunctionType)):
                words += [
                    key,
                    *(
                        [value.__qualname__]
                        if _is_known(value)
                        else _words(value, True, frozenset())
                    ),
                ]
    return _hash_words(words)


def fixed_digest(module: nn.Module) -> str:
    """SHA-256 of a model's frozen parameters and buffers; empty without any."""
    fixed = {name: p.detach() for name, p in module.named_parameters() if not p.requires_grad}
    fixed |= dict(module.named_buffers())
    return (
        _hash_words([f"{name} {array_digest(value.cpu())}" for name, value in fixed.items()])
        if fixed
        else ""
    )


def _is_known(value: Any) -> bool:
    """Whether a class or function belongs to a package whose version a run records."""
    return package_of(value) in _KNOWN


def _hash_words(words: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for word in words:
        data = word.encode(errors="surrogatepass")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()


def _words(value: Any, state: bool, above: frozenset[int]) -> Iterator[str]:
    """Text that distinguishes `value` from other objects; the objects in `above` contain
    `value`.
    """
    if isinstance(value, _PLAIN):
        yield f"{type(value).__name__} {value!r}"
        return
    if isinstance(value, (np.ndarray, np.generic)):
        value = np.asarray(value)
        yield repr(value.tolist()) if value.dtype == object else array_digest(value)
        return
    if isinstance(value, torch.Tensor):
        yield array_digest(value.detach().cpu())
        return
    if id(value) in above:
        yield "above"
        return
    inside = above | {id(value)}
    if isinstance(value, (set, frozenset)):
        yield f"{type(value).__name__} of {len(value)}"
        yield from sorted(" ".join(_words(item, True, inside)) for item in value)
    elif isinstance(value, (Mapping, list, tuple)):
        yield f"{type(value).__name__} of {len(value)}"
        for item in chain.from_iterable(value.items()) if isinstance(value, Mapping) else value:
            yield from _words(item, True, inside)
    elif isinstance(value, functools.partial):
        yield "partial"
        for part in (value.func, value.args, value.keywords):
            yield from _words(part, True, inside)
    elif isinstance(value, MethodType):
        yield from _words(value.__func__, True, inside)
        yield from _words(value.__self__, state, inside)
    elif isinstance(value, FunctionType):
        yield value.__qualname__
        # Several lambdas may stand in one line, and the line is all the source that is known of
        # them.
        named = value.__name__ != "<lambda>"
        yield (_source(value) if named else None) or _code(value.__code__)
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        for given in (value.__defaults__, value.__kwdefaults__, cells):
            yield from _words(given, True, inside)
    elif isinstance(value, type):
        yield from _class_words(value)
    elif isinstance(value, BuiltinFunctionType):
        yield value.__qualname__
    else:
        yield from _class_words(type(value))
        for name, item in sorted(_attributes(value).items()):
            if state or isinstance(item, (bool, float, str)):
                yield name
                yield from _words(item, True, inside)


def _class_words(kind: type) -> Iterator[str]:
    """Name of a class, and the methods that it and the user's base classes define."""
    yield f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}"
    for base in kind.__mro__:
        if _is_known(base):
            continue
        for name, method in sorted(vars(base).items()):
            # methods that dataclasses generate are left out
            if isinstance(method, FunctionType) and (text := _source(method)) is not None:
                yield name
                yield text


def _attributes(value: Any) -> dict[str, Any]:
    """An object's attributes, without cached values."""
    cached_names = {
        name
        for base in type(value).__mro__
        for name, member in vars(base).items()
        if isinstance(member, functools.cached_property)
    }
    return {
        name: item
        for name, item in getattr(value, "__dict__", {}).items()
        if name not in cached_names
    }


def _source(function: FunctionType) -> str | None:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return None


def _code(code: CodeType) -> str:
    """Text of compiled code that is the same in all processes, for functions without source."""
    constants = [
        _code(part) if isinstance(part, CodeType) else repr(part) for part in code.co_consts
    ]
    if any(isinstance(part, frozenset) for part in code.co_consts):
        constants = ["".join(sorted(text)) for text in constants]
    return f"{code.co_code.hex()} {constants} {code.co_names} {code.co_varnames}"
