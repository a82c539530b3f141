"""Search for state that all copies of a user's objects share, through which one client could affect
the next client.

Each client starts from the user's components (model, task, trainer) in the state that they had
before the first client. Deep copies and `fedlgm.extension.restored.Restored` recover the state in
the attributes of objects. But all deep copies share functions, classes, and the objects to which
functions and classes refer. `shared_state` describes the first of these shared objects that could
keep state; if there is such an object, the guarantee is conditional.

Code of `KNOWN` packages is assumed to keep state between calls only in the attributes and buffers
of its objects. PyTorch's layers and this package's components keep no state even in attributes (see
`keeps_nothing`), so they need not be restored.
"""

from __future__ import annotations

import builtins
import copy
import dis
import enum
import functools
import re
import weakref
from abc import ABCMeta
from collections import OrderedDict, deque
from collections.abc import Iterator
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GenericAlias,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
    NoneType,
    UnionType,
)
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from fedlgm.wording import with_article

KNOWN = frozenset(
    [
        "fedlgm",
        "torch",
        "torchvision",
        "transformers",
        "peft",
        "numpy",
        "builtins",
        "math",
        "cmath",
        "operator",
        "functools",
        "itertools",
        "collections",
        "typing",
        "typing_extensions",
        "types",
        "dataclasses",
        "abc",
        "enum",
        "copy",
        "contextlib",
        "__future__",
    ]
)
"""Packages whose code is assumed to keep state between calls only in the attributes and buffers of
its objects.
"""

_LAYERS = ("torch.nn.modules.", "torchvision.models.", "fedlgm.")
_VALUES = (
    NoneType,
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(...),
    type(NotImplemented),
    range,
    slice,
    re.Pattern,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    torch.Size,
    np.dtype,
    np.generic,
    np.ufunc,
    GetSetDescriptorType,
    MemberDescriptorType,
)
"""Types of immutable values."""
_UNSEEN = frozenset(
    ["data", "numpy", "set_", "storage", "untyped_storage", "asarray", "from_numpy", "from_dlpack"]
)
"""Names of attributes and functions through which a tensor can be changed although its version
counter, on which `Unchanged` relies, does not change.
"""
_INSIDE = frozenset(
    [
        "__dict__",
        "__globals__",
        "__closure__",
        "__func__",
        "__defaults__",
        "__kwdefaults__",
        "__code__",
        "__annotations__",
        "__subclasses__",
    ]
)  # of objects
_REFLECTION = frozenset(
    ["globals", "vars", "locals", "setattr", "delattr", "exec", "eval", "compile", "open", "input"]
)
_COPYING = (
    "__deepcopy__",
    "__reduce__",
    "__reduce_ex__",
    "__getstate__",
    "__setstate__",
    "__getnewargs__",
)
_MAKING = ("__init__", "__new__", "__post_init__")
_RANDOM = ("random", "numpy.random")
_OPERATIONS = frozenset(["aten", "prims", "torchvision"])
"""Namespaces of `torch.ops` whose operations keep no state between calls."""
LINKS = ("_parameters", "_buffers", "_modules")


class Reached(NamedTuple):
    """An object that can be reached from a user's component.

    Attributes:
        path: description of the object's location, for messages.
        value: the object.
        top: path of attributes from the component towards the object, up to the last object that a
            deep copy copies.
        shared: whether all deep copies of the component share the object.
        made: for a class, whether the component's code may call it; False if it was reached only as
            the class of another object.
    """

    path: str
    value: Any
    top: str
    shared: bool = True
    made: bool = True


def package_of_code(value: Any) -> str:
    """Return the top-level package in which a function or class is defined, or to which a module
    belongs.
    """
    if isinstance(value, FunctionType):
        return str(value.__globals__.get("__name__", "")).partition(".")[0]
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", "")
    return str(name).partition(".")[0]


def keeps_nothing(part: Any) -> bool:
    """Whether a component is known to keep no state between calls. The decision depends on the
    packages that define the classes of the component and of its modules, and on their hooks and
    attributes.

    Example:
        >>> class Own(nn.Module):
        ...     __module__ = "mypkg.models"
        >>> keeps_nothing(nn.Sequential(nn.Linear(2, 1))), keeps_nothing(Own())
        (True, False)
    """
    if isinstance(part, nn.Module):
        kinds = {type(module) for module in part.modules()}
        are_layers = all(kind.__module__.startswith(_LAYERS) for kind in kinds)
        hooks = any(_functions(vars(module)) for module in part.modules())
        return are_layers and not hooks and not _has_any_global_hook()
    part_type = type(part)
    if package_of_code(part_type) != "fedlgm":
        return False
    held = getattr(part, "__dict__", {}).values()
    return all(
        isinstance(value, _VALUES)
        or (isinstance(value, tuple) and all(isinstance(each, _VALUES) for each in value))
        for value in held
    )


