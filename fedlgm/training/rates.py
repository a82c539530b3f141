"""Learning-rate schedules, which give a public factor for each round or each local step."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real

import numpy as np

from fedlgm.errors import ConfigError
from fedlgm.extension.loader import users_code
from fedlgm.extension.registry import Registry

Schedule = Callable[[int, int], float]
"""A function (number, count) -> factor of the learning rate. It gets the number of the round or
local step, which begins at 1, and the number of all rounds or steps.
"""

_SCHEDULES: Registry[Schedule] = Registry(
    "schedule",
    {
        "linear": lambda number, count: 1 - (number - 1) / count,
        "cosine": lambda number, count: (1 + math.cos(math.pi * (number - 1) / count)) / 2,
    },
)


def factors(schedule: str, count: int, unit: str = "round") -> np.ndarray:
    """Compute the factor of the learning rate in every round or local step, [count].

    Args:
        schedule: "linear" (from 1 towards 0), "cosine" (half a period from 1 towards 0), or
            "package.module:name" of your own function (round, rounds) -> factor.
        count: number of rounds in the run, or of a client's steps in a round.
        unit: "round" or "step", for error messages.

    Raises:
        ConfigError: the schedule is unknown, or the function fails or returns a negative, infinite
            or NaN factor.

    Example:
        >>> factors("linear", 4).tolist()
        [1.0, 0.75, 0.5, 0.25]
    """
    factor = _SCHEDULES.find_function(schedule, f"({unit}, {unit}s) -> factor", 1, count)
    values = []
    for number in range(1, count + 1):
        with users_code(f"schedule {schedule!r}", factor):
            value = factor(number, count)
        if not isinstance(value, Real) or not 0 <= float(value) < math.inf:
            raise ConfigError(
                f"schedule {schedule!r} returns {value!r} for {unit} {number}: a factor is at "
                "least 0"
            )
        values.append(float(value))
    return np.array(values)
