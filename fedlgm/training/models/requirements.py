"""Requirements that a model must meet for private and reproducible training.

A model must keep no state between clients, because state from one client would change the next
client's update. Constant buffers, such as a causal mask or position codes, are allowed.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from fedlgm.errors import ConfigError, Notice
from fedlgm.extension.loader import package_of, users_code
from fedlgm.extension.restored import Restored
from fedlgm.training import inputs
from fedlgm.training.devices import fork_rng, keep_modes, or_another_thread
from fedlgm.training.inputs import Inputs, close
from fedlgm.training.models.built import refuse_parameter_hooks

_ADVICE = (
    "use layers without state, for example GroupNorm in place of BatchNorm "
    "(fedlgm.models.to_groupnorm replaces them); a BatchNorm whose statistics are public "
    "constants may stay if it is in evaluation mode while the model is not"
)


class Frozen:
    """Base class of BatchNorm layers that use their running statistics as constants in both
    training and evaluation mode, so that an example's output does not depend on the other examples.
    """

    def forward(self: Any, input: Tensor) -> Tensor:
        """Normalise the input by the constant statistics."""
        self._check_input_dim(input)
        mean, variance = self.running_mean, self.running_var
        return nn.functional.batch_norm(input, mean, variance, self.weight, self.bias, eps=self.eps)


class FrozenBatchNorm1d(Frozen, nn.BatchNorm1d):
    """A frozen `BatchNorm1d` (`freeze_norms_`)."""


class FrozenBatchNorm2d(Frozen, nn.BatchNorm2d):
    """A frozen `BatchNorm2d` (`freeze_norms_`)."""


class FrozenBatchNorm3d(Frozen, nn.BatchNorm3d):
    """A frozen `BatchNorm3d` (`freeze_norms_`)."""


_FROZEN: dict[type, type] = {
    kind.__mro__[2]: kind for kind in (FrozenBatchNorm1d, FrozenBatchNorm2d, FrozenBatchNorm3d)
}


def freeze_norms_(module: nn.Module) -> None:
    """Make the statistics constant in those BatchNorm layers that the user keeps in evaluation
    mode. The layers are changed in place.

    A user keeps a layer in evaluation mode if it is in this mode although the model is in training
    mode, or if it stays in this mode when the model's `train` is called. The class of such a layer
    is replaced by a class whose output is the same in both modes.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3).eval())
        >>> freeze_norms_(model)
        >>> model.train()[1](torch.ones(4, 3)).shape, model[1].running_mean.tolist()
        (torch.Size([4, 3]), [0.0, 0.0, 0.0])
    """
    norms = [child for child in module.modules() if type(child) in _FROZEN]
    if not norms:
        return
    training = module.training
    eval_norms = {child for child in norms if training and not child.training}
    module.train()
    eval_norms |= {child for child in norms if not child.training}
    for child in eval_norms:
        if child.running_mean is not None:
            child.__class__ = _FROZEN[type(child)]
    module.train(training)


def require_stateless(module: nn.Module) -> None:
    """Refuse a module with running statistics, which are buffers that training would change.

    The values that clients would write to such buffers are neither bounded nor noised nor
    aggregated. `Unchanged` refuses a module that changes other buffers.

    Raises:
        ConfigError: the message names the first such buffer.
    """
    for name, child in module.named_modules():
        if (
            isinstance(child, _NormBase)
            and child.running_mean is not None
            and not isinstance(child, Frozen)
        ):
            raise _state_error(f"{name}.running_mean".lstrip("."))


def require_trainable(module: object, label: str = "'custom'", *, statistics: bool = False) -> None:
    """Refuse an object that cannot be trained as a model.

    Args:
        module: the object.
        label: name of the model in the message.
        statistics: whether to accept running statistics, as is safe if they do not leave the
            clients.

    Raises:
        ConfigError: the object is not an `nn.Module`, is compiled, or has no trainable parameters;
            a parameter is lazy, empty, without values, not float32 or not finite, or has a hook
            that runs only when a gradient is accumulated, which no trainer does; or the object has
            running statistics (see `require_stateless`).
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"model {label} must be an nn.Module, but it is of type {type(module).__name__}"
        )
    if package_of(type(module)) == "opacus":
        raise ConfigError(
            f"model {label} is wrapped by Opacus ({type(module).__name__}): pass the plain "
            "nn.Module, because fedlgm computes and bounds the gradients itself"
        )
    if isinstance(module, torch.jit.ScriptModule) or hasattr(module, "_orig_mod"):
        raise ConfigError(
            f"model {label} is compiled ({type(module).__name__}): pass the nn.Module from which "
            "it was made; training.compile = true compiles the training"
        )
    trained = {
        name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad
    }
    if not trained:
        raise ConfigError(
            f"model {label} has no trainable parameters: there is nothing to learn or to release"
        )
    unmade = [name for name, parameter in module.named_parameters() if parameter.is_meta]
    if unmade and torch.get_default_device().type != "meta":
        raise ConfigError(
            f"model {label}: parameter {unmade[0]!r} is on the device meta and has no values"
        )
    for name, parameter in trained.items():
        if is_lazy(parameter):
            raise ConfigError(
                f"model {label}: parameter {name!r} has no size before the first forward pass: use "
                "a layer that is given its sizes instead of the lazy one, or call the model on an "
                "example first"
            )
        if parameter.numel() == 0:
            raise ConfigError(
                f"model {label}: parameter {name!r} is empty, so there is nothing to release: "
                "freeze it"
            )
        if parameter.dtype != torch.float32:
            remedy = (
                "train its real and imaginary parts as two parameters"
                if parameter.is_complex()
                else "model.float() converts them"
            )
            raise ConfigError(
                f"model {label}: parameter {name!r} is {parameter.dtype}, but trained parameters "
                f"must be float32: {remedy}"
            )
    for name, parameter in module.named_parameters():  # also frozen ones: outputs would be NaN
        if not (parameter.is_meta or is_lazy(parameter) or torch.isfinite(parameter).all()):
            raise ConfigError(
                f"model {label}: parameter {name!r} holds NaN or infinity before training"
            )
    refuse_parameter_hooks(
        module, "no trainer accumulates gradients in parameters", ["_post_accumulate_grad_hooks"]
    )
    if not statistics:
        require_stateless(module)
    _notice_lists(module, label)


