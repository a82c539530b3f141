"""Copies of users' objects (model, task, trainer) that are made anew or restored for every client,
so that no state passes from one client to the next.

`fedlgm.extension.separation` finds the state that all copies would share.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FunctionType
from typing import Any, TypeVar

from torch import nn

from fedlgm.errors import PrivacyError
from fedlgm.extension.separation import (
    KNOWN,
    LINKS,
    copies,
    is_plain,
    keeps_nothing,
    package_of_code,
    reach,
    shared_state,
    tensors_of,
)

T = TypeVar("T")

_ONE_CLIENT = ContextVar("_ONE_CLIENT", default=False)


@contextmanager
def one_client() -> Iterator[None]:
    """Mark a block in which every trainer that is made has its own copies of the user's objects and
    trains only one client, so that it need not copy or restore anything.
    """
    token = _ONE_CLIENT.set(True)
    try:
        yield
    finally:
        _ONE_CLIENT.reset(token)


def fresh(part: T) -> T:
    """Return a copy of an object that may keep state, so that the object itself does not change. An
    object that keeps no state or cannot be copied is returned itself.
    """
    if _ONE_CLIENT.get() or keeps_nothing(part):
        return part
    try:
        return copy.deepcopy(part)
    except Exception:  # any exception of a user's object; `shared_state` reports it
        return part


class Watched:
    """The users' functions and classes, and the modules, that all copies of the given objects
    share. No client may change them.

    Args:
        parts: the objects by name, as for `shared_state`, which does not detect that a function
            changes an attribute of such an object through another name.

    Example:
        >>> __name__ = "mypkg.losses"
        >>> def loss(outputs, targets):
        ...     this = loss
        ...     this.seen = outputs
        >>> watched = Watched(task=loss)
        >>> loss(1, 2)
        >>> watched.check()
        Traceback (most recent call last):
            ...
        fedlgm.errors.PrivacyError: training has changed loss.seen, which all copies share: ...
    """

    def __init__(self, **parts: Any) -> None:
        self._held: list[tuple[Any, dict[str, Any]]] = []
        if shared_state(**parts) is None:  # otherwise the guarantee is conditional
            reached = [item for part in parts.values() for item in reach(part, "") if item.shared]
            held = {id(item.value): item.value for item in reached if _is_watched(item.value)}
            self._held = [(each, _own_names(each)) for each in held.values()]

    def check(self) -> None:
        """Refuse a change of a watched function or class.

        Raises:
            PrivacyError: an attribute was changed; the message names it.
        """
        for each, before in self._held:
            now = _own_names(each)
            if now.keys() != before.keys() or any(
                now[name] is not value for name, value in before.items()
            ):
                name = next(
                    n for n in {**now, **before} if now.get(n, ...) is not before.get(n, ...)
                )
                label = getattr(each, "__qualname__", type(each).__name__)
                raise PrivacyError(
                    f"training has changed {label}.{name}, which all copies share: keep state "
                    "in attributes of self, which are restored for every client"
                )


def _is_watched(value: Any) -> bool:
    """Whether an object is a user's function or class, or a module that all copies share."""
    code = isinstance(value, FunctionType | type) and package_of_code(value) not in KNOWN
    return code or isinstance(value, nn.Module)


