"""Activation modules by name. No activation changes its input in place."""

from __future__ import annotations

from torch import nn

from fedlgm.checks import check_known

_ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "sigmoid": nn.Sigmoid, "relu": nn.ReLU}


def activation(name: str) -> nn.Module:
    """Create an activation module by its name: "tanh", "sigmoid" or "relu"."""
    check_known("activation", name, _ACTIVATIONS)
    return _ACTIVATIONS[name]()
