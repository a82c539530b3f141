"""Learning-rate schedules: public factors, one per round or per local step."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real

import numpy as np

from fedlgm.errors import ConfigError
from fedlgm.extension.loader import users_code
from fedlgm.extension.registry import Registry

Schedule = Callable[[int, int], float]
"""(number from 1, count) of rounds or local steps -> factor of the learning rate."""

_SCHEDULES: Registry[Schedule] = Registry(
    "schedule",
    {
        "linear": lambda number, count: 1 - (number - 1) / count,
        "cosine": lambda number, count: (1 + math.cos(math.pi * (number - 1) / count)) / 2,
    },
)


def factors(schedule: str, count: int, unit: str = "round") -> np.ndarray:
    """Factor of the learning rate in every round (or local step), [count].

    Args:
        schedule: "linear" (from 1 towards 0), "cosine" (half a period), or your own function
            (round, rounds) -> factor as "package.module:name".
        count: number of rounds of the run, or of steps of a client's round.
        unit: "round" or "step", for messages.

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
