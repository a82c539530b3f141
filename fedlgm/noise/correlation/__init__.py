"""Noise correlated over rounds (matrix factorisation, DP-FTRL): strategies, sensitivities, errors
and the noise stream.

    c = correlation.get("banded", rounds=300, bands=10)  # least mean error of the rounds' models
    multiplier = s / (clip * c.sensitivity(min_separation=10))
    w = CorrelatedStream(c, size).next(z)  # noise of the next round, from independent z

The names in `__all__` need only NumPy and SciPy. `CorrelatedStream` works on torch vectors, so it
is loaded when it is first used.
"""

from typing import Any

from fedlgm.noise.correlation.correlation import Correlation
from fedlgm.noise.correlation.strategies import Strategy, get, names, options_of, register
from fedlgm.noise.correlation.toeplitz import Reduce
from fedlgm.noise.correlation.workloads import Workload, as_workload

__all__ = [
    "Correlation",
    "Reduce",
    "Strategy",
    "Workload",
    "as_workload",
    "get",
    "names",
    "options_of",
    "register",
]


def __getattr__(name: str) -> Any:
    if name == "CorrelatedStream":  # this name loads torch
        from fedlgm.noise.correlation.stream import CorrelatedStream

        return CorrelatedStream
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
