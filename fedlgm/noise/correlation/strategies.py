"""Strategies of correlated noise by name. A name stands for a strategy of this library, a
registered strategy, or a user's strategy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fedlgm.checks import check_count, check_known
from fedlgm.errors import ConfigError
from fedlgm.extension.loader import parameters_of, users_code
from fedlgm.extension.registration import registers
from fedlgm.extension.registry import Registry
from fedlgm.noise.correlation import blt, sensitivities, toeplitz
from fedlgm.noise.correlation.correlation import MOST_BUFFERS, MOST_ROUNDS, Correlation, check_size
from fedlgm.noise.correlation.toeplitz import Reduce
from fedlgm.noise.correlation.workloads import Workload, as_workload

Strategy = Callable[..., Correlation]
"""A function (rounds, **options) that returns a `Correlation` for this number of rounds."""


def names() -> tuple[str, ...]:
    """Names of the known strategies.

    Example:
        >>> names()[:4]
        ('identity', 'square-root', 'banded', 'blt')
    """
    return _STRATEGIES.names()


@registers
def register(name: str, make: Strategy) -> None:
    """Register a strategy under a name, for `get` and for a recipe's `privacy.noise`.

    The library computes sensitivity and error from the coefficients, and does not rely on how the
    strategy derives them.

    Args:
        name: a new name.
        make: function of rounds and options that returns a `Correlation`. A run passes those of the
            options `workload`, `bands`, `buffers` and `min_separation` that the function takes.

    Raises:
        ConfigError: the name is taken.

    Example:
        >>> def two(rounds, *, share=0.5):
        ...     column = np.array([1.0, share])
        ...     return Correlation("two", rounds, column / np.linalg.norm(column))
        >>> register("two-rounds", two)
        >>> get("two-rounds", 8, share=0.75).coefficients
        array([0.8, 0.6])
    """
    _STRATEGIES.add(name, make)


def options_of(name: str) -> tuple[str, ...]:
    """Option names of a strategy.

    Raises:
        ConfigError: the strategy is unknown.

    Example:
        >>> options_of("square-root")
        ('bands', 'workload')
    """
    return tuple(parameters_of(_find(name)))[1:]


def get(name: str, rounds: int, **options: Any) -> Correlation:
    """Correlated noise for a run of `rounds` rounds.

    Args:
        name: "identity" (independent noise); "square-root" (closed form, smallest maximum error if
            every client takes part once); "banded" (optimal banded Toeplitz, the usual choice: take
            as many bands as there are rounds between a client's participations, or as there are
            groups); "blt" (a few buffers instead of `bands` - 1 vectors as state; no
            amplification); a registered name; or a strategy of your own as "package.module:name"
            (see `register`).
        rounds: planned number T >= 1 of releases.
        options: bands (1 to T; default T) of "square-root" and "banded"; workload ("prefix" or a
            `Workload`) and reduce ("mean" or "max" over the outputs), which define the optimised
            error; buffers (1 to 8; default 2), min_separation and max_participations (default:
            every client takes part once), for which "blt" is optimised.

    Returns:
        The correlation. The coefficients of this library's strategies have norm 1, except that
            those of "blt" begin with 1.

    Raises:
        ConfigError: a name or option is unknown, a value is outside its range, or a strategy of
            your own does not return a correlation for `rounds` rounds.

    Example:
        >>> get("banded", 16, bands=4).coefficients.round(6)
        array([0.794875, 0.438433, 0.329274, 0.259862])
        >>> round(get("identity", 300).error(), 5)
        12.26784

    Source: McKenna 2024 (arXiv 2405.15913) for "banded"; Fichtenberger et al. 2022 (arXiv
    2202.11205) and Kalinin and Lampert 2024 (arXiv 2405.13763) for "square-root"; Dvijotham et al.
    2024 (arXiv 2404.16706) for "blt".
    """
    make = _find(name)
    unknown = sorted(set(options) - set(options_of(name)))
    if unknown:
        choices = ", ".join(options_of(name)) or "none"
        raise ConfigError(
            f"correlation {name!r} has no option {', '.join(unknown)}; its options: {choices}"
        )
    rounds = check_count("rounds", rounds, most=MOST_ROUNDS)
    if "workload" in options_of(name):
        options["workload"] = as_workload(options.get("workload", "prefix"))
    check_known("reduce", options.get("reduce", "mean"), Reduce)
    with users_code(f"correlation {name!r}", make):
        correlation = make(rounds, **options)
    if not isinstance(correlation, Correlation) or correlation.rounds != rounds:
        raise ConfigError(
            f"correlation {name!r} must return a Correlation for {rounds} rounds, got "
            f"{correlation!r}"
        )
    return correlation


def _find(name: str) -> Strategy:
    make: Strategy = _STRATEGIES.find_function(name, "(rounds, **options) -> Correlation", 1)
    return make


def _identity(rounds: int) -> Correlation:
    return Correlation("identity", rounds, np.ones(1))


def _square_root(
    rounds: int,
    bands: int | None = None,
    workload: Workload = Workload(),  # noqa: B008
) -> Correlation:
    return Correlation("square-root", rounds, toeplitz.square_root(workload, _bands(bands, rounds)))


def _banded(
    rounds: int,
    bands: int | None = None,
    workload: Workload = Workload(),  # noqa: B008
    reduce: Reduce = "mean",
) -> Correlation:
    return Correlation(
        "banded", rounds, toeplitz.optimal(workload, rounds, _bands(bands, rounds), reduce)
    )


def _blt(
    rounds: int,
    buffers: int = 2,
    workload: Workload = Workload(),  # noqa: B008
    reduce: Reduce = "mean",
    min_separation: int | None = None,
    max_participations: int | None = None,
) -> Correlation:
    check_size(rounds, rounds)
    limit = 1 if max_participations is None and min_separation is None else max_participations
    separation = 1 if min_separation is None else check_count("min_separation", min_separation)
    most = sensitivities.participations(
        rounds, separation, None if limit is None else check_count("max_participations", limit)
    )
    decays, scales = blt.optimal(
        workload,
        rounds,
        check_count("buffers", buffers, most=MOST_BUFFERS),
        separation,
        most,
        reduce,
    )
    return Correlation.from_buffers(rounds, tuple(decays.tolist()), tuple(scales.tolist()))


def _bands(bands: int | None, rounds: int) -> int:
    count = rounds if bands is None else check_count("bands", bands, most=rounds)
    check_size(count, rounds)
    return count


_STRATEGIES: Registry[Strategy] = Registry(
    "correlation",
    {"identity": _identity, "square-root": _square_root, "banded": _banded, "blt": _blt},
)
