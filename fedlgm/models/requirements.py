"""What a model must be like to be trained privately, and the same way in every process.

Nothing may be kept between clients: what a model remembers of one client would reach the next one's update. Buffers
that stay as they are (a causal mask, position codes) are welcome.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.nn.parameter import is_lazy

from fedlgm import inputs
from fedlgm.devices import seeded
from fedlgm.errors import ConfigError
from fedlgm.extension import users_code
from fedlgm.inputs import Inputs, close

_ADVICE = (
    "use layers without state, for example GroupNorm in place of BatchNorm (fedlgm.models.to_groupnorm replaces them)"
)


def require_stateless(module: nn.Module) -> None:
    """Refuse a module with buffers that training is known to change: running statistics.

    What clients keep in them is neither bounded nor noised, and never aggregated. A module that changes a buffer in
    other ways is refused by `Unchanged` when it does.

    Raises:
        ConfigError: the message names the first such buffer.
    """
    for name, child in module.named_modules():
        if isinstance(child, _NormBase) and child.running_mean is not None:
            raise _trained(f"{name}.running_mean".lstrip("."))


def require_trainable(module: object, label: str = "'custom'") -> None:
    """Refuse what cannot be trained as a model.

    Args:
        module: the would-be model.
        label: what it is called, for the message.

    Raises:
        ConfigError: no `nn.Module`, without trainable parameters or with some that are lazy, empty, not float32 or not
            finite, or see `require_stateless`.
    """
    if not isinstance(module, nn.Module):
        raise ConfigError(f"model {label} must be an nn.Module, it is of type {type(module).__name__}")
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    if not trained:
        raise ConfigError(f"model {label} has no trainable parameters: there is nothing to learn or to release")
    for name, parameter in trained.items():
        if is_lazy(parameter):
            raise ConfigError(
                f"model {label}: parameter {name!r} has no size before the first forward pass: use a layer that is "
                "given its sizes in the place of the lazy one, or call the model on an example first"
            )
        if parameter.numel() == 0:
            raise ConfigError(f"model {label}: parameter {name!r} is empty, there is nothing to release: freeze it")
        if parameter.dtype != torch.float32:
            raise ConfigError(f"model {label}: parameter {name!r} is {parameter.dtype}, trained parameters are float32")
        if not (parameter.is_meta or torch.isfinite(parameter).all()):
            raise ConfigError(f"model {label}: parameter {name!r} holds NaN or infinity before training")
    require_stateless(module)


@torch.no_grad()
def require_repeatable(module: nn.Module, x: Inputs) -> None:
    """Refuse a module that remembers what it has seen, or draws random numbers that a run could not draw again.

    What a module keeps of one client would reach the next one's update and so the sum, beyond every bound. What it
    draws by PyTorch in training (dropout) is seeded for every client and round; nothing else is.

    Args:
        module: called in both modes; its mode stays as it was.
        x: inputs of a few public examples.

    Raises:
        ConfigError: the same inputs give other outputs when it is called again, it writes a buffer, or it fails.
    """
    buffers, training = Unchanged(module), module.training
    outputs = []
    try:
        for mode, seed in ((False, 0), (True, 0), (True, 0), (False, 1)):  # in evaluation nothing may be drawn at all
            with users_code("the model fails in training mode", module), seeded(seed):
                outputs.append(inputs.call(module.train(mode), x).clone())
    finally:
        module.train(training)
    buffers.check()
    for one, again in ((outputs[1], outputs[2]), (outputs[0], outputs[3])):
        # Sums may be added up in another order; what is remembered or drawn shows well above that.
        if not torch.allclose(one, again, rtol=1e-5, atol=1e-7, equal_nan=True):
            raise ConfigError(
                "the model gives other outputs for the same inputs when it is called again: it remembers what it has "
                "seen, which would carry one client's data into the next one's update, or it draws at random in "
                "evaluation or by other means than PyTorch's, which no run could repeat"
            )


@torch.no_grad()
def draws_at_random(module: nn.Module, x: Inputs) -> bool:
    """Whether a module's outputs in training mode are drawn at random, as those with dropout are.

    Args:
        module: repeatable, see `require_repeatable`; its mode stays as it was.
        x: inputs of a few public examples.
    """
    training, outputs = module.training, []
    try:
        for seed in range(3):
            with seeded(seed):
                outputs.append(inputs.call(module.train(), x).clone())
    finally:
        module.train(training)
    return not all(torch.equal(outputs[0], other) for other in outputs[1:])


def require_drawing_nothing(module: nn.Module, x: Inputs | None = None) -> None:
    """Refuse a module that draws at random in training: an example's gradient would depend on the batch it is in.

    Args:
        module: its mode stays as it was.
        x: inputs of a few public examples, by which functional dropout is seen; None looks for layers with dropout.

    Raises:
        ConfigError: it does.
    """
    for name, child in module.named_modules():
        rate = child.p if isinstance(child, _DropoutNd) else getattr(child, "dropout", 0.0)
        if isinstance(rate, float) and rate > 0:
            raise ConfigError(
                f"{name or type(child).__name__!r} drops units at random, which is not supported where single examples "
                "are protected: set its dropout to 0"
            )
    if x is not None and draws_at_random(module, x):
        raise ConfigError(
            "the model draws at random in training (functional dropout), which is not supported where single examples "
            "are protected: leave it out"
        )


@torch.no_grad()
def require_separate(module: nn.Module, x: Inputs) -> None:
    """Refuse a module whose outputs for an example depend on the other examples of its batch, in training mode.

    Args:
        module: its mode stays as it was.
        x: inputs of a few public examples.

    Raises:
        ConfigError: they do, or it fails on a single example.
    """
    training = module.training
    outputs = inputs.call(module.train(), x)
    try:
        with users_code("the model fails on a single example", module):
            alone = torch.cat([inputs.call(module, inputs.take(x, slice(i, i + 1))) for i in range(len(outputs))])
    finally:
        module.train(training)
    if not close(outputs, alone):
        raise ConfigError("the model's outputs for an example depend on the other examples of its batch")


class Unchanged:
    """The buffers of a module as they were.

    Args:
        module: the module.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._buffers = self._versions()

    def check(self) -> None:
        """Refuse a module that has written or replaced a buffer since.

        Raises:
            ConfigError: the message names the first such buffer.
        """
        if not self._buffers:
            return
        now = self._versions()
        for name, (buffer, version) in self._buffers.items():
            if name not in now or now[name][0] is not buffer or now[name][1] != version:
                raise _trained(name)

    def _versions(self) -> dict[str, tuple[Tensor, int]]:
        return {name: (buffer, buffer._version) for name, buffer in self._module.named_buffers()}


def _trained(name: str) -> ConfigError:
    return ConfigError(f"the model's buffer {name!r} would follow private data unbounded: {_ADVICE}")
