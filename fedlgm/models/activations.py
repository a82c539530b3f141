"""Activations by name; none works in place."""

from __future__ import annotations

from torch import nn

from fedlgm.errors import ConfigError

_ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "relu": nn.ReLU}


def activation(name: str) -> nn.Module:
    """A new activation module: "tanh", "sigmoid" or "relu"."""
    if name not in tuple(_ACTIVATIONS):  # also what has no hash
        raise ConfigError(f"unknown activation {name!r}; known: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]()
