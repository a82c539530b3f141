"""The state of a model at the time when a trainer was created for it.

A trainer examines its model once and then chooses how to differentiate it. Some trainers never call
the model itself. A hook or module that is added later would therefore not run, and an added layer
that mixes examples would not be found.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, itemgetter

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from fedlgm.errors import ConfigError

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_GRADIENT = ("_backward_hooks", "_post_accumulate_grad_hooks")
_parts, _flags = (
    itemgetter("_modules", "_parameters", *_HOOKS),
    attrgetter("requires_grad", *_OF_GRADIENT),
)


class Built:
    """A record of a model's modules, parameters, hooks and replaced `forward` methods, with which
    later changes are detected.

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
        """Record the model's present state, after this package has changed the model."""
        # References to these objects are kept, so that no other object gets the same id.
        self._modules, self._kept = list(self._module.modules()), list(self._module.parameters())
        self._seen, self._global = _state(self._modules), _has_any_global_hook()
        self._named = self._now()

    def renew_if_changed(self) -> None:
        """Call `renew` if the model has changed. The check for changes is cheap."""
        if _state(self._modules) != self._seen:
            self.renew()

    def check(self) -> None:
        """Refuse a model that has changed since `Built` or `renew` recorded its state.

        Clients' steps call this method, so it must be fast: it examines only the known modules and
        their children, without a new walk over the model.

        Raises:
            ConfigError: the message names the first module that differs.
        """
        if _state(self._modules) == self._seen and _has_any_global_hook() == self._global:
            return
        now, seen = self._now(), self._named
        name = next((name for name in {**now, **seen} if now.get(name) != seen.get(name)), "")
        kind = type(self._module.get_submodule(name)).__name__ if name in now else "gone"
        raise ConfigError(
            f"the model was changed in {name!r} ({kind}) after its trainer was made: change it "
            "before"
        )

    def _now(self) -> dict[str, list[object]]:
        named = self._module.named_modules(remove_duplicate=False)
        return {name: [id(child), *_state([child], children=False)] for name, child in named}


def _state(modules: list[nn.Module], children: bool = True) -> list[object]:
    """List the class, children, replaced `forward`, parameters and hooks of modules, in one flat
    list, which is the fastest form to compare.
    """
    state: list[object] = []
    for module in modules:
        attributes = vars(module)
        inside, parameters, before, after, back_before, back = _parts(attributes)
        state.append(type(module))
        if inside and children:
            state += inside
            state += map(id, inside.values())
        if "forward" in attributes:
            state += ("forward", id(attributes["forward"]))
        for name, value in parameters.items():
            if value is not None:
                requires_grad, of_gradient, accumulated = _flags(value)
                state += (name, id(value), requires_grad)
                for hooks in (of_gradient, accumulated):
                    if hooks:
                        state += ("hooks", *map(id, hooks.values()))
        if before or after or back_before or back:
            state += [tuple(map(id, kind.values())) for kind in (before, after, back_before, back)]
    return state


def is_altered(module: nn.Module) -> bool:
    """Whether the module's class alone does not determine what the module computes. This is so if
    the module, its parameters or all modules have hooks; if a method is replaced, such as `forward`
    or a method that `forward` calls; or if a tensor has a subclass as its type or replaces a
    parameter.

    Example:
        >>> layer = nn.Linear(2, 1)
        >>> is_altered(layer)
        False
        >>> layer.forward = lambda x: x - x.mean()
        >>> is_altered(layer)
        True
    """
    attributes, kind = vars(module), type(module)
    parameters = [*module.parameters(recurse=False)]
    return (
        any(attributes[hooks] for hooks in _HOOKS)
        or any(
            isinstance(value, Tensor) or (callable(value) and hasattr(kind, name))
            for name, value in attributes.items()
        )
        or any(value._backward_hooks or type(value) is not nn.Parameter for value in parameters)
        or any(type(value) is not Tensor for value in module.buffers(recurse=False))
        or bool(_has_any_global_hook())
    )


def refuse_gradient_hooks(module: nn.Module) -> None:
    """Refuse hooks on gradients, because trainers that compute the gradients of many clients or
    examples at once would not run them.

    Raises:
        ConfigError: the message names the parameter or the module.
    """
    refuse_parameter_hooks(module, "gradients are taken of many clients or examples at once")
    for name, child in module.named_modules():
        if child._backward_pre_hooks:
            raise _not_run(
                f"module {name!r} on its output",
                "gradients are taken of many clients or examples at once",
            )


def refuse_parameter_hooks(
    module: nn.Module, why: str, kinds: Sequence[str] = _OF_GRADIENT
) -> None:
    """Refuse hooks of parameters that would not run.

    Args:
        module: the module.
        why: the reason why such hooks do not run, for the message.
        kinds: attributes of the parameters that hold the hooks.

    Raises:
        ConfigError: the message names the parameter.
    """
    for name, value in module.named_parameters():
        if any(getattr(value, kind) for kind in kinds):
            raise _not_run(f"parameter {name!r}", why)


def _not_run(whose: str, why: str) -> ConfigError:
    return ConfigError(
        f"a gradient hook of {whose} would not run, because {why}: remove it, or change the "
        "forward pass instead"
    )
