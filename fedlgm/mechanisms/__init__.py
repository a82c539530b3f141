"""Every mechanism under one registry: `get(name, **options)`, `names()`.

To add one: write a frozen dataclass derived from `Mechanism` in a file of its own and register it below. If its plans
have another multiplier than the budget's, it overrides `costs`, too. The papers' names: docs/references.md.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from fedlgm import allocation
from fedlgm.errors import ConfigError
from fedlgm.mechanisms import group_noise
from fedlgm.mechanisms.adapldp import AdapLDP
from fedlgm.mechanisms.base import Mechanism
from fedlgm.mechanisms.dpa import DynamicPrivacyAllocation
from fedlgm.mechanisms.full_dp import FullDP
from fedlgm.mechanisms.inid import gaussian_inid, laplace_inid
from fedlgm.mechanisms.ladp import LaDP
from fedlgm.mechanisms.layerwise_gaussian import FlatGaussian, LayerwiseGaussian, NoPrivacy
from fedlgm.mechanisms.sensitive import SensitiveDP
from fedlgm.mechanisms.time_varying import TimeVaryingDP

_REGISTRY: dict[str, type[Mechanism]] = {
    **dict.fromkeys(allocation.names(), LayerwiseGaussian),
    **dict.fromkeys(group_noise.names(), group_noise.GroupNoise),
    "gaussian": FlatGaussian,
    "none": NoPrivacy,
    "ladp": LaDP,
    "full-dp": FullDP,
    "time-varying": TimeVaryingDP,
    "sensitive": SensitiveDP,
    "dpa": DynamicPrivacyAllocation,
    "adapldp": AdapLDP,
}


def names() -> tuple[str, ...]:
    """Registered mechanism names."""
    return tuple(_REGISTRY)


def options(name: str) -> tuple[str, ...]:
    """Option names that `get(name, ...)` takes."""
    return tuple(field.name for field in dataclasses.fields(_lookup(name)) if field.name != "name")


def get(name: str, **values: Any) -> Mechanism:
    """The mechanism `name` with the given options.

    Raises:
        ConfigError: unknown name or option (the message lists the known ones), or an option outside its range.
    """
    kind = _lookup(name)
    unknown = sorted(set(values) - set(options(name)))
    if unknown:
        raise ConfigError(f"{name} has no option {', '.join(unknown)}; known: {', '.join(options(name))}")
    for field in dataclasses.fields(kind):
        if field.name in values:
            _check_type(f"{name}: {field.name}", values[field.name], field.default)
    return kind(name=name, **values)


def _check_type(option: str, value: Any, default: Any) -> None:
    """Refuse a value whose type is not that of the option's default, or a list that does not hold numbers."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if isinstance(default, bool):
        fits, kind = isinstance(value, bool), "true or false"
    elif isinstance(default, int):
        fits, kind = number and value == int(value), "a whole number"
    elif isinstance(default, float):
        fits, kind = number, "a number"
    elif isinstance(default, str):
        fits, kind = isinstance(value, str), "a string"
    else:
        fits = isinstance(value, (list, tuple)) and all(isinstance(item, (int, float)) for item in value)
        kind = "a list of numbers"
    if not fits:
        raise ConfigError(f"{option} must be {kind}, got {value!r}")


def _lookup(name: str) -> type[Mechanism]:
    if name not in _REGISTRY:
        raise ConfigError(f"unknown mechanism {name!r}; known: {', '.join(_REGISTRY)}")
    return _REGISTRY[name]


__all__ = ["Mechanism", "gaussian_inid", "get", "laplace_inid", "names", "options"]