def _functions(held: dict[str, Any]) -> bool:
    """Whether a module's attributes contain hooks or a `forward`."""
    return "forward" in held or any(
        value for name, value in held.items() if name.endswith("_hooks")
    )


def reach(root: Any, path: str) -> Iterator[Reached]:
    """Yield all objects, except immutable values, that can be reached from a component, beginning
    with the component itself. The search does not follow code of `KNOWN` packages.

    Args:
        root: the component.
        path: name of the component, with which the paths of objects begin.
    """
    waiting, seen = [Reached(path, root, path, shared=False)], dict[tuple[int, bool, bool], Any]()
    while waiting:
        item = waiting.pop()
        if isinstance(item.value, type | FunctionType):  # deep copies do not copy these
            item = item._replace(shared=True)
        key = id(item.value), item.shared, item.made
        if is_plain(item.value) or key in seen:
            continue
        seen[key] = item.value  # stored, so that no other object gets the same id
        yield item
        waiting += _inside(item)


def is_plain(value: Any) -> bool:
    """Whether an object is an immutable value whose class a `KNOWN` package defines."""
    return isinstance(value, _VALUES) and package_of_code(type(value)) in KNOWN


def _is_plain_layer(value: Any) -> bool:
    """Whether an object is a module without tensors and state, such as a loss of PyTorch."""
    return isinstance(value, nn.Module) and keeps_nothing(value) and not tensors_of(value)


def _inside(item: Reached) -> list[Reached]:
    """List the objects to which an object refers directly."""
    path, value, top, shared, made = item
    if isinstance(value, functools.partial):
        called = (value.func, *value.args, *value.keywords.values())
        return [Reached(path, each, top, shared) for each in called]
    if isinstance(value, MethodType):
        return [Reached(path, value.__func__, top), Reached(path, value.__self__, top, shared)]
    if isinstance(value, FunctionType):
        return [Reached(name, each, top) for name, each in _held_by(value, path)]
    if isinstance(value, property | staticmethod | classmethod | functools.cached_property):
        functions = (
            getattr(value, name, None) for name in ("fget", "fset", "fdel", "__func__", "func")
        )
        return [Reached(path, each, top) for each in functions if each is not None]
    if isinstance(value, type):
        return [Reached(name, each, top) for name, each in _members(value, made)]
    if isinstance(value, ModuleType | Tensor | np.ndarray) or (shared and _is_plain_layer(value)):
        return []
    held: list[tuple[str, Any]] = []
    if isinstance(value, dict):
        held = [(f"{path}[{key!r}]", each) for key, each in value.items()]
    elif isinstance(value, list | tuple | set | frozenset | deque):
        held = [(f"{path}[{i}]", each) for i, each in enumerate(value)]
    for name, each in _attributes(value):
        linked = isinstance(value, nn.Module) and name in LINKS
        held += [
            (f"{path}.{leaf}".lstrip("."), inner)
            for leaf, inner in (each.items() if linked else [(name, each)])
        ]
    kind = Reached(type(value).__name__, type(value), top, made=False)
    return [kind, *(Reached(name, each, top if shared else name, shared) for name, each in held)]


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(value, "__dict__", {}).items()
    for base in type(value).__mro__:
        names = vars(base).get("__slots__", ())
        for name in (names,) if isinstance(names, str) else names:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield name, getattr(value, name)


def _held_by(function: FunctionType, path: str) -> list[tuple[str, Any]]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    held = [(name, cell.cell_contents) for name, cell in cells if _is_filled(cell)]
    # a function of a known package, such as the wrapper that a decorator makes, may call a user's
    # function
    if package_of_code(function) in KNOWN:
        return [(path, value) for _, value in held if callable(value) and not _is_known(value)]
    held += [(f"default {i}", each) for i, each in enumerate(function.__defaults__ or ())]
    held += [*(function.__kwdefaults__ or {}).items(), *vars(function).items()]
    space = function.__globals__
    held += [
        (name, space[name])
        for name in dict.fromkeys(_globals_of(function.__code__))
        if name in space
    ]
    return [(f"{name!r} of {function.__qualname__}", value) for name, value in held]


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _is_known(value: Any) -> bool:
    """Whether a callable consists only of code of `KNOWN` packages."""
    if isinstance(value, MethodType):
        return _is_known(value.__func__) and package_of_code(type(value.__self__)) in KNOWN
    if isinstance(value, FunctionType):
        return package_of_code(value) in KNOWN and value.__closure__ is None
    kind = value if isinstance(value, type) else type(value)
    return package_of_code(kind) in KNOWN and not isinstance(value, functools.partial)


