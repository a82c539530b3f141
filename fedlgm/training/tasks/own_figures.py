"""Figures that a user's function computes for a released model."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from numbers import Real

import torch
from torch import nn

from fedlgm.errors import ConfigError
from fedlgm.extension.loader import users_code
from fedlgm.training.devices import drawing

Evaluate = Callable[[int, nn.Module], Mapping[str, float]]
"""A function (round, released model in evaluation mode) -> figures by name. In round 0 the model is
the initial model.
"""
RESERVED = {
    "epsilon",
    "claimed_epsilon",
    "audited_epsilon",
    "attack_tpr",
    "guarantee",
    "noise_reproducible",
    "noise_norm",
    "noise_scale",
    "released",
    "status",
    "reason",
    "method",
    "mechanism",
    "seed",
    "round",
    "seconds",
    "folder",
}
"""Names that tables of runs and rounds use for columns other than metrics."""


def own_figures(
    evaluate: Evaluate, round: int, module: nn.Module, taken: Collection[str] = ()
) -> dict[str, float]:
    """Call a user's function for the model after a round, and return the figures that it computes.

    The function gets only the released model. If the function uses only public data besides the
    model, the figures cost no privacy. If it uses sensitive data, no privacy budget covers them.

    Args:
        evaluate: the function.
        round: the round; 0 for the initial model.
        module: the model, left in evaluation mode.
        taken: names that other figures already use.

    Raises:
        ConfigError: the function fails, returns something other than a mapping of names to finite
            numbers, or uses a name that is taken or reserved.

    Example:
        >>> module = nn.Linear(1, 1, bias=False)
        >>> own_figures(lambda round, module: {"norm": float(module.weight.norm())}, 1, module).keys()
        dict_keys(['norm'])
    """
    with users_code("evaluate", evaluate), torch.no_grad(), drawing():
        figures = evaluate(round, module.eval())
    if not isinstance(figures, Mapping):
        raise ConfigError(f"evaluate must return {{name: number}}, got {figures!r}")
    for name, value in figures.items():
        if not isinstance(name, str) or not isinstance(value, Real) or not math.isfinite(value):
            raise ConfigError(
                f"evaluate must return finite numbers by name, got {name!r}: {value!r} in round "
                f"{round}"
            )
        if name in taken or name in RESERVED:
            raise ConfigError(
                f"evaluate returns {name!r}, which the task or the run also reports: choose another name"
            )
    return {name: float(value) for name, value in figures.items()}
