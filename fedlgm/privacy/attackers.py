"""Bounds on how often an attacker can be right about one unit.

An attacker sees all that was released, knows all other data, and decides whether one unit took
part. Its false-positive rate is the share of absent units that it calls present; its true-positive
rate is the share of present units that it finds. The privacy profile delta(epsilon) of a run bounds
the true-positive rate in terms of the false-positive rate at every epsilon (Wasserman and Zhou
2010, Kairouz et al. 2015; Dong, Roth and Su 2022, proposition 2.12).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from dp_accounting import dp_event
from scipy.special import log_ndtr

from fedlgm.checks import (
    check_at_least_zero,
    check_count,
    check_fraction,
    check_positive,
    check_share,
)
from fedlgm.privacy.accountants import SEARCHES, deltas_of
from fedlgm.privacy.accounting import LOST, Merged, compose, merge_events, with_gaussian
from fedlgm.privacy.events import accountant_of, decode, is_private
from fedlgm.privacy.guarantee import SENSITIVITY_FACTOR, AttackFigures, Relation
from fedlgm.privacy.ledger import Ledger
from fedlgm.privacy.participation import SecretDraw, draws_of, release_event
from fedlgm.privacy.plain import plain_numbers

_EPSILONS = np.linspace(0.0, 16.0, 801)
_LEAST_DELTA = 1e-10
"""Least delta at which `AttackRates.mu` covers the profile. No experiment can measure an attack at
such small false-positive rates.
"""
_MOST_MU = 1e3
_ADVANTAGE = np.union1d(np.linspace(0, 1, 4001), np.logspace(-6, -3, 500))
"""False-positive rates between which the advantage against several units is bounded."""


@dataclass(frozen=True, eq=False)
class AttackRates:
    """Upper bounds on the success of every attack on one unit, or on a group of units.

    Attributes:
        epsilons: points of the privacy profile, [n], at least 0.
        deltas: upper bounds on delta at these points, [n].
        units: number of units that are present or absent together, such as a person's examples.

    Example:
        >>> rates = attack_rates(1.0)  # one release whose noise std is one bound
        >>> round(rates.tpr(0.01), 4), round(rates.advantage, 3), round(rates.mu, 3)
        (0.0924, 0.383, 1.0)
        >>> round(rates.of_units(2).tpr(0.01), 3)  # as for one release with half of the noise
        0.372
    """

    epsilons: np.ndarray
    deltas: np.ndarray
    units: int = 1

    @classmethod
    def of_budget(cls, epsilon: float, delta: float) -> AttackRates:
        """Bounds that follow from a single pair of epsilon and delta. They are weaker than the
        bounds from a run's complete profile.

        Raises:
            ConfigError: epsilon or delta is out of range.

        Example:
            >>> round(AttackRates.of_budget(1.0, 1e-5).tpr(0.1), 3)
            0.272
        """
        check_share(delta=delta)
        check_at_least_zero(epsilon=epsilon)
        return cls(np.array([float(epsilon)]), np.array([float(delta)]))

    def of_units(self, units: int) -> AttackRates:
        """The bounds for a group of `units` units of this run.

        Each unit of the group makes one step from the data with the group to the data without it,
        and the bound on the true-positive rate is applied once for each step (Dong, Roth and Su
        2022, theorem 2.14).

        Raises:
            ConfigError: the number is not a whole number of at least 1.
        """
        group = replace(self, units=check_count("units", units))
        vars(group).update(_lines=self._lines, _mu_of_one=self._mu_of_one)  # slow to compute again
        return group

    def tpr(self, false_positive_rate: float) -> float:
        """Largest true-positive rate of an attack with this false-positive rate. Both rates are in
        [0, 1].

        Raises:
            ConfigError: the rate is out of range.
        """
        check_fraction(false_positive_rate=false_positive_rate)
        return float(self._tpr(np.array([float(false_positive_rate)]))[0])

    @property
    def advantage(self) -> float:
        """Largest difference between the true-positive rate and the false-positive rate, in [0,
        1].
        """
        if self.units == 1 and self.epsilons[0] == 0:
            return float(self.deltas[0])
        # The true-positive rate grows with the false-positive rate. Between two grid points, the
        # difference is therefore at most the true-positive rate at the upper point minus the lower
        # point.
        return float(np.clip(self._tpr(_ADVANTAGE)[1:] - _ADVANTAGE[:-1], 0, 1).max())

    @property
    def mu(self) -> float:
        """Smallest mu of a Gaussian release whose profile is nowhere below this profile.

        The profiles are compared up to epsilon = 16 and where delta is at least 1e-10. The result
        is infinite if delta rounds to 1 at some epsilon (for Gaussian noise from a mu of about 14),
        or if no mu below 1000 is enough. It is also infinite for a single pair of epsilon and
        delta, which bounds delta by the same number at all larger epsilons. The mu of a group of k
        units is k times as large. A Gaussian release of sensitivity 1 and standard deviation 1 / mu
        has exactly the profile of mu. The profiles of Laplace noise and of other pure guarantees
        are far below the profile of their mu.
        """
        return self.units * self._mu_of_one

    @cached_property
    def _mu_of_one(self) -> float:
        if len(self.epsilons) == 1:  # delta is the same at every larger epsilon
            return math.inf
        compared = (self.deltas >= _LEAST_DELTA) & (self.deltas > 0)
        epsilons, deltas = self.epsilons[compared], self.deltas[compared]
        if not len(deltas):
            return 0.0
        if deltas.max() == 1:  # where delta rounds to 1, no mu can be determined
            return math.inf
        low, high = np.zeros_like(deltas), np.full_like(deltas, _MOST_MU)
        if (_gaussian_deltas(high, epsilons) < deltas).any():
            return math.inf
        for _ in range(60):
            middle = (low + high) / 2
            covers = _gaussian_deltas(middle, epsilons) >= deltas
            low, high = np.where(covers, low, middle), np.where(covers, middle, high)
        return float(high.max())

    def figures(self) -> AttackFigures:
        """The bounds at the rates that reports show.

        Example:
            >>> round(attack_rates(1.0).figures()["tpr"]["0.01"], 4)
            0.0924
        """
        mu = self.mu
        return {
            "tpr": {f"{share:g}": self.tpr(share) for share in (0.1, 0.01, 0.001)},
            "advantage": self.advantage,
            "mu": None if math.isinf(mu) else mu,
        }

    def sentence(self, who: str = "participants", false_positive_rate: float = 0.01) -> str:
        """The bound on the true-positive rate in words.

        Args:
            who: the units in the plural, such as "clients" or "examples".
            false_positive_rate: the attacker's rate of false alarms.

        Example:
            >>> attack_rates(0.9359, sampling_rate=0.1, steps=100).sentence("clients")
            'an attacker who accepts 1 % false alarms finds at most 18 % of the clients'
        """
        return (
            f"an attacker who accepts {100 * false_positive_rate:g} % false alarms finds at most "
            f"{percent(self.tpr(false_positive_rate))} of the {who}"
        )

    def _tpr(self, rates: np.ndarray) -> np.ndarray:
        """Bounds on the true-positive rate at several false-positive rates, [m]."""
        starts, intercepts, slopes = self._lines
        for _ in range(self.units):
            lowest = np.maximum(np.searchsorted(starts, rates, side="right") - 1, 0)
            rates = np.clip(intercepts[lowest] + slopes[lowest] * rates, 0.0, 1.0)
        return rates

    @cached_property
    def _lines(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return _lowest_lines(self.epsilons, self.deltas)


def percent(share: float) -> str:
    """A share as a percentage with two significant digits, rounded up.

    Example:
        >>> percent(0.17401), percent(0.0005034), percent(1.0)
        ('18 %', '0.051 %', '100 %')
    """
    percentage = 100 * share
    digits = 1 - math.floor(math.log10(percentage)) if percentage > 0 else 0
    return f"{math.ceil(percentage * 10**digits - 1e-9) / 10**digits:g} %"


@plain_numbers
def attack_rates(
    source: float | dp_event.DpEvent | Ledger,
    *,
    sampling_rate: float = 1.0,
    steps: int = 1,
    relation: Relation = "add-remove",
    sampling: SecretDraw = "poisson",
    participations: int | None = None,
) -> AttackRates:
    """Bounds on every attack on one unit, from the whole privacy profile of a run.

    The bounds are tighter than what epsilon and delta alone allow: at epsilon 8 and delta 1e-5, a
    run of 100 sampled Gaussian releases allows a true-positive rate of 17.5 % at 1 % false alarms,
    where epsilon and delta alone allow 99.97 %.

    Args:
        source: noise multiplier of `steps` Gaussian releases, a `DpEvent`, or an open `Ledger`. The
            charges of a ledger are composed; under local trust, the bounds hold for every
            participant.
        sampling_rate: probability q in (0, 1] that a unit takes part in a release, for a noise
            multiplier.
        steps: number of releases T >= 0; for an event the number of its repetitions.
        relation: neighbouring relation, for a noise multiplier; bounds from events or a ledger hold
            under the relation of these events.
        sampling: "poisson", or "allocation" as in `epsilon`, for a noise multiplier.
        participations: number of releases in which a unit takes part under "allocation".

    Returns:
        The bounds. Discretisation and rounding make them larger, never smaller.

    Raises:
        ConfigError: an argument is out of range.
        PrivacyError: no accountant can account for an event.

    Example:
        >>> rates = attack_rates(1.0, sampling_rate=0.01, steps=1000)
        >>> [round(rates.tpr(share), 3) for share in (0.1, 0.01)]
        [0.194, 0.029]
    """
    check_count("steps", steps, least=0)
    if isinstance(source, Ledger):
        profiles = source.profiles()
    elif isinstance(source, dp_event.DpEvent):
        profiles = [list(_flatten(source, steps))]
    else:
        check_positive(noise_multiplier=source)
        draws, count = draws_of(sampling, sampling_rate, steps, participations, relation)
        profiles = [[(release_event(source / SENSITIVITY_FACTOR[relation], draws), count)]]
    return _rates(tuple(map(merge_events, profiles)))


@lru_cache(maxsize=64)
def _rates(profiles: tuple[tuple[float, Merged], ...]) -> AttackRates:
    """Bounds from the largest of several profiles. The returned object caches what it computes."""
    found = [_deltas(*merged) for merged in profiles]
    deltas = np.max([np.zeros_like(_EPSILONS), *found], axis=0)
    deltas.flags.writeable = False
    return AttackRates(_EPSILONS, deltas)


def _flatten(event: dp_event.DpEvent, count: int) -> Iterator[tuple[dp_event.DpEvent, int]]:
    """The single releases in a composition, with their numbers of repetitions."""
    match event:
        case dp_event.ComposedDpEvent(parts):
            for part in parts:
                yield from _flatten(part, count)
        case dp_event.SelfComposedDpEvent(part, repetitions):
            yield from _flatten(part, count * repetitions)
        case _:
            yield event, count


@lru_cache(maxsize=64)
def _deltas(precision: float, others: Merged) -> np.ndarray:
    """Upper bounds on delta at `_EPSILONS` for merged events; the array is read-only."""
    if not others:
        deltas = _gaussian_deltas(np.sqrt(precision), _EPSILONS) * (1 + 1e-12)
    else:
        events = [
            (decode(json.loads(text)), count) for text, count in with_gaussian(precision, others)
        ]
        deltas = np.ones_like(_EPSILONS)
        if all(is_private(event) for event, _ in events):
            with suppress(OverflowError, ZeroDivisionError):  # raised for hardly any noise
                deltas = _composed_deltas(events)
    deltas = np.minimum(deltas, 1.0)
    deltas.flags.writeable = False
    return deltas


def _composed_deltas(events: list[tuple[dp_event.DpEvent, int]]) -> np.ndarray:
    searches = any(isinstance(event, dp_event.RepeatAndSelectDpEvent) for event, _ in events)
    name = SEARCHES if searches else accountant_of(event for event, _ in events)
    lost = LOST * sum(count for _, count in events)  # rounding error of a grid
    return deltas_of(compose(events, name), _EPSILONS) + lost


def _gaussian_deltas(mu: np.ndarray, epsilons: np.ndarray) -> np.ndarray:
    """Privacy profile of a Gaussian release: Phi(mu/2 - e/mu) - e^e Phi(-mu/2 - e/mu)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        first, second = log_ndtr(mu / 2 - epsilons / mu), log_ndtr(-mu / 2 - epsilons / mu)
        return np.where(mu > 0, np.exp(first) * -np.expm1(epsilons + second - first), 0.0)


