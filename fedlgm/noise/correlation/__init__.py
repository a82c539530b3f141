"""Noise correlated over rounds (matrix factorisation, DP-FTRL): strategies, sensitivities, errors
and the noise stream.

    c = correlation.get("banded", rounds=300, bands=10)    # least mean error of the models after
    each round multiplier = s / (clip * c.sensitivity(min_separation=10))
    w = CorrelatedStream(c, size).next(z)                   # noise of the next round, from
    independent z

The package needs only NumPy and SciPy, except for the stream, which works on torch vectors.
"""

from typing import TYPE_CHECKING, Any

from fedlgm.noise.correlation.correlation import Correlation
from fedlgm.noise.correlation.strategies import Strategy, get, names, options_of, register
from fedlgm.noise.correlation.toeplitz import Reduce
from fedlgm.noise.correlation.workloads import Workload, as_workload

if TYPE_CHECKING:
    from fedlgm.noise.correlation.stream import CorrelatedStream

__all__ = [
    "CorrelatedStream",
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
    if name == "CorrelatedStream":  # which loads torch
        from fedlgm.noise.correlation.stream import CorrelatedStream

        return CorrelatedStream
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