def _layers_in(value: Any, depth: int = 4) -> list[nn.Module]:
    """Collect the layers in a list, tuple or dict, which may contain further lists, tuples or
    dicts.
    """
    if isinstance(value, nn.Module):
        return [value]
    held = value.values() if isinstance(value, dict) else value
    if not depth or not isinstance(value, dict | list | tuple):
        return []
    return [layer for each in held for layer in _layers_in(each, depth - 1)]


def _notice_lists(module: nn.Module, label: str) -> None:
    """Warn of layers in an ordinary list, tuple or dict, because PyTorch does not count their
    parameters among a model's parameters.
    """
    counted = {id(parameter) for parameter in module.parameters()}
    for name, child in module.named_modules():
        for key, value in vars(child).items():
            if any(
                id(parameter) not in counted
                for layer in _layers_in(value)
                for parameter in layer.parameters()
            ):
                attribute = f"{name}.{key}".lstrip(".")
                warnings.warn(
                    Notice(
                        f"model {label}: the layers in {attribute!r} are not trained, because a "
                        f"plain {type(value).__name__} hides them from PyTorch: use nn.ModuleList "
                        "or nn.ModuleDict"
                    ),
                    stacklevel=3,
                )


@torch.no_grad()
def require_repeatable(module: nn.Module, x: Inputs) -> None:
    """Refuse a module that keeps state between calls, or that draws random numbers which cannot be
    reproduced from a seed.

    State from one client would change the next client's update, and no bound would cover the
    resulting change of the sum. A run seeds only the random numbers that PyTorch draws in training
    mode (dropout), for each client and round.

    Args:
        module: the module, which is called in training and evaluation mode; its mode is restored.
        x: inputs of a few public examples.

    Raises:
        ConfigError: the same inputs give different outputs in a second call, or the module changes
            a buffer or fails.
    """
    buffers, restored = Unchanged(module), Restored.of(module, None)
    outputs, after = [], list[Tensor]()
    with keep_modes(module):
        for mode, seed in ((False, 0), (True, 0), (True, 0), (False, 1)):
            # In evaluation mode no random numbers may be drawn.
            with users_code("the model fails in training mode", module), fork_rng(seed):
                outputs.append(inputs.call(module.train(mode), x).clone())
        single = "the model fails in training mode on one example, as the last batch of a client"
        with users_code(single, module), fork_rng(0):
            inputs.call(module.train(), inputs.take(x, slice(1)))
        if restored is not None:
            restored.restore()
        for mode in (False, True):  # the second call follows a call with fewer examples
            for given in (inputs.take(x, slice(1)), x):
                with users_code("the model fails in training mode", module), fork_rng(0):
                    after.append(inputs.call(module.train(mode), given).clone())
    buffers.check()
    pairs = (
        (outputs[1], outputs[2]),
        (outputs[0], outputs[3]),
        (outputs[0], after[1]),
        (outputs[1], after[3]),
    )
    for first, again in pairs:
        # Terms may be summed in a different order. The effect of stored or random values is far
        # larger than the resulting rounding differences.
        if not torch.allclose(first, again, rtol=1e-5, atol=1e-7, equal_nan=True):
            raise ConfigError(
                "the model returns different outputs for the same inputs when it is called again: "
                "it remembers what it has seen, so that one client's data would change another "
                "client's update, or it draws random numbers in evaluation or without PyTorch, "
                "which no run could repeat" + or_another_thread()
            )