def _members(kind: type, made: bool) -> Iterator[tuple[str, Any]]:
    for base in kind.__mro__:
        if package_of_code(base) in KNOWN:
            continue
        remade = made or any(
            isinstance(each, classmethod)
            or (isinstance(each, FunctionType) and _makes_its_kind(each))
            for each in vars(base).values()
        )
        for name, value in vars(base).items():
            code = isinstance(
                value,
                FunctionType | property | staticmethod | classmethod | functools.cached_property,
            )
            special = (name.startswith("__") and name.endswith("__")) or name == "_abc_impl"
            if (code or not special) and (remade or name not in _MAKING):
                yield f"{base.__name__}.{name}", value


def _makes_its_kind(function: FunctionType) -> bool:
    """Whether a method may create another object of the method's class, as `type(self)()` does."""
    names = {name for code in _codes(function.__code__) for name in code.co_names}
    return not function.__name__.startswith("__") and bool(names & {"type", "__class__"})


def _globals_of(code: CodeType) -> Iterator[str]:
    for each in _codes(code):
        for instruction in dis.get_instructions(each):
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                yield str(instruction.argval)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _codes(inner)


def shared_state(
    model: nn.Module | None = None, task: Any = None, trainer: Any = None
) -> str | None:
    """Describe the first reason why all copies of a user's components could share state, or why the
    components cannot be copied. Return None if there is no such reason.

    Args:
        model: the model, before the first client.
        task: task of the model.
        trainer: class or function that makes the trainer.

    Example:
        >>> seen, __name__ = [], "mypkg.losses"
        >>> def loss(outputs, targets):
        ...     return (outputs - targets).abs() / len(seen)
        >>> def plain(outputs, targets):
        ...     return (outputs - targets).abs()
        >>> shared_state(task=loss), shared_state(task=plain)
        ("all copies share 'seen' of loss, a list", None)
    """
    if _has_any_global_hook():
        return "PyTorch has hooks of all modules"
    parts = {"model": model, "task": task, "trainer": trainer}
    used = {
        name: part for name, part in parts.items() if part is not None and not keeps_nothing(part)
    }
    for name, part in used.items():
        fixed = isinstance(part, nn.Module) and any(
            not each.requires_grad for each in tensors_of(part).values()
        )
        for item in reach(part, "" if name == "model" else name):
            why = _why(item, fixed)
            if why is not None:
                return why
    try:
        copy.deepcopy(trainer)
        copies(nn.Module() if model is None else model, task)
    except Exception as error:  # a user's object may raise anything
        return f"{' and '.join(used)} cannot be copied ({' '.join(f'{type(error).__name__}: {error}'.split())})"
    return None


def tensors_of(module: nn.Module) -> dict[int, Any]:
    """Make a memo for `copy.deepcopy` that contains a module's parameters and buffers. With this
    memo, a copy shares the parameters and buffers with the original.
    """
    return {id(each): each for each in (*module.parameters(), *module.buffers())}


def copies(module: nn.Module, task: Any) -> list[tuple[Any, Any]]:
    """Copy a model and a task. Return pairs (copy, original), one for each module of the model and
    one for the task. The copies share all parameters and buffers with the originals.

    Raises:
        Exception: a user's object cannot be copied (any type of exception).
    """
    for kind in {base for part in (*module.modules(), task) for base in type(part).__mro__}:
        if vars(kind).get("__slots__") and package_of_code(kind) not in KNOWN:
            raise TypeError(f"{kind.__name__} has slots")
    before, tensors = copy.deepcopy((module, task), tensors_of(module))
    return list(zip((*before.modules(), tensors), (*module.modules(), task), strict=True))


