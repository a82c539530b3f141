"""Models of fully connected layers."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

from torch import nn

from fedlgm.errors import ConfigError
from fedlgm.training.models.activations import activation as activation_named


def logistic(in_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Multinomial logistic regression: one linear layer on the flattened input."""
    return nn.Sequential(
        OrderedDict(flatten=nn.Flatten(), fc=nn.Linear(math.prod(in_shape), classes))
    )


def mlp(
    in_shape: tuple[int, int, int],
    classes: int,
    *,
    hidden: Sequence[int] = (32,),
    activation: str = "tanh",
) -> nn.Module:
    """Multi-layer perceptron; by default, its layers for 8x8 digits have the widths 64-32-10 (2,410
    parameters).

    Args:
        in_shape: shape (C, H, W) of one input.
        classes: number of outputs.
        hidden: widths of the hidden layers, in order from the input.
        activation: "tanh", "sigmoid" or "relu", after each hidden layer.

    Returns:
        The model.

    Raises:
        ConfigError: a width is below 1, or the activation is unknown.
    """
    if not isinstance(hidden, Sequence) or any(
        not isinstance(width, int) or width < 1 for width in hidden
    ):
        raise ConfigError(
            f"hidden must be a list of integers >= 1 (one per hidden layer), got {hidden!r}"
        )
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    width = math.prod(in_shape)
    for i, units in enumerate(hidden, start=1):
        layers[f"fc{i}"] = nn.Linear(width, units)
        layers[f"act{i}"] = activation_named(activation)
        width = units
    layers[f"fc{len(hidden) + 1}"] = nn.Linear(width, classes)
    return nn.Sequential(layers)
