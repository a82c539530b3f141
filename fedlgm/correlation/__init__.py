"""Noise correlated over rounds (matrix factorisation, DP-FTRL): strategies, sensitivities, errors and the noise stream.

    c = correlation.get("banded", rounds=300, bands=10)    # least mean error of the models after each round
    multiplier = s / (clip * c.sensitivity(min_separation=10))
    w = CorrelatedStream(c, size).next(z)                   # noise of the next round, from independent z

NumPy and SciPy only, except for the stream, which works on torch vectors.
"""

from __future__ import annotations

from typing import Any, get_args

import numpy as np

from fedlgm.correlation import blt, sensitivities, toeplitz
from fedlgm.correlation.correlation import Correlation
from fedlgm.correlation.layers import optimal_split
from fedlgm.correlation.stream import CorrelatedStream
from fedlgm.correlation.toeplitz import Reduce
from fedlgm.correlation.workloads import Workload, as_workload
from fedlgm.errors import ConfigError

__all__ = ["CorrelatedStream", "Correlation", "Reduce", "Workload", "get", "names", "optimal_split"]

_OPTIONS: dict[str, tuple[str, ...]] = {
    "identity": (),
    "square-root": ("bands", "workload"),
    "banded": ("bands", "workload", "reduce"),
    "blt": ("buffers", "workload", "reduce", "min_separation", "max_participations"),
}


def names() -> tuple[str, ...]:
    """Known strategies.

    Example:
        >>> names()
        ('identity', 'square-root', 'banded', 'blt')
    """
    return tuple(_OPTIONS)


def get(name: str, rounds: int, **options: Any) -> Correlation:
    """Correlated noise for a run of `rounds` rounds.

    Args:
        name: "identity" (independent noise); "square-root" (closed form, least largest error where every client comes
            once); "banded" (optimal banded Toeplitz, the one to use: choose as many bands as rounds between a client's
            participations, or as groups); "blt" (a few buffers instead of `bands` - 1 vectors as state; no
            amplification).
        rounds: T >= 1, planned number of releases.
        options: bands (1 to T; default T) of "square-root" and "banded"; workload ("prefix" or a `Workload`) and
            reduce ("mean" or "max" over the outputs) of what is optimised; buffers (1 to 8; default 2), min_separation
            and max_participations (default: every client once) for which "blt" is optimised.

    Returns:
        The correlation; coefficients have norm 1, except those of "blt", which begin with 1.

    Raises:
        ConfigError: an unknown name or option, or a value outside its range.

    Example:
        >>> get("banded", 16, bands=4).coefficients.round(6)
        array([0.794875, 0.438433, 0.329274, 0.259862])
        >>> round(get("identity", 300).error(), 5)
        12.26784

    Source: McKenna 2024 (arXiv 2405.15913) for "banded"; Fichtenberger et al. 2022 (arXiv 2202.11205) and Kalinin and
    Lampert 2024 (arXiv 2405.13763) for "square-root"; Dvijotham et al. 2024 (arXiv 2404.16706) for "blt".
    """
    if name not in _OPTIONS:
        raise ConfigError(f"unknown correlation {name!r}; known: {', '.join(_OPTIONS)}")
    unknown = sorted(set(options) - set(_OPTIONS[name]))
    if unknown:
        known = ", ".join(_OPTIONS[name]) or "none"
        raise ConfigError(f"correlation {name!r} has no option {', '.join(unknown)}; its options: {known}")
    rounds = _whole("rounds", rounds, 1_000_000)
    workload = as_workload(options.get("workload", "prefix"))
    workload.check(rounds)
    reduce = options.get("reduce", "mean")
    if reduce not in get_args(Reduce):
        raise ConfigError(f"unknown reduce {reduce!r}; known: {', '.join(get_args(Reduce))}")
    if name == "identity":
        return Correlation(name, rounds, np.ones(1))
    if name == "blt":
        separation = options.get("min_separation")
        limit = options.get("max_participations", 1 if separation is None else None)
        separation = 1 if separation is None else _whole("min_separation", separation)
        most = sensitivities.participations(
            rounds, separation, None if limit is None else _whole("max_participations", limit)
        )
        buffers = _whole("buffers", options.get("buffers", 2), 8)
        decays, scales = blt.optimal(workload, rounds, buffers, separation, most, reduce)
        return Correlation.from_buffers(rounds, tuple(decays.tolist()), tuple(scales.tolist()))
    bands = options.get("bands")
    bands = rounds if bands is None else _whole("bands", bands, rounds)
    if name == "square-root":
        return Correlation(name, rounds, toeplitz.square_root(workload, bands))
    return Correlation(name, rounds, toeplitz.optimal(workload, rounds, bands, reduce))


def _whole(option: str, value: Any, largest: int | None = None) -> int:
    fits = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not fits or value < 1 or (largest is not None and value > largest):
        limits = "at least 1" if largest is None else f"1 to {largest}"
        raise ConfigError(f"{option} must be a whole number, {limits}, got {value!r}")
    return int(value)
