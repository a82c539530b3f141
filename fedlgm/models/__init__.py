"""The papers' models, by name.

None has BatchNorm or another buffer, in-place activations or data-dependent control flow: all state can be bounded and
noised alike, and `torch.func.vmap` over stacked parameters gives the same results as a loop over clients.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fedlgm.errors import ConfigError
from fedlgm.keys import KeyRing, Purpose
from fedlgm.models.convolutional import cifar_cnn, cnn, cnn_small
from fedlgm.models.dense import logistic, mlp
from fedlgm.models.residual import resnet18, resnet20, resnet152

__all__ = ["build", "names", "options"]

_MODELS: dict[str, Callable[..., nn.Module]] = {
    "logistic": logistic,
    "mlp": mlp,
    "cnn": cnn,
    "cnn-small": cnn_small,
    "cifar-cnn": cifar_cnn,
    "resnet18": resnet18,
    "resnet20": resnet20,
    "resnet152": resnet152,
}


def names() -> tuple[str, ...]:
    """Names that `build` knows."""
    return tuple(_MODELS)


def options(name: str) -> tuple[str, ...]:
    """Option names of a model.

    Raises:
        ConfigError: for an unknown name.
    """
    if name not in _MODELS:
        raise ConfigError(f"unknown model {name!r}; known: {', '.join(_MODELS)}")
    parameters = inspect.signature(_MODELS[name]).parameters.values()
    return tuple(p.name for p in parameters if p.kind is p.KEYWORD_ONLY)


def build(name: str, *, in_shape: tuple[int, int, int], classes: int, seed: int = 0, **values: Any) -> nn.Module:
    """Build a model whose initial weights depend on `seed` only.

    Global random generators are neither read nor changed. Weights are drawn on the CPU whatever the default device, and
    then moved there; under `with torch.device("meta")` nothing is drawn at all.

    Args:
        name: one of `names()`; their functions describe the layers, the options and the sources.
        in_shape: shape (C, H, W) of one input.
        classes: number of outputs.
        seed: public seed, 0 <= seed < 2**128.
        **values: options of the model.

    Returns:
        The model: inputs float32 [batch, C, H, W] to logits [batch, classes].

    Raises:
        ConfigError: for an unknown name or option, a value out of range, or inputs too small for the layers.
    """
    known = options(name)
    if len(in_shape) != 3 or min(in_shape) < 1 or classes < 1:
        raise ConfigError(f"a model needs in_shape (C, H, W) and classes of at least 1, got {in_shape} and {classes}")
    unknown = [option for option in values if option not in known]
    if unknown:
        raise ConfigError(f"model {name!r}: unknown option {unknown[0]!r}; its options: {', '.join(known) or 'none'}")
    device = torch.get_default_device()
    with torch.random.fork_rng(devices=[]), torch.device("meta" if device.type == "meta" else "cpu"):
        torch.set_rng_state(KeyRing.from_seed(seed).torch_generator(Purpose.MODEL).get_state())
        model = _MODELS[name](tuple(in_shape), classes, **values)
    return model.to(device)