def _own_names(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, except the attributes that Python and libraries set."""
    return {
        name: each
        for name, each in vars(value).items()
        if not name.startswith(("__", "_abc_", "_torchdynamo"))
    }


class Restored:
    """A model and its task, restored to their first state before every client.

    Modules, parameters, buffers and the task remain the same objects, so that references to them
    stay valid; their attributes are restored. The values of buffers and frozen parameters are not
    restored, because `Unchanged` refuses a model that changes them.

    Args:
        module: the model.
        task: its task.

    Example:
        >>> import torch
        >>> class Counts(nn.Linear):
        ...     def forward(self, x):
        ...         self.calls = getattr(self, "calls", 0) + 1
        ...         return super().forward(x)
        >>> module = Counts(2, 1)
        >>> restored = Restored.of(module, object())
        >>> _ = module(torch.zeros(1, 2))
        >>> changed = restored.restore()
        >>> hasattr(module, "calls")
        False
    """

    def __init__(self, module: nn.Module, task: Any) -> None:
        # the memo contains the ids of the copies
        self._pairs, tensors = copies(module, task), tensors_of(module)
        self._tensors = [(each, dict(vars(each))) for each in tensors.values()]
        self._watched = Watched(model=module, task=task)
        self._objects = [_Attributes(before, now) for before, now in self._pairs]
        self._memo: dict[int, Any] = tensors | {id(before): now for before, now in self._pairs}
        for (before, _), each in zip(self._pairs, self._objects, strict=True):
            self._memo |= {id(vars(before)[name]): container for name, container, _ in each.links}

    @classmethod
    def of(cls, module: nn.Module, task: Any) -> Restored | None:
        """Make the object that restores model and task. Return None if nothing needs to be
        restored, or if the objects cannot be copied (which `shared_state` reports).
        """
        if _ONE_CLIENT.get() or (keeps_nothing(module) and keeps_nothing(task)):
            return None
        try:
            return cls(module, task)
        except Exception:  # a user's object may raise anything
            return None

    def modes(self) -> list[tuple[nn.Module, bool]]:
        """Return every module of the model, each with whether it is in training mode."""
        return [(part, part.training) for _, part in self._pairs if isinstance(part, nn.Module)]

    def check(self) -> None:
        """Refuse a change of functions and classes that all copies share (see `Watched.check`)."""
        self._watched.check()

    def restore(self) -> bool:
        """Undo every change that the last client made.

        Returns:
            Whether the last client may have changed something.

        Raises:
            PrivacyError: the last client has changed a class or function.
        """
        self.check()
        changed = False
        memo = dict(self._memo)
        for tensor, held in self._tensors:
            tensor.grad = None
            if vars(tensor) or held:
                changed = True
                vars(tensor).clear()
                vars(tensor).update(held)
        for each in self._objects:
            changed |= each.restore(memo)
        return changed


@contextmanager
def restored_around(restored: Restored | None) -> Iterator[None]:
    """Restore the objects before and after the block. The modules' training modes are the same in
    and after the block as before it.
    """
    if restored is None:
        yield
        return
    modes = restored.modes()

    def restore() -> None:
        restored.restore()
        for part, mode in modes:
            part.training = mode

    restore()
    try:
        yield
    finally:
        restore()


class _Attributes:
    """The attributes of one object, which can be restored.

    Args:
        before: copy of the object.
        now: the object.
    """

    def __init__(self, before: Any, now: Any) -> None:
        self._now: dict[str, Any] = getattr(now, "__dict__", {})
        held: dict[str, Any] = getattr(before, "__dict__", {})
        links = LINKS if isinstance(now, nn.Module) else ()
        self._names = held.keys()
        self._values = [(name, value) for name, value in held.items() if is_plain(value)]
        self.links = [
            (name, self._now[name], dict(self._now[name]) if value else {})
            for name, value in held.items()
            if name in links or (type(value) in (dict, OrderedDict, set) and not value)
        ]
        others = self._names - {name for name, *_ in (*self._values, *self.links)}
        self._copied = [(name, value) for name, value in held.items() if name in others]

    def restore(self, memo: dict[int, Any]) -> bool:
        """Restore the attributes, and return whether they may have changed. `memo` is the memo of
        `copy.deepcopy`.
        """
        now, changed = self._now, bool(self._copied)
        for name in now.keys() - self._names:
            changed = True
            del now[name]
        for name, value in self._values:
            if now.get(name, ...) is not value:
                changed = changed or name != "training"
                now[name] = value
        for name, container, items in self.links:
            changed |= now.get(name) is not container
            now[name] = container
            if len(container) != len(items) or any(
                container.get(key) is not value for key, value in items.items()
            ):
                changed = True
                container.clear()
                container.update(items)
        for name, value in self._copied:
            now[name] = copy.deepcopy(value, memo)
        return changed