def _why(item: Reached, unseen: bool) -> str | None:
    """Return the reason why this object could carry state from one copy of its component to the
    next, or None if it cannot.
    """
    path, value, shared = item.path, item.value, item.shared
    if isinstance(value, FunctionType):
        return None if package_of_code(value) in KNOWN else _writes(value, unseen)
    if isinstance(value, type):
        return _why_class(value)
    if isinstance(value, ModuleType):
        if value.__name__ in _RANDOM:
            return f"{path} is {value.__name__}, whose random numbers follow from earlier draws"
        if _is_unchecked(value):
            return f"{path} holds operations that were not checked"
        return None if package_of_code(value) in KNOWN else f"{path} is the module {value.__name__}"
    if isinstance(value, BuiltinFunctionType):
        owner = value.__self__
        is_known = package_of_code(value) in KNOWN or (
            isinstance(owner, ModuleType | type) and package_of_code(owner) in KNOWN
        )
        bound = owner is not None and not isinstance(owner, ModuleType | type)
        return None if is_known and not bound else f"{path} is compiled code"
    if isinstance(
        value, property | staticmethod | classmethod | functools.cached_property | functools.partial
    ):
        return None
    if isinstance(value, functools._lru_cache_wrapper):
        return f"{path} is a cache"
    if isinstance(value, weakref.ref) and not isinstance(value(), Tensor | OrderedDict):
        return f"{path} is a weak reference"  # PyTorch has such references to parameters and hooks
    if not shared:
        return None
    if isinstance(value, tuple | frozenset | MethodType):
        return None
    if _is_plain_layer(value):
        return None
    if isinstance(value, GenericAlias | UnionType) or type(value).__module__ == "typing":
        return None
    if type(value).__module__ == "torch._ops":
        return f"{path} is an operation that was not checked" if _is_unchecked(value) else None
    return f"all copies share {path}, {with_article(type(value).__name__)}"


def _is_unchecked(value: Any) -> bool:
    """Whether an object is an operation of `torch.ops`, or a namespace of operations, outside
    `_OPERATIONS`.
    """
    if type(value).__module__ != "torch._ops":
        return False
    name = value.__name__ if isinstance(value, ModuleType) else str(value)
    return name.removeprefix("torch.ops.").partition(".")[0] not in _OPERATIONS


def _why_class(kind: type) -> str | None:
    for base in kind.__mro__:
        if package_of_code(base) in KNOWN:
            continue
        for name in _COPYING:
            if name in vars(base):
                return f"{base.__name__} has its own {name}"
        if package_of_code(type(base)) not in KNOWN and type(base) not in (type, ABCMeta):
            return f"{base.__name__} has a metaclass, {type(base).__name__}"
    return None


def _writes(function: FunctionType, unseen: bool) -> str | None:
    """Return the reason why a user's function could keep state between calls, or None if it cannot.

    Args:
        function: the function.
        unseen: whether the function could write values that `fedlgm.extension.restored.Restored`
            does not restore.
    """
    label, free, space = function.__qualname__, function.__code__.co_freevars, function.__globals__
    for code in _codes(function.__code__):
        instructions, root, libraries = list(dis.get_instructions(code)), "", dict[str, Any]()
        sets = any(each.opname in ("STORE_ATTR", "DELETE_ATTR") for each in instructions)
        for each, after in zip(instructions, [*instructions[1:], None], strict=True):
            name, kind = str(each.argval), each.opname
            is_set = kind in ("STORE_ATTR", "DELETE_ATTR")
            if kind in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                return f"{label} writes the global {name!r}"
            if kind in ("STORE_DEREF", "DELETE_DEREF") and name in free:
                return f"{label} writes {name!r} of the function around it"
            if kind == "IMPORT_NAME" and (name.partition(".")[0] not in KNOWN or name in _RANDOM):
                return f"{label} imports {name!r}"
            if kind in ("LOAD_GLOBAL", "LOAD_NAME"):
                if name not in space and not hasattr(builtins, name):
                    return f"{label} reads the global {name!r}, which is not defined yet"
                if name not in space and (name in _REFLECTION or (name == "type" and sets)):
                    return f"{label} calls {name}"
            if "ATTR" in kind or kind == "LOAD_METHOD":
                if (
                    name in _INSIDE
                    or (unseen and name in _UNSEEN)
                    or (name.startswith("__") and (is_set or (name == "__class__" and sets)))
                    or (name in _MAKING and not function.__name__.startswith("__"))
                    or (root and name.startswith("set_"))  # such as the number of threads
                ):
                    return f"{label} uses .{name}"
                if name == "random":
                    return f"{label} uses .random, whose numbers follow from earlier draws"
                if name == "ops" and (after is None or str(after.argval) not in _OPERATIONS):
                    return f"{label} uses .ops, of which an operation was not checked"
                if root and is_set:
                    return f"{label} writes an attribute of {root!r}"
            elif kind in ("LOAD_GLOBAL", "LOAD_NAME") or (kind == "LOAD_DEREF" and name in free):
                root = name
            elif kind == "IMPORT_NAME":
                root = name.partition(".")[0]
            elif "_FAST" in kind:
                names = each.argrepr.split(
                    ", "
                )  # some instructions of Python 3.13 refer to two names
                if kind.startswith("STORE"):
                    libraries[names[0]] = isinstance(space.get(root, builtins), ModuleType) and root
                root = libraries.get(names[-1]) or ""
            elif kind not in ("CACHE", "IMPORT_FROM"):
                root = ""
    return None
