"""Metrics of a whole test set, such as AUC, which are not means over its examples."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from fedlgm.errors import ConfigError
from fedlgm.extension.loader import users_code
from fedlgm.training.devices import drawing

Metric = Callable[[Tensor, Tensor], Any]
"""A function (outputs [n, ...], targets [n, ...]) -> one number. It gets the tensors of the whole
set, on the CPU.
"""


def check_metrics(metrics: Any) -> dict[str, Metric]:
    """Check that `metrics` maps names to functions, and return it as a dictionary.

    Raises:
        ConfigError: the metrics are not a mapping of names to functions.

    Example:
        >>> check_metrics({"auc": 0.5})
        Traceback (most recent call last):
            ...
        fedlgm.errors.ConfigError: metrics['auc'] must be a function (outputs, targets) -> number, got 0.5
    """
    if not isinstance(metrics, Mapping):
        raise ConfigError(
            f"metrics must be a mapping {{name: function(outputs, targets)}}, got {metrics!r}"
        )
    for name, function in metrics.items():
        if not isinstance(name, str) or not name:
            raise ConfigError(f"the name of a metric must be a string, got {name!r}")
        if not callable(function):
            raise ConfigError(
                f"metrics[{name!r}] must be a function (outputs, targets) -> number, got "
                f"{function!r}"
            )
    return dict(metrics)


def over_the_set(
    metrics: Mapping[str, Metric], parts: Iterable[tuple[Tensor, Tensor]], *, finite: bool = False
) -> dict[str, float]:
    """Compute each metric from the outputs and targets of a whole set.

    Args:
        metrics: functions by name of the metric.
        parts: outputs and targets of each batch of the set.
        finite: whether to refuse metrics that are NaN or infinite.

    Raises:
        ConfigError: a function fails or does not return one number, or, if `finite` is set, returns
            NaN or infinity.

    Example:
        >>> over_the_set({"largest": lambda outputs, targets: outputs.max()}, [(torch.ones(2, 1), torch.zeros(2))])
        {'largest': 1.0}
    """
    outputs, targets = (
        torch.cat([part.detach().cpu() for part in side]) for side in zip(*parts, strict=True)
    )
    figures = {}
    for name, function in metrics.items():
        label = f"metric {name!r}"
        with users_code(label, function), drawing():
            value = function(outputs, targets)
            if getattr(value, "shape", ()) not in ((), (1,)):
                raise ConfigError(
                    f"{label} must return one number for the whole test set, but it returns "
                    f"{tuple(value.shape)}"
                )
            figures[name] = float(value)
        if finite and not math.isfinite(figures[name]):
            raise ConfigError(
                f"{label} is {figures[name]} on the test set of {len(targets)} examples with the "
                "initial model: it could not be reported"
            )
    return figures
