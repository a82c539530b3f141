"""Copies of a user's model. Each copy is checked to be independent of the original and to compute
the same outputs.
"""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedlgm.errors import ConfigError
from fedlgm.extension.restored import Restored
from fedlgm.extension.separation import Reached, reach
from fedlgm.training import inputs
from fedlgm.training.devices import drawing, fork_rng, keep_modes, keep_values
from fedlgm.training.inputs import Inputs

M = TypeVar("M", bound=nn.Module)


def copy_model(module: M) -> M:
    """Make a deep copy of a model that shares no module, parameter or buffer with the original.

    Raises:
        ConfigError: an attribute cannot be copied; the copy would still use a module, parameter or
            buffer of the original; or parameters share memory, which the copied parameters would
            not share. The message names the attribute.

    Example:
        >>> layer, __name__ = nn.Linear(2, 1), "mypkg.models"
        >>> copy_model(layer).weight is layer.weight
        False
        >>> layer.double = lambda x: 2 * layer(x)
        >>> copy_model(layer)
        Traceback (most recent call last):
            ...
        fedlgm.errors.ConfigError: the model cannot be copied: 'double' refers to the original's module '' ...
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(f"a model to copy must be an nn.Module, got {type(module).__name__}")
    require_own_storage(module)
    try:
        with drawing():  # no copy while another thread changes weights in `require_faithful_copies`
            duplicate = copy.deepcopy(module)
    except Exception as error:  # attributes of a user's model may raise anything
        raise _copy_error(module, error) from error
    _require_apart(module, duplicate)
    return duplicate


def require_own_storage(module: nn.Module) -> None:
    """Refuse a model in which two parameters, or a parameter and another tensor, share memory.

    One parameter under two names is allowed.

    Raises:
        ConfigError: two tensors share memory; the message names them.

    Example:
        >>> pair = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        >>> pair[1].weight = nn.Parameter(pair[0].weight.data)
        >>> require_own_storage(pair)
        Traceback (most recent call last):
            ...
        fedlgm.errors.ConfigError: '0.weight' and '1.weight' of the model share memory, and training separates them: ...
    """
    areas = list[tuple[tuple[str, int], int, str, bool]]()
    for name, tensor in (*module.named_parameters(), *_tensors(module)):
        if (
            is_lazy(tensor)
            or tensor.is_meta
            or tensor.layout != torch.strided
            or tensor.numel() == 0
        ):
            continue
        last = sum(
            (size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)
        )
        start = tensor.data_ptr()
        end = start + (last + 1) * tensor.element_size()
        areas.append(((str(tensor.device), start), end, name, isinstance(tensor, nn.Parameter)))
    areas.sort(key=lambda area: area[:3])
    (furthest, until), owner, trained = ("", 0), "", False
    for (device, start), end, name, parameter in areas:
        if device == furthest and start < until and (parameter or trained):
            raise ConfigError(
                f"{owner!r} and {name!r} of the model share memory, and training separates them: "
                "for one parameter under two names assign the same nn.Parameter to both"
            )
        if device != furthest or end > until:
            (furthest, until), owner, trained = (device, end), name, parameter


@drawing()
def require_faithful_copies(module: nn.Module, x: Inputs) -> None:
    """Refuse a model if the outputs of a copy do not depend on the copy's own weights. To find out,
    both models get the same new weights, and their outputs and gradients are compared.

    Only one thread at a time changes weights or copies a model in this package, so threads may
    share a model.

    Args:
        module: the model, which is not changed.
        x: inputs of a few public examples.

    Raises:
        ConfigError: a copy's outputs or gradients differ from those of the model; the message names
            the parameter whose gradient differs.
    """
    if not isinstance(x, Tensor | tuple):
        raise ConfigError(f"inputs must be a tensor or a tuple of tensors, got {type(x).__name__}")
    duplicate = copy_model(module)
    restored = Restored.of(module, None)
    changed = (*(value for value in module.parameters() if value.requires_grad), *module.buffers())
    try:
        with keep_modes(module), keep_values(changed):
            outputs, gradients = _outputs_and_gradients(module.eval(), x)
    finally:
        if restored is not None:
            restored.restore()
    again, others = _outputs_and_gradients(duplicate.eval(), x)
    for name, gradient in gradients.items():
        if not inputs.close(gradient, others[name]):
            raise ConfigError(
                f"the model cannot be copied: the copy does not follow its own {name!r}, so that a "
                "layer would stay untrained: let forward reach all layers through self"
            )
    if not inputs.close(outputs, again):
        raise ConfigError(
            "the model cannot be copied: the copy's outputs for the same weights are different"
        )


def _outputs_and_gradients(module: nn.Module, x: Inputs) -> tuple[Tensor, dict[str, Tensor]]:
    """Change the model's weights, and return its outputs and gradients at the new weights."""
    trained = {name: value for name, value in module.named_parameters() if value.requires_grad}
    with torch.no_grad(), fork_rng(0):
        for value in trained.values():
            value.add_(0.1 * torch.randn(value.shape).to(value))
    with torch.enable_grad(), fork_rng(0):
        outputs = inputs.call(module, x)
        loss = (outputs.float() + outputs.float().square()).mean()
        gradients = torch.autograd.grad(loss, list(trained.values()), materialize_grads=True)
    dense = [gradient.to_dense() if gradient.is_sparse else gradient for gradient in gradients]
    return outputs.detach().clone(), dict(zip(trained, dense, strict=True))


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Pairs of path and value for all tensors of a model except parameters."""
    reached = (item for item in reach(module, "") if not item.shared)
    return [
        (i.path, i.value)
        for i in reached
        if isinstance(i.value, Tensor) and not isinstance(i.value, nn.Parameter)
    ]


def _require_apart(module: nn.Module, duplicate: nn.Module) -> None:
    """Refuse a copy from which a module, parameter or buffer of the original can be reached."""
    parts: dict[int, str] = {id(each): f"module {name!r}" for name, each in module.named_modules()}
    parts |= {id(each): f"parameter {name!r}" for name, each in module.named_parameters()}
    parts |= {id(each): f"buffer {name!r}" for name, each in module.named_buffers()}
    for item in reach(duplicate, ""):
        if id(item.value) in parts:
            raise ConfigError(
                f"the model cannot be copied: {_label(item)} refers to the original's "
                f"{parts[id(item.value)]} (in a function's closure or globals), which a copy would "
                "leave untrained: reach it through self"
            )


def _label(item: Reached) -> str:
    """Name of the attribute that refers to the original; if copying returned the original itself,
    the name of its `__deepcopy__`.
    """
    return repr(item.top or item.path) if item.path else f"{type(item.value).__name__}.__deepcopy__"


def _copy_error(module: nn.Module, error: Exception) -> ConfigError:
    """Make the error for the first attribute that cannot be copied."""
    for name, each in module.named_modules():
        memo: dict[int, Any] = {id(part): part for part in each.modules() if part is not module}
        for attribute, value in vars(each).items():
            if attribute == "_modules":
                continue
            try:
                copy.deepcopy(value, memo | {id(each): each})
            except Exception as failure:  # a user's object may raise anything
                what, remedy = type(value).__name__, "compute it in forward or leave it out"
                if isinstance(value, Tensor):
                    what = "a tensor with a gradient history, as pruning or the older weight_norm leaves it"
                    remedy = (
                        "make it permanent (torch.nn.utils.prune.remove), use "
                        "torch.nn.utils.parametrizations.weight_norm, or compute it in forward"
                    )
                path = f"{name}.{attribute}".lstrip(".")
                return ConfigError(
                    f"the model cannot be copied: attribute {path!r} is {what} "
                    f"({type(failure).__name__}): {remedy}"
                )
    text = str(error).splitlines() or [""]
    return ConfigError(f"the model cannot be copied: {type(error).__name__}: {text[0]}")
