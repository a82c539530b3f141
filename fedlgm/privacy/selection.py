"""Privacy cost of publishing the best of several runs (Papernot and Steinke, ICLR 2022, arXiv
2110.03620).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Literal

import numpy as np
from dp_accounting import dp_event

from fedlgm.checks import check_count, check_known, check_positive, check_rate, check_share
from fedlgm.errors import ConfigError
from fedlgm.privacy.accounting import composed_epsilon
from fedlgm.privacy.events import gaussian_event, repeat_event
from fedlgm.privacy.plain import plain_numbers

Law = Literal["logarithmic", "geometric", "poisson"]
"""Distribution of the number of runs: truncated negative binomial of shape 0 or 1, or Poisson."""

_SHAPES: dict[str, float] = {"logarithmic": 0.0, "geometric": 1.0, "poisson": math.inf}


@plain_numbers
def selection_event(
    run: dp_event.DpEvent, expected_runs: float, law: Law = "logarithmic"
) -> dp_event.DpEvent:
    """Event of a search that draws the number of runs from the distribution `law`, and publishes
    only the best run.

    Args:
        run: event of one whole run, the same for every candidate.
        expected_runs: mean of the number of runs, above 1 (Poisson: at least 1).
        law: distribution of the number of runs.

    Raises:
        ConfigError: the distribution is unknown, or cannot have this mean.

    Example:
        >>> selection_event(gaussian_event(2.0), 10).mean
        10.0
    """
    check_known("law", law, Law)
    check_positive(expected_runs=expected_runs)
    fits = expected_runs >= 1 if law == "poisson" else expected_runs > 1
    if not fits:
        least = "at least" if law == "poisson" else "above"
        raise ConfigError(
            f"expected_runs must be finite and {least} 1 for the {law} law, got {expected_runs}"
        )
    return dp_event.RepeatAndSelectDpEvent(run, float(expected_runs), _SHAPES[law])


def draw_runs(expected_runs: float, law: Law, generator: np.random.Generator) -> int:
    """Draw a search's secret number of runs.

    Args:
        expected_runs: mean of the number of runs; invalid values are refused as by
            `selection_event`.
        law: see `selection_event`; under "logarithmic", P(k) is proportional to (1 - gamma)^k / k
            for k >= 1 (Definition 1 at eta = 0).
        generator: a secret stream.

    Example:
        >>> draws = [draw_runs(10, "logarithmic", np.random.default_rng(seed)) for seed in range(2000)]
        >>> min(draws), 9 < sum(draws) / 2000 < 11
        (1, True)
    """
    selection_event(dp_event.NoOpDpEvent(), expected_runs, law)
    if law == "poisson":
        return int(generator.poisson(expected_runs))
    if law == "geometric":
        return int(generator.geometric(1 / expected_runs))
    return int(generator.logseries(1 - _gamma(expected_runs)))


@lru_cache(maxsize=16)
def _gamma(expected_runs: float) -> float:
    """The parameter gamma at which the logarithmic distribution has this mean, by bisection. The
    mean decreases as gamma increases.
    """
    low, high = -700.0, -1e-12  # bounds of log(gamma)
    for _ in range(200):
        middle = (low + high) / 2
        mean = math.expm1(-middle) / -middle
        low, high = (middle, high) if mean > expected_runs else (low, middle)
    return math.exp(high)


@plain_numbers
def selection_epsilon(
    noise_multiplier: float,
    sampling_rate: float,
    steps: int,
    delta: float,
    expected_runs: float,
    law: Law = "logarithmic",
) -> float:
    """Epsilon of a search over runs of a sampled Gaussian mechanism. Only the best run is
    published.

    The number of runs is drawn from the distribution `law`, and stays secret, as do all runs except
    the best. The settings of each run are drawn from a list that was fixed before the search, and
    the score uses only released values and public data. This epsilon holds against readers of the
    published model; against a party that sees every run, the cost is the composition of all runs.

    Args:
        noise_multiplier: noise std of a release divided by one unit's l2 bound, under
            add-or-remove-one.
        sampling_rate: Poisson rate of each release.
        steps: number of releases in one run.
        delta: target delta in (0, 1).
        expected_runs: mean number of runs, above 1 (Poisson: at least 1).
        law: "logarithmic" (the cheapest), "geometric" or "poisson".

    Returns:
        Epsilon of the search by Renyi accounting (Papernot and Steinke 2022, Theorems 2 and 6).

    Raises:
        ConfigError: an argument is outside its range.

    Example:
        >>> round(selection_epsilon(1.4817, 0.1, 100, 1e-5, expected_runs=10), 2)  # one such run costs 4
        6.33
    """
    check_positive(noise_multiplier=noise_multiplier)
    check_rate(sampling_rate=sampling_rate)
    check_count("steps", steps)
    check_share(delta=delta)
    run = repeat_event(gaussian_event(noise_multiplier, sampling_rate), int(steps))
    return composed_epsilon([(selection_event(run, expected_runs, law), 1)], delta, "rdp")
