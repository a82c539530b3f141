"""A model as it was when a trainer was made of it.

Trainers look at a model once and choose how to differentiate it, some of them without calling it. So a hook or a module
that is added later would not run, and a layer that mixes examples would not be found.
"""

from __future__ import annotations

from collections.abc import Hashable

from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from fedlgm.errors import ConfigError

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class Built:
    """Modules, parameters, hooks and replaced `forward` methods of a model.

    Args:
        module: the model.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 2))
        >>> built = Built(model)
        >>> built.check()
        >>> _ = model[0].register_forward_hook(lambda *_: None)
        >>> built.check()
        Traceback (most recent call last):
            ...
        fedlgm.errors.ConfigError: the model was changed in '0' (Linear) after its trainer was made: change it before
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.renew()

    def renew(self) -> None:
        """Take the model as it is now, after a change by this package."""
        self._seen = self._now()
        self._kept = list(self._module.modules()), list(self._module.parameters())  # so that no other object is as old

    def check(self) -> None:
        """Refuse a model that was changed since.

        Raises:
            ConfigError: the message names the first module that is another one.
        """
        now = self._now()
        if now == self._seen:
            return
        names = dict.fromkeys([*now, *self._seen])
        name = next(name for name in names if now.get(name) != self._seen.get(name))
        kind = type(self._module.get_submodule(name)).__name__ if name in now else "gone"
        raise ConfigError(f"the model was changed in {name!r} ({kind}) after its trainer was made: change it before")

    def _now(self) -> dict[str, Hashable]:
        found = {name: _state(child) for name, child in self._module.named_modules(remove_duplicate=False)}
        found[""] = found[""], _has_any_global_hook()
        return found


def _state(module: nn.Module) -> Hashable:
    own = vars(module)
    parameters = [
        (name, id(value), value.requires_grad, *map(id, value._backward_hooks or {}))
        for name, value in module._parameters.items()
        if value is not None
    ]
    hooks = [tuple(map(id, own[kind].values())) for kind in _HOOKS]
    return id(module), type(module), id(own.get("forward")), tuple(parameters), tuple(hooks)


def hooked(module: nn.Module) -> bool:
    """Whether a module, one of its parameters or all modules together have hooks, or its `forward` was replaced."""
    own = vars(module)
    of_parameters = any(value._backward_hooks for value in module.parameters(recurse=False))
    return any(own[kind] for kind in _HOOKS) or "forward" in own or of_parameters or _has_any_global_hook()


def refuse_gradient_hooks(module: nn.Module) -> None:
    """Refuse hooks on gradients that trainers of many clients or examples at once would not run.

    Raises:
        ConfigError: the message names the parameter or the module.
    """
    hooked_parameters = (f"parameter {name!r}" for name, value in module.named_parameters() if value._backward_hooks)
    pre_hooked = (
        f"module {name!r} on its output" for name, child in module.named_modules() if child._backward_pre_hooks
    )
    for found in (*hooked_parameters, *pre_hooked):
        raise ConfigError(
            f"a gradient hook of {found} would not run, because gradients are taken of many clients or examples at "
            "once: remove it, or change the forward pass instead"
        )
