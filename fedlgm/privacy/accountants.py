"""Google's PLD and RDP accountants, with a cache for single releases, because runs repeat the same
release.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any, get_args

import absl.logging
import dp_accounting
import numpy as np
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant, privacy_loss_distribution
from dp_accounting.pld.pld_pmf import DensePLDPmf
from dp_accounting.rdp import RdpAccountant
from typing_extensions import override

from fedlgm.checks import check_known
from fedlgm.extension.registry import Registry
from fedlgm.privacy.events import AllocationDpEvent, WholeOrdersDpEvent, gaussian_event
from fedlgm.privacy.grid import least_epsilon, sampled_gaussian
from fedlgm.privacy.guarantee import Accountant
from fedlgm.privacy.random_allocation import LEAST_MULTIPLIER, one_of_rounds
from fedlgm.privacy.renyi import best_orders
from fedlgm.privacy.repetition import compose_with, repeatable

ACCOUNTANTS = get_args(Accountant)
COARSE = "coarse pld"
"""Name of a PLD accountant with a grid ten times as coarse, which takes a tenth of the time. The
calibrated multiplier differs by at most a relative 1e-4.
"""
SEARCHES = "rdp of searches"
"""Name of the RDP accountant at `ORDERS`, for searches."""
GRIDS = ("pld", COARSE)
"""Names of the accountants that compute on grids, which do not resolve the smallest deltas."""
ORDERS = tuple(
    np.concatenate(
        [np.arange(1.25, 12, 0.25), np.arange(12, 65), [80, 96, 128, 160, 192, 256, 384, 512, 1024]]
    )
)
"""Renyi orders at which searches (`selection_event`) are accounted for."""
# below this multiplier, grids are coarser, because otherwise their size would grow with the
# multiplier's inverse square
_LITTLE_NOISE = 0.3


@lru_cache(maxsize=32)
def _one_sampled_gaussian(multiplier: float, rate: float, interval: float) -> Any:
    """Privacy loss distribution of one release. Computing it takes nearly all of the time of a
    composition.
    """
    return repeatable(sampled_gaussian(multiplier, rate, interval))


@lru_cache(maxsize=32)
def _one_of_rounds(multiplier: float, rounds: int, interval: float) -> Any:
    """Privacy loss distribution of one participation in one of several secret rounds."""
    return repeatable(one_of_rounds(multiplier, rounds, interval))


class PldAccountant(PLDAccountant):
    """Google's PLD accountant, which also composes `pure_event`s and `AllocationDpEvent`s under
    add-or-remove-one.

    It caches the distributions of single releases, because a run composes the same release more and
    more often.

    Example:
        >>> accountant = PldAccountant().compose(gaussian_event(1.0, 0.1), 10)
        >>> round(float(accountant.get_epsilon(1e-5)), 2)
        2.85
    """

    def branch(self) -> PldAccountant:
        """A separate accountant that starts with the releases composed so far, without the list of
        their events.
        """
        branch = PldAccountant(value_discretization_interval=self._value_discretization_interval)
        branch._pld = self._pld  # type: ignore[has-type]
        return branch

    @override
    def get_epsilon(self, target_delta: float) -> float:
        if self._contains_non_dp_event:
            return math.inf
        return max(least_epsilon(pmf, target_delta) for pmf in _directions(self._pld))

    def _maybe_compose(self, event: dp_event.DpEvent, count: int, do_compose: bool) -> Any:
        match event:
            case dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(multiplier)) if (
                rate * multiplier > 0 and rate < 1
            ):
                if do_compose:
                    single = _one_sampled_gaussian(
                        multiplier, rate, self._value_discretization_interval
                    )
                    self._pld = compose_with(self._pld, single.self_compose(count))  # type: ignore[has-type]
            case AllocationDpEvent(dp_event.GaussianDpEvent(multiplier), 1, rounds) if (
                multiplier >= LEAST_MULTIPLIER and rounds > 1
            ):
                if do_compose:
                    single = _one_of_rounds(multiplier, rounds, self._value_discretization_interval)
                    self._pld = compose_with(self._pld, single.self_compose(count))  # type: ignore[has-type]
            case AllocationDpEvent(dp_event.GaussianDpEvent() as release, 1):
                # with hardly any noise, the bound does not use the secrecy of the round
                return super()._maybe_compose(release, count, do_compose)
            case AllocationDpEvent(dp_event.GaussianDpEvent()):
                for draw, number in event.draws:
                    self._maybe_compose(draw, number * count, do_compose)
            case dp_event.RandomizedResponseDpEvent(noise, buckets):
                if do_compose:
                    worst = privacy_loss_distribution.from_randomized_response(
                        noise,
                        buckets,
                        value_discretization_interval=self._value_discretization_interval,
                        neighboring_relation=dp_accounting.NeighboringRelation.REPLACE_ONE,
                    )
                    self._pld = self._pld.compose(worst.self_compose(count))  # type: ignore[has-type]
            case _:
                return super()._maybe_compose(event, count, do_compose)
        return None


@lru_cache(maxsize=128)
def _renyi_curve(multiplier: float, rate: float, orders: tuple[float, ...]) -> Any:
    """Renyi divergences of one release. Computing them takes nearly all of the time of a
    composition.
    """
    return RdpAccountant(orders=orders).compose(gaussian_event(multiplier, rate)).rdp


class RenyiAccountant(RdpAccountant):
    """Google's RDP accountant, which also composes `WholeOrdersDpEvent`s and caches sampled
    Gaussian releases.

    Example:
        >>> accountant = RenyiAccountant().compose(gaussian_event(2.0), 4)
        >>> 4.3772 < float(accountant.get_epsilon(1e-5)) < 4.8  # 4.3772 is the exact epsilon
        True
    """

    def _maybe_compose(self, event: dp_event.DpEvent, count: int, do_compose: bool) -> Any:
        match event:
            case dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(multiplier)) if (
                0 < rate < 1 and multiplier > 0
            ):
                if do_compose:
                    orders = tuple(self._orders.tolist())
                    self._rdp += count * _renyi_curve(multiplier, rate, orders)  # type: ignore[has-type]
                return None
            case WholeOrdersDpEvent(rho):
                if do_compose:
                    self._rdp += count * rho * np.ceil(self._orders)  # type: ignore[has-type]
                return None
        return super()._maybe_compose(event, count, do_compose)

    def narrow(self, events: Iterable[tuple[dp_event.DpEvent, int]], delta: float) -> None:
        """If all events are sampled Gaussian releases, keep only a few orders, among them the order
        at which these events have the least epsilon. Call this before the events are composed.
        """
        releases = []
        for event, count in events:
            match event:
                case dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(multiplier)) if (
                    0 < rate < 1
                ):
                    releases.append((rate, multiplier, count))
                case _:
                    return
        self._orders = best_orders(releases, delta, self._orders)  # type: ignore[has-type]
        self._rdp = np.zeros(len(self._orders))


def new_accountant(
    name: str, events: Iterable[dp_event.DpEvent]
) -> dp_accounting.PrivacyAccountant:
    """An accountant for these events. For little noise its grid is coarser, which can only increase
    epsilon.

    Raises:
        ConfigError: no accountant has this name.
    """
    check_known("accountant", name, _ACCOUNTANTS.names())  # guarantees depend on it
    accountant: dp_accounting.PrivacyAccountant = _ACCOUNTANTS.find(name)(events)
    return accountant


def _pld(interval: float, events: Iterable[dp_event.DpEvent]) -> PldAccountant:
    gaussians = (getattr(event, "event", event) for event in events)
    noise = [
        event.noise_multiplier for event in gaussians if isinstance(event, dp_event.GaussianDpEvent)
    ]
    coarser = max(1.0, (_LITTLE_NOISE / min(noise)) ** 2) if noise else 1.0
    return PldAccountant(value_discretization_interval=interval * coarser)


_Makes = Callable[[Iterable[dp_event.DpEvent]], dp_accounting.PrivacyAccountant]
_ACCOUNTANTS: Registry[_Makes] = Registry(
    "accountant",
    {
        "pld": partial(_pld, 1e-4),
        "rdp": lambda events: RenyiAccountant(),
        COARSE: partial(_pld, 1e-3),
        SEARCHES: lambda events: RdpAccountant(orders=ORDERS),
    },
)


def deltas_of(accountant: Any, epsilons: np.ndarray) -> np.ndarray:
    """Upper bounds on delta at several epsilons, [n], for the releases that an accountant has
    composed.
    """
    if isinstance(accountant, PLDAccountant):
        return np.max([_grid_deltas(pmf, epsilons) for pmf in _directions(accountant._pld)], axis=0)
    with quiet():
        return np.array([accountant.get_delta(epsilon) for epsilon in epsilons])


def _directions(distribution: Any) -> list[DensePLDPmf]:
    """Grids of a privacy loss distribution: one for adding a unit and one for removing a unit, or
    one for both.
    """
    pmfs = {id(pmf): pmf for pmf in (distribution._pmf_remove, distribution._pmf_add)}
    return [pmf.to_dense_pmf() for pmf in pmfs.values()]


def _grid_deltas(pmf: DensePLDPmf, epsilons: np.ndarray) -> np.ndarray:
    """Upper bounds on delta(e) = P(l = inf) + sum over losses l > e of (1 - exp(e - l)) P(l), e >=
    0.

    `PLDPmf.get_delta_for_epsilon` computes the same value in a loop over all losses, which takes a
    hundred times as long.
    """
    probabilities = pmf._probs
    losses = (pmf._lower_loss + np.arange(len(probabilities))) * pmf._discretization
    discounted = probabilities * np.exp(-np.maximum(losses, 0.0))
    above = np.searchsorted(losses, epsilons, side="right")
    upper, lower = (
        np.append(np.cumsum(terms[::-1])[::-1], 0.0)[above] for terms in (probabilities, discounted)
    )
    rounding = len(probabilities) * 2.0**-53  # relative rounding error of a sum
    return np.asarray(
        pmf._infinity_mass + upper * (1 + rounding) - np.exp(epsilons) * lower * (1 - rounding)
    )


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress dp_accounting's messages about omitted Renyi orders, which are frequent and
    harmless.

    The messages are filtered, because a change of the level would empty the caches of all loggers.
    """
    logger = absl.logging.get_absl_logger()
    logger.addFilter(_is_error)
    try:
        yield
    finally:
        logger.removeFilter(_is_error)


def _is_error(record: logging.LogRecord) -> bool:
    return record.levelno >= logging.ERROR
