"""Distributions of the integer noise that nodes add in shares. Each distribution is one class."""

from __future__ import annotations

from fedlgm.checks import check_known
from fedlgm.noise.integer_noise.gaussian import DiscreteGaussian
from fedlgm.noise.integer_noise.law import IntegerNoise
from fedlgm.noise.integer_noise.skellam import Skellam

LAWS: dict[str, IntegerNoise] = {law.name: law for law in (DiscreteGaussian(), Skellam())}

__all__ = ["LAWS", "DiscreteGaussian", "IntegerNoise", "Skellam", "get"]


def get(name: str) -> IntegerNoise:
    """The distribution with this name.

    Raises:
        ConfigError: the name is unknown.

    Example:
        >>> get("skellam").least_deviation
        32
    """
    check_known("noise", name, LAWS)
    return LAWS[name]
