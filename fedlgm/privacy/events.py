"""Accounting events of releases, and their form in the ledger."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from dp_accounting import dp_event
from dp_accounting.dp_event import DpEvent as DpEvent

from fedlgm.checks import (
    check_at_least_zero,
    check_count,
    check_counts,
    check_rate,
    check_share,
)
from fedlgm.errors import ConfigError
from fedlgm.privacy.guarantee import Relation
from fedlgm.privacy.plain import plain_number, plain_numbers

LARGEST_PURE = 700.0
"""Pure epsilon beyond which a release counts as not private, because exp overflows."""


@dataclass(frozen=True)
class WholeOrdersDpEvent(dp_event.DpEvent):
    """A release whose Renyi divergence at every whole order a >= 2 is at most rho a.

    An order between two whole orders is charged at the larger of them, because divergences do not
    decrease with the order.

    Example:
        >>> from fedlgm.privacy import composed_epsilon
        >>> round(composed_epsilon([(WholeOrdersDpEvent(0.1), 1)], 1e-5, "rdp"), 4)
        1.9162
    """

    rho: float


@dataclass(frozen=True)
class AllocationDpEvent(dp_event.DpEvent):
    """Releases in a number of rounds. A unit takes part in exactly `participations` of these
    rounds.

    The rounds of a unit are a uniform draw without replacement, independent of all other units'
    draws, and stay secret. Other units may know their own rounds. The neighbouring relations are
    add-or-remove-one and zero-out.

    The charge for k of T rounds is the cost of k independent draws of one round each, out of T // k
    or T // k + 1 rounds. To see that this is an upper bound, divide the T rounds at random into k
    groups of these sizes, and draw one round of each group. The k rounds are uniform among all sets
    of k rounds, and this mixture over divisions costs at most as much as one division, because the
    hockey-stick divergence is jointly convex (Feldman and Shenfeld 2025, arXiv 2502.08202, section
    4). For k = 1 the charge is exact, up to the error of the grid. It is also exact for units that
    take part once in each of k blocks of equal length. `fedlgm.privacy.random_allocation` computes
    the cost of one draw.

    Attributes:
        event: one round's release, for a unit that takes part for certain.
        participations: number k of rounds in which the unit takes part, 1 to T.
        rounds: number T of rounds.

    Raises:
        ConfigError: there are more participations than rounds, or a number is out of range.

    Example:
        >>> from fedlgm.privacy import composed_epsilon
        >>> event = AllocationDpEvent(gaussian_event(1.0), participations=10, rounds=100)
        >>> round(composed_epsilon([(event, 1)], 1e-5), 2)
        6.12
        >>> event.draws
        ((AllocationDpEvent(event=GaussianDpEvent(noise_multiplier=1.0), participations=1, rounds=10), 10),)
    """

    event: dp_event.DpEvent
    participations: int
    rounds: int

    def __post_init__(self) -> None:
        most = check_count("rounds", self.rounds)
        check_count("participations", self.participations, most=most)

    @property
    def draws(self) -> tuple[tuple[dp_event.DpEvent, int], ...]:
        """Events of one participation each, with the number of times that each event occurs.
        Together they cost as much as this event.
        """
        length, longer = divmod(self.rounds, self.participations)
        numbers = {length: self.participations - longer, length + 1: longer}
        return tuple(
            (AllocationDpEvent(self.event, 1, rounds) if rounds > 1 else self.event, number)
            for rounds, number in numbers.items()
            if number
        )


RENYI_ONLY = (dp_event.ZCDpEvent, WholeOrdersDpEvent)
"""Events of integer noise that clients add in shares. They have a Renyi bound rho a at order a, but
no known privacy loss distribution.
"""


@plain_numbers
def gaussian_event(multiplier: float, sampling_rate: float = 1.0) -> dp_event.DpEvent:
    """Event of one (Poisson-sampled) Gaussian release; at a multiplier of 0, the event of a release
    that is not private.

    Args:
        multiplier: noise std divided by the largest change of the release between neighbouring data
            sets; if it is infinite, the event is free.
        sampling_rate: probability q of a unit's participation.

    Example:
        >>> gaussian_event(2.0, 0.1)
        PoissonSampledDpEvent(sampling_probability=0.1, event=GaussianDpEvent(noise_multiplier=2.0))
        >>> gaussian_event(0.0)
        NonPrivateDpEvent()
    """
    check_at_least_zero(multiplier=multiplier)
    event = subsample_event(dp_event.GaussianDpEvent(multiplier), sampling_rate)
    if multiplier == 0:
        return dp_event.NonPrivateDpEvent()
    return dp_event.NoOpDpEvent() if math.isinf(multiplier) else event


@plain_numbers
def allocation_event(multiplier: float, participations: int, rounds: int) -> dp_event.DpEvent:
    """Event of Gaussian releases in `rounds` rounds. A unit takes part in `participations` of these
    rounds (see `AllocationDpEvent`). If a unit takes part in all rounds, this is the event of
    releases without random allocation.

    Args:
        multiplier: noise std of each round divided by the largest change of a release between
            neighbouring data sets.
        participations: number k of secretly drawn rounds.
        rounds: number T of rounds.

    Raises:
        ConfigError: a number is out of range.

    Example:
        >>> allocation_event(2.0, 4, 4)
        SelfComposedDpEvent(event=GaussianDpEvent(noise_multiplier=2.0), count=4)
    """
    event = gaussian_event(multiplier)
    allocation = AllocationDpEvent(event, participations, rounds)
    if not isinstance(event, dp_event.GaussianDpEvent):
        return event
    return repeat_event(event, rounds) if participations == rounds else allocation


def as_gaussian(event: dp_event.DpEvent) -> dp_event.DpEvent:
    """The Gaussian release that approximates integer noise in shares, for lower bounds. Other
    events are unchanged.

    Example:
        >>> as_gaussian(WholeOrdersDpEvent(0.125))
        GaussianDpEvent(noise_multiplier=2.0)
    """
    match event:
        case dp_event.ZCDpEvent(rho) | WholeOrdersDpEvent(rho):
            return gaussian_event((2 * rho) ** -0.5)
    return event


@plain_numbers
def laplace_event(
    epsilon: float, sampling_rate: float = 1.0, relation: Relation = "add-remove"
) -> dp_event.DpEvent:
    """Event of one (Poisson-sampled) release with Laplace noise, in any dimension. Without
    sampling, the release is `epsilon`-DP.

    A product of Laplace coordinates shifted by a_i scales is dominated by one scalar Laplace
    release shifted by a >= sum_i a_i, so the scalar's event covers it. Proof: let o(e) = integral
    min(P, exp(e) Q) = 1 - delta(e).

    * One coordinate has o(e) = exp((e - a) / 2) for |e| <= a, 1 for e > a and exp(e) for e < -a.
      o(e) does not decrease when the shift decreases, so a smaller shift is dominated by a larger
      shift, and sum_i a_i = a may be assumed.
    * min(P_1 P_2, exp(e_1 + e_2) Q_1 Q_2) >= min(P_1, exp(e_1) Q_1) min(P_2, exp(e_2) Q_2)
      pointwise, so o(e_1 + e_2) >= o_1(e_1) o_2(e_2). For |e| <= a take e_i = e a_i / a: the
      product's o(e) is at least exp(sum_i (e_i - a_i) / 2) = exp((e - a) / 2), which is the
      scalar's o(e).
    * For e > a both have o(e) = 1 and for e < -a both have o(e) = exp(e): no loss exceeds a.

    So delta(e) of the product is at most the scalar's for every real e, in both directions (by
    reflection). Under Poisson sampling and add-or-remove-one, delta(e) of either direction is a
    non-decreasing function of the unsampled delta at one other e, as (1-q) Q + q P - c Q and Q - c
    ((1-q) Q + q P) are combinations of P and Q alone. The other units' participation is averaged
    over, which joint convexity permits. Composition preserves domination (Zhu, Dong and Wang 2022,
    Theorems 10 and 11).

    Args:
        epsilon: l1 sensitivity in noise units: the largest sum over coordinates of the change
            between neighbouring data sets, divided by the scale b.
        sampling_rate: probability q of a unit's participation.
        relation: neighbouring relation. Sampling under "replace-one" is amplified in closed form,
            to the pure epsilon ln(1 + q (exp(epsilon) - 1)), because no direction of the
            add-or-remove pair dominates a replacement at every e.

    Example:
        >>> from fedlgm.privacy import composed_epsilon
        >>> composed_epsilon([(laplace_event(0.5), 4)], delta=0.0)
        2.0
    """
    check_at_least_zero(epsilon=epsilon)
    check_rate(sampling_rate=sampling_rate)
    if epsilon == 0:
        return dp_event.NoOpDpEvent()
    if epsilon > LARGEST_PURE:
        return dp_event.NonPrivateDpEvent()
    if sampling_rate < 1 and relation == "replace-one":
        return pure_event(math.log1p(sampling_rate * math.expm1(epsilon)))
    return subsample_event(dp_event.LaplaceDpEvent(1.0 / epsilon), sampling_rate)


@plain_numbers
def pure_event(epsilon: float) -> dp_event.DpEvent:
    """Event of any `epsilon`-DP release. It is the event of randomized response, which dominates
    all such releases (Kairouz et al. 2015).

    Example:
        >>> from fedlgm.privacy import composed_epsilon
        >>> round(composed_epsilon([(pure_event(0.5), 4)], delta=0.0), 9)
        2.0
    """
    check_at_least_zero(epsilon=epsilon)
    if epsilon > LARGEST_PURE:
        return dp_event.NonPrivateDpEvent()
    # a parameter that is rounded to 1 would be refused
    replaced = min(2.0 / (1.0 + math.exp(epsilon)), 1.0 - 2.0**-53)
    return dp_event.RandomizedResponseDpEvent(replaced, 2)


@plain_numbers
def subsample_event(event: dp_event.DpEvent, sampling_rate: float) -> dp_event.DpEvent:
    """The event of `event` under Poisson sampling; `event` itself at rates that round to 1.

    Example:
        >>> event = gaussian_event(2.0)
        >>> subsample_event(event, 0.1) == gaussian_event(2.0, 0.1), subsample_event(event, 1.0)
        (True, GaussianDpEvent(noise_multiplier=2.0))
    """
    check_rate(sampling_rate=sampling_rate)
    return (
        event if sampling_rate > 1 - 1e-12 else dp_event.PoissonSampledDpEvent(sampling_rate, event)
    )


def repeat_event(event: dp_event.DpEvent, count: int) -> dp_event.DpEvent:
    """The event of `count` releases of `event`; `event` itself if `count` is 1.

    Raises:
        ConfigError: the count is not a whole number of at least 1.

    Example:
        >>> from fedlgm.privacy import composed_epsilon
        >>> event = repeat_event(gaussian_event(2.0), 4)
        >>> round(composed_epsilon([(event, 1)], 1e-5), 4)
        4.3772
    """
    check_count("count", count)
    return event if count == 1 else dp_event.SelfComposedDpEvent(event, int(count))


def unfold_event(event: dp_event.DpEvent, count: int) -> tuple[dp_event.DpEvent, int]:
    """An event without repetitions inside it, and the number of its releases that equals `count`
    releases of `event`.

    Raises:
        ConfigError: the number of releases is not a whole number of at least 0.
    """
    count = check_count("count", count, least=0)
    while isinstance(event, dp_event.SelfComposedDpEvent):
        event, count = event.event, count * check_count("count", event.count, least=0)
    return event, count


def accountant_of(events: Iterable[dp_event.DpEvent]) -> str:
    """The accountant that has a bound for all of these events.

    Example:
        >>> accountant_of([gaussian_event(2.0)]), accountant_of([gaussian_event(2.0), WholeOrdersDpEvent(0.1)])
        ('pld', 'rdp')
    """
    return (
        "rdp"
        if any(isinstance(unfold_event(event, 1)[0], RENYI_ONLY) for event in events)
        else "pld"
    )


def is_private(event: dp_event.DpEvent) -> bool:
    """Whether an event has any privacy bound.

    Example:
        >>> is_private(gaussian_event(1.0)), is_private(repeat_event(gaussian_event(0.0), 3))
        (True, False)
        >>> is_private(gaussian_event(1e-160, 0.1))
        False
    """
    while hasattr(event, "event"):
        event = event.event
    if isinstance(event, dp_event.ComposedDpEvent):
        return all(map(is_private, event.events))
    # with less noise, the square of the inverse multiplier overflows, and accountants would find
    # epsilon 0
    return not (
        isinstance(event, dp_event.NonPrivateDpEvent)
        or getattr(event, "noise_multiplier", 1) <= 1e-150
    )


def pure_epsilon(event: dp_event.DpEvent) -> float:
    """Pure epsilon of one event; `inf` if the event has no pure epsilon."""
    if isinstance(event, dp_event.NoOpDpEvent):
        return 0.0
    if isinstance(event, dp_event.RandomizedResponseDpEvent):
        flipped = event.noise_parameter / event.num_buckets
        return math.log1p(-event.noise_parameter + flipped) - math.log(flipped)
    if isinstance(event, dp_event.LaplaceDpEvent):
        return 1.0 / event.noise_multiplier
    if isinstance(event, dp_event.PoissonSampledDpEvent):
        inner = pure_epsilon(event.event)
        return (
            math.log1p(event.sampling_probability * math.expm1(inner))
            if math.isfinite(inner)
            else math.inf
        )
    return math.inf


def encode(event: dp_event.DpEvent) -> dict[str, Any]:
    """JSON form of an event, for the ledger and for messages.

    Raises:
        ConfigError: the library does not use events of this type, or a number of the event is
            impossible, for example a negative noise multiplier.

    Example:
        >>> encode(gaussian_event(1.5))
        {'type': 'GaussianDpEvent', 'noise_multiplier': 1.5}
    """
    name = type(event).__name__
    if name not in _FIELDS:
        raise ConfigError(f"an event must be of dp_accounting or fedlgm.privacy, got {name}")
    return {"type": name} | {
        field: _convert(name, field, getattr(event, field), encode) for field in _FIELDS[name]
    }


def decode(record: dict[str, Any]) -> dp_event.DpEvent:
    """Inverse of `encode`.

    Raises:
        ValueError: the record does not belong to a known event.
        ConfigError: see `encode`.

    Example:
        >>> decode(encode(gaussian_event(1.5, 0.1))) == gaussian_event(1.5, 0.1)
        True
    """
    fields = dict(record)
    name = fields.pop("type", None)
    if name not in _FIELDS or set(fields) != set(_FIELDS[name]):
        raise ValueError(f"not a stored privacy event: {record}")
    kind = _OWN.get(name) or getattr(dp_event, name)
    return kind(**{field: _convert(name, field, value, decode) for field, value in fields.items()})


def _convert(name: str, field: str, value: Any, each: Callable[[Any], Any]) -> Any:
    """A field of an event, with the events in it converted by `each`. Impossible numbers are
    refused, because accountants fail at them, and a ledger that contained one could not be read.
    """
    if field == "events":
        return [each(part) for part in value]
    check, number = _FIELDS[name][field], plain_number(value)
    if check is None:
        return each(value)
    check(name, **{field: number})
    return number


_OWN = {kind.__name__: kind for kind in (WholeOrdersDpEvent, AllocationDpEvent)}
_Check = Callable[..., None]
_FIELDS: dict[str, dict[str, _Check | None]] = {  # None: the field holds one event or several
    "NoOpDpEvent": {},
    "NonPrivateDpEvent": {},
    "GaussianDpEvent": {"noise_multiplier": check_at_least_zero},
    "ZCDpEvent": {"rho": check_at_least_zero, "xi": check_at_least_zero},
    "WholeOrdersDpEvent": {"rho": check_at_least_zero},
    "LaplaceDpEvent": {"noise_multiplier": check_at_least_zero},
    "RandomizedResponseDpEvent": {
        "noise_parameter": check_share,
        "num_buckets": partial(check_counts, least=2),
    },
    "PoissonSampledDpEvent": {"sampling_probability": check_rate, "event": None},
    "AllocationDpEvent": {"event": None, "participations": check_counts, "rounds": check_counts},
    "SelfComposedDpEvent": {"event": None, "count": check_counts},
    "ComposedDpEvent": {"events": None},
    "RepeatAndSelectDpEvent": {
        "event": None,
        "mean": check_at_least_zero,
        "shape": check_at_least_zero,
    },
}
