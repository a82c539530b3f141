"""Attributes of a user's modules, restored so that no pass over a batch leaves anything for the next one."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedlgm.errors import ConfigError
from fedlgm.extension import package_of

_OF_MODULES = frozenset(vars(nn.Module()))
_CONSTANT = (int, float, complex, str, bytes, type(None), type, torch.dtype, torch.device)


class Attributes:
    """The attributes of all modules inside one whose class is not PyTorch's or this package's.

    Parameters, buffers, submodules and hooks are left alone: `models.built.Built` and `models.Unchanged` check them.
    What a user's code keeps in global variables, classes or closures is not an attribute.

    Args:
        module: the module.

    Raises:
        ConfigError: an attribute cannot be copied; the message names it.

    Example:
        >>> class Counting(nn.Identity):
        ...     __module__ = "mypkg.models"
        ...     seen = None
        ...     def forward(self, x):
        ...         self.seen = x.mean()
        ...         return x
        >>> module = Counting()
        >>> with Attributes(module).restored():
        ...     _ = module(torch.ones(3))
        >>> module.seen is None
        True
    """

    def __init__(self, module: nn.Module) -> None:
        users = [part for part in module.modules() if package_of(type(part)) not in ("torch", "fedlgm")]
        shared = (*module.modules(), *module.parameters(), *module.buffers())
        self._shared = {id(value): value for value in shared}
        self._constant: list[tuple[nn.Module, dict[str, Any]]] = []
        self._mutable: list[tuple[nn.Module, dict[str, Any]]] = []
        self._tensors: list[tuple[Tensor, Tensor, int]] = []
        for part in users:
            state = {name: value for name, value in vars(part).items() if name not in _OF_MODULES}
            mutable = {name: value for name, value in state.items() if not self._is_constant(value)}
            self._constant.append((part, {name: state[name] for name in state if name not in mutable}))
            if mutable:
                self._mutable.append((part, mutable))
        self._mutable = self._copy()  # the user keeps references to the originals

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the attributes before and after the code inside."""
        self.restore()
        try:
            yield
        finally:
            self.restore()

    def restore(self) -> None:
        """Give every attribute the value that it had when this object was made, and delete those added since."""
        for part, constant in self._constant:
            own = vars(part)
            for name in [name for name in own if name not in _OF_MODULES and name not in constant]:
                del own[name]
            own.update(constant)
        for part, fresh in self._copy():
            vars(part).update(fresh)
        for tensor, value, version in self._tensors:
            if tensor._version != version:
                tensor.data.copy_(value)

    def _is_constant(self, value: Any) -> bool:
        if isinstance(value, Tensor) and id(value) not in self._shared:
            self._tensors.append((value, value.detach().clone(), value._version))
        if isinstance(value, tuple | frozenset):
            return all(map(self._is_constant, value))
        return isinstance(value, (*_CONSTANT, Tensor, nn.Module)) or callable(value)

    def _copy(self) -> list[tuple[nn.Module, dict[str, Any]]]:
        memo = dict(self._shared)
        fresh = []
        for part, mutable in self._mutable:
            values = {}
            for name, value in mutable.items():
                try:
                    values[name] = copy.deepcopy(value, memo)
                except Exception as error:
                    raise ConfigError(
                        f"the attribute {name!r} of {type(part).__name__} cannot be copied ({error}), so what a step "
                        "leaves in it would reach the next step: create it where it is used"
                    ) from error
            fresh.append((part, values))
        return fresh