def require_seen_gradients(module: nn.Module, x: Inputs) -> None:
    """Refuse a module if training cannot obtain the gradients of all its parameters.

    Training computes gradients with `torch.autograd.grad`. The older (reentrant) kind of activation
    checkpointing computes the gradients of the layers inside the checkpoint in a separate backward
    pass, whose results `torch.autograd.grad` does not return. These layers would not be trained,
    and would only accumulate noise.

    Args:
        module: the module; the `grad` attributes of its parameters are changed.
        x: inputs of a few public examples.

    Raises:
        ConfigError: the message names the parameter.
    """
    trained = {name: value for name, value in module.named_parameters() if value.requires_grad}
    with fork_rng(0):
        loss = inputs.call(module, x).float().square().sum()
    seen = torch.autograd.grad(loss, [*trained.values()], retain_graph=True, allow_unused=True)
    loss.backward()
    for (name, value), gradient in zip(trained.items(), seen, strict=True):
        if gradient is None and value.grad is not None:
            raise ConfigError(
                f"the gradient of {name!r} is computed in a backward pass of the model's own, so "
                "it would stay untrained: with activation checkpointing set use_reentrant=False"
            )


@torch.no_grad()
def draws_at_random(module: nn.Module, x: Inputs) -> bool:
    """Whether a module's outputs in training mode are random, for example because of dropout.

    Args:
        module: a repeatable module (see `require_repeatable`); its mode is restored.
        x: inputs of a few public examples.
    """
    outputs = []
    for seed in range(3):
        with keep_modes(module), fork_rng(seed):
            outputs.append(inputs.call(module.train(), x).clone())
    return not all(torch.equal(outputs[0], other) for other in outputs[1:])


def require_drawing_nothing(module: nn.Module, x: Inputs | None = None) -> None:
    """Refuse a module that draws random numbers in training, because an example's gradient would
    depend on the batch.

    Args:
        module: the module, whose mode is restored.
        x: inputs of a few public examples, which are used to detect functional dropout. With None,
            only dropout layers are detected.

    Raises:
        ConfigError: the module draws random numbers.
    """
    for name, child in module.named_modules():
        rate = child.p if isinstance(child, _DropoutNd) else getattr(child, "dropout", 0.0)
        if isinstance(rate, float) and rate > 0:
            raise ConfigError(
                f"{name or type(child).__name__!r} drops units at random, which is not supported "
                "where single examples are protected: set its dropout to 0 (for module in "
                "model.modules(): if isinstance(module, torch.nn.Dropout): module.p = 0.0)"
            )
    if x is not None and draws_at_random(module, x):
        raise ConfigError(
            "the model draws random numbers in training (functional dropout), which is not "
            "supported where single examples are protected: leave it out"
        )


@torch.no_grad()
def require_separate(module: nn.Module, x: Inputs) -> None:
    """Refuse a module if, in training mode, its outputs for an example depend on the other examples
    of the batch.

    Args:
        module: the module, whose mode is restored.
        x: inputs of a few public examples.

    Raises:
        ConfigError: outputs depend on other examples, or the module fails on a single example.
    """
    with keep_modes(module):
        outputs = inputs.call(module.train(), x)
        with users_code("the model fails on a single example", module):
            alone = torch.cat(
                [inputs.call(module, inputs.take(x, slice(i, i + 1))) for i in range(len(outputs))]
            )
    if not close(outputs, alone):
        raise ConfigError(
            "the model's outputs for an example depend on the other examples of its batch"
        )


class Unchanged:
    """A record of a module's buffers and frozen parameters, with which later changes are detected.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._buffers = self._versions()

    def check(self) -> None:
        """Refuse the module if a buffer or frozen parameter has been changed or replaced since this
        record was made.

        Raises:
            ConfigError: a buffer or frozen parameter differs; the message names the first
                difference.
        """
        if not self._buffers:
            return
        now = self._versions()
        for name, (buffer, version) in self._buffers.items():
            if name not in now or now[name][0] is not buffer or now[name][1] != version:
                raise _state_error(
                    name, "frozen parameter" if isinstance(buffer, nn.Parameter) else "buffer"
                )

    def _versions(self) -> dict[str, tuple[Tensor, int]]:
        fixed = dict(self._module.named_buffers())
        fixed |= {
            name: value
            for name, value in self._module.named_parameters()
            if not value.requires_grad
        }
        return {name: (value, value._version) for name, value in fixed.items()}


def _state_error(name: str, kind: str = "buffer") -> ConfigError:
    return ConfigError(
        f"the model's {kind} {name!r} would follow private data unbounded: {_ADVICE}"
    )
