"""Copies of users' parts that have seen no examples, for trials."""

from __future__ import annotations

import copy
import functools
from abc import ABCMeta
from collections.abc import Iterator
from contextlib import suppress
from types import CellType, CodeType, FunctionType
from typing import Any, TypeVar

from torch import nn

from fedlgm.extension import package_of

T = TypeVar("T")
_LIBRARIES = ("fedlgm", "torch", "builtins")
_OF_ONE_CLASS = ("__dict__", "__weakref__", "_abc_impl")


def unused_copy(made: T) -> T:
    """A copy of a model, task or trainer that has seen no examples; what cannot be copied is shared.

    A model's copy shares parameters and buffers, which may be large. A loss function, a task's class and a trainer's
    maker are copied with the state that they can keep: attributes, defaults, closures, and the globals that they name.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> copied = unused_copy(model)
        >>> copied is model, copied.weight is model.weight
        (False, True)
    """
    copies = _Copies()
    copied = copies.of(made)
    if not isinstance(made, nn.Module | functools.partial | FunctionType | type) and copied is not made:
        with suppress(Exception):  # of a class that cannot be derived from
            object.__setattr__(copied, "__class__", copies.of(type(made)))
    return copied  # type: ignore[no-any-return]


class _Copies:
    """Copies that share what their originals share, such as a global of two functions."""

    def __init__(self) -> None:
        self._memo: dict[int, Any] = {}  # as `copy.deepcopy` has it
        self._globals: dict[int, dict[str, Any]] = {}

    def of(self, value: Any) -> Any:
        """See `unused_copy`; the classes and globals of fedlgm and PyTorch are shared."""
        if id(value) in self._memo:
            return self._memo[id(value)]
        try:
            if isinstance(value, FunctionType):
                return self._function(value)
            if isinstance(value, type):
                return value if package_of(value) in _LIBRARIES or _notices(value) else self._class(value)
            if isinstance(value, nn.Module):
                self._memo.update((id(tensor), tensor) for tensor in (*value.parameters(), *value.buffers()))
            elif isinstance(value, functools.partial):
                self.of(value.func)
            for part in getattr(value, "__dict__", {}).values():  # `copy.deepcopy` shares functions without a memo
                if isinstance(part, FunctionType | functools.partial):
                    self.of(part)
            return copy.deepcopy(value, self._memo)
        except Exception:  # a user's object may raise anything; its trial then shows less
            self._memo[id(value)] = value  # and not what is half made
            return value

    def _function(self, function: FunctionType) -> FunctionType:
        if hasattr(function, "_torchdynamo_orig_callable"):  # code that torch.compile makes is bound to its globals
            return function
        library, named = package_of(function) in _LIBRARIES, function.__globals__
        space = named if library else self._globals.setdefault(id(named), dict(named))
        cells = tuple(CellType() for _ in function.__closure__ or ())
        made = FunctionType(function.__code__, space, function.__name__, None, cells)
        self._memo[id(function)] = functools.update_wrapper(made, function)
        made.__defaults__, made.__kwdefaults__ = self.of(function.__defaults__), self.of(function.__kwdefaults__)
        made.__dict__ = {name: self.of(value) for name, value in vars(function).items()}
        for cell, own in zip(cells, function.__closure__ or (), strict=True):
            held = own.cell_contents
            cell.cell_contents = self._kept(held) if isinstance(held, type) and not library else self.of(held)
        for name in () if library else _names(function.__code__):
            if name in named and space[name] is named[name]:
                foreign = isinstance(named[name], FunctionType) and package_of(named[name]) != package_of(function)
                kept = foreign or isinstance(named[name], type)  # it may be compared with classes of other objects
                space[name] = self._kept(named[name]) if kept else self.of(named[name])
        return made

    def _kept(self, value: Any) -> Any:
        """The value, unless it is among what is copied."""
        return self._memo.get(id(value), value)

    def _class(self, kind: type) -> type:
        space = {name: value for name, value in vars(kind).items() if name not in _OF_ONE_CLASS}
        made = self._memo[id(kind)] = type(kind)(kind.__name__, kind.__bases__, space)
        for name, value in space.items():
            if isinstance(value, FunctionType) or not name.startswith("__"):
                setattr(made, name, self.of(value))
        return made


def _notices(kind: type) -> bool:
    """Whether a user's code runs when a class is derived, for example to register it."""
    hooks = (base for base in kind.__mro__[1:] if "__init_subclass__" in vars(base))
    return type(kind) not in (type, ABCMeta) or any(package_of(base) not in _LIBRARIES for base in hooks)


def _names(code: CodeType) -> Iterator[str]:
    """Names of globals and attributes in a function, and in functions inside it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)