def _lowest_lines(
    epsilons: np.ndarray, deltas: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The bounds on the true-positive rate of attacks on one unit. Each bound is a linear function
    of the false-positive rate. Only lines that are the lowest line somewhere are returned.

    Returns:
        For each line, the false-positive rate from which it is the lowest line (ascending), its
        intercept, and its slope.
    """
    ratios = np.exp(np.minimum(epsilons, 700.0))  # finite, and only weakens the bound
    # P(found | present) <= delta + e^epsilon P(found | absent)
    # P(missed | absent) <= delta + e^epsilon P(missed | present)
    intercepts = np.concatenate([deltas, 1 - (1 - deltas) / ratios])
    slopes = np.concatenate([ratios, 1 / ratios])
    lowest: list[tuple[float, float, float]] = []
    for place in np.lexsort((intercepts, -slopes)):  # the steepest line first
        since, intercept, slope = -math.inf, float(intercepts[place]), float(slopes[place])
        if lowest and slope == lowest[-1][2]:
            continue
        while lowest:
            start, other, steeper = lowest[-1]
            since = (intercept - other) / (steeper - slope)
            if since > start:
                break
            lowest.pop()
        lowest.append((since, intercept, slope))
    starts, heights, inclines = np.array(lowest).T
    return starts, heights, inclines
