"""The epsilon of composed releases, and the calibration of noise, with Google's `dp_accounting`.

Noise multipliers are relative to one unit's bound S under add-or-remove-one. Replace-one moves a
sum by up to 2 S, so its multipliers are divided by two before accounting. For sampling m of N units
without replacement, as for Poisson sampling, this gives the sampled Gaussian mechanism of rate m/N
at the doubled sensitivity. The amplification theorem for replacement (Balle, Barthe and Gaboardi
2018) then covers one release. Compositions are not proven to be covered (docs/guarantees.md,
section Replace-one), and plans say so (status "conditional").
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import scipy.optimize
from dp_accounting import dp_event

from fedlgm import cache as remembered
from fedlgm.checks import (
    check_below_one,
    check_count,
    check_known,
    check_non_negative,
    check_positive,
    check_rate,
    check_share,
)
from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.privacy.accountants import (
    ACCOUNTANTS,
    COARSE,
    GRIDS,
    SEARCHES,
    RenyiAccountant,
    new_accountant,
    quiet,
)
from fedlgm.privacy.events import (
    AllocationDpEvent,
    decode,
    encode,
    is_private,
    pure_epsilon,
    unfold_event,
)
from fedlgm.privacy.gaussian import gaussian_epsilon
from fedlgm.privacy.guarantee import SENSITIVITY_FACTOR, Relation
from fedlgm.privacy.participation import Allocation, Draws, SecretDraw, draws_of, release_event
from fedlgm.privacy.plain import plain_number, plain_numbers

_COARSE_ERROR = 1e-3  # relative error; ten times the measured one
# rounding error of delta from the grid's Fourier transforms, for each release: five times the
# measured error
LOST = 2.0**-52
_NEGLIGIBLE = 1e-6  # relative change of delta that is smaller than the grid's error

_LARGEST_MULTIPLIER = 1e7
SMALLEST_MULTIPLIER = 0.05  # smallest calibrated multiplier, even if the budget allows less noise
_TOLERANCE = 1e-6  # relative tolerance of the calibrated multiplier
_KEPT = 1e-8  # relative margin, because plans round multipliers down to nine digits
_CONFIRMED = 1e-4  # largest share of the target epsilon that a cached multiplier may leave unspent


@plain_numbers
def epsilon(
    noise_multiplier: float,
    delta: float,
    *,
    steps: int,
    sampling_rate: float = 1.0,
    relation: Relation = "add-remove",
    accountant: str = "pld",
    sampling: SecretDraw = "poisson",
    participations: int | None = None,
) -> float:
    """Epsilon after `steps` releases of a sampled Gaussian mechanism.

    Args:
        noise_multiplier: noise std of the sum, divided by one unit's l2 bound S (see the module's
            note on replace-one).
        delta: target delta in (0, 1).
        steps: number of releases T >= 0.
        sampling_rate: probability q in (0, 1] that a unit takes part in a release.
        relation: neighbouring relation, "add-remove", "replace-one" or "zero-out".
        accountant: "pld" or "rdp".
        sampling: "poisson" (a unit takes part in each release independently, with probability
            `sampling_rate`) or "allocation" (a unit takes part in exactly `participations` of the
            releases, which are drawn uniformly and secretly; see `events.AllocationDpEvent` for the
            theorem). Here, random allocation has no bound by "rdp" and none under "replace-one".
        participations: number k of releases in which a unit takes part under "allocation".

    Raises:
        ConfigError: an argument is outside its range; the message names it.
        PrivacyError: the accountant cannot account for random allocation.

    >>> round(epsilon(1.0, 1e-5, steps=10, sampling_rate=0.1), 2)
    2.85
    >>> round(epsilon(1.0, 1e-5, steps=100, sampling="allocation", participations=10), 2)
    6.12
    """
    draws, count = draws_of(sampling, sampling_rate, steps, participations, relation)
    _check(delta, accountant)
    check_non_negative(noise_multiplier=noise_multiplier)
    event = release_event(noise_multiplier / SENSITIVITY_FACTOR[relation], draws)
    return composed_epsilon([(event, count)], delta, accountant)


@plain_numbers
def calibrate(
    epsilon: float,
    delta: float,
    *,
    steps: int,
    sampling_rate: float = 1.0,
    relation: Relation = "add-remove",
    accountant: str = "pld",
    sampling: SecretDraw = "poisson",
    participations: int | None = None,
) -> float:
    """Smallest noise multiplier sigma_* at which `steps` releases stay within (epsilon, delta).

    This inverts `epsilon` in its first argument. The result is at most a relative 1e-6 too large
    and never too small.

    Args:
        epsilon: budget of all releases, > 0.
        delta: delta of the budget, in (0, 1).
        steps: number of releases T >= 1.
        sampling_rate: probability q in (0, 1] that a unit takes part in a release.
        relation: neighbouring relation, "add-remove", "replace-one" or "zero-out".
        accountant: "pld" or "rdp".
        sampling: "poisson" or "allocation", as in `epsilon`.
        participations: number k of releases in which a unit takes part under "allocation".

    Returns:
        Noise std of the sum, divided by one unit's l2 bound; at least 0.05 (0.1 under replace-one),
        even if the budget allows less noise.

    Raises:
        ConfigError: an argument is outside its range.
        PrivacyError: no finite noise meets the budget, or the accountant cannot account for random
            allocation.

    >>> round(calibrate(3.0, 1e-5, steps=100, sampling_rate=0.1), 3)
    1.675
    """
    if steps == 0:
        raise ConfigError(
            "steps must be at least 1: without a release there is nothing to calibrate"
        )
    draws, count = draws_of(sampling, sampling_rate, steps, participations, relation)
    return calibrate_levels(
        {1.0: count}, epsilon, delta, draws=draws, relation=relation, accountant=accountant
    )


@plain_numbers
def calibrate_levels(
    levels: Mapping[float, int],
    epsilon: float,
    delta: float,
    *,
    draws: Draws = 1.0,
    relation: Relation = "add-remove",
    accountant: str = "pld",
) -> float:
    """Smallest factor a such that releases with noise multipliers a times `levels` stay within
    (epsilon, delta).

    Args:
        levels: number of releases at each relative noise level. Levels are positive, and numbers
            are at least 1. With an allocation, the numbers count allocations, and all releases of
            an allocation have the same level.
        epsilon: budget of all releases.
        delta: delta of the budget.
        draws: Poisson rate q of each release, or an allocation.
        relation: neighbouring relation (replace-one doubles the result).
        accountant: "pld" or "rdp".

    Returns:
        The factor a, which is at most a relative 1e-6 too large and never too small.

    Raises:
        ConfigError: an argument is outside its range.
        PrivacyError: no finite noise meets the budget.

    Example:
        >>> a = calibrate_levels({1.0: 1, 2.0: 4}, 1.0, 1e-5)  # four releases of twice the noise cost as much as one
        >>> round(a / calibrate(1.0, 1e-5, steps=2), 4)
        1.0
        >>> from fedlgm.privacy.participation import Allocation
        >>> blocks = calibrate_levels({1.0: 2}, 3.0, 1e-5, draws=Allocation(5, 50))
        >>> round(blocks / calibrate(3.0, 1e-5, steps=100, sampling="allocation", participations=10), 6)
        1.0
    """
    if not isinstance(draws, Allocation):
        check_rate(sampling_rate=draws)
        draws = float(draws)
    for level in levels:
        check_positive(level=level)
    levels = {
        plain_number(level): check_count(f"the number of releases at level {level:g}", count)
        for level, count in levels.items()
    }
    _check(delta, accountant)
    check_positive(epsilon=epsilon)
    check_count("the number of levels", len(levels))
    least = min(levels)
    over_least = tuple(sorted((float(level / least), count) for level, count in levels.items()))
    unit = _calibrate(float(epsilon), float(delta), over_least, draws, accountant)
    return unit / least * SENSITIVITY_FACTOR[relation]


_Levels = tuple[tuple[float, int], ...]


@lru_cache(maxsize=256)
def _calibrate(target: float, delta: float, levels: _Levels, rate: Draws, accountant: str) -> float:
    """Calibrated multiplier of the releases with the least noise: the cached result of an earlier
    process if the accountant confirms it, otherwise a new result.
    """
    inputs = {
        "request": [target, delta, levels, rate, accountant],
        "code": remembered.code_of(*Path(__file__).parent.glob("*.py")),
        "versions": [
            remembered.version_of(package) for package in ("dp-accounting", "numpy", "scipy")
        ],
    }
    root = _confirm(remembered.load("calibration", inputs), target, delta, levels, rate, accountant)
    if root is None:
        root = _root(target, delta, levels, rate, accountant)
        remembered.save("calibration", inputs, root.hex().encode())
    return max(math.exp(root), SMALLEST_MULTIPLIER)


def _confirm(
    record: bytes | None, target: float, delta: float, levels: _Levels, rate: Draws, accountant: str
) -> float | None:
    """Logarithm of a cached multiplier, if the accountant finds that the multiplier spends the
    budget to within the tolerance; otherwise None.

    An edited file therefore cannot weaken the noise, or increase it beyond the tolerance.
    """
    try:
        root = float.fromhex((record or b"").decode())
    except ValueError:
        return None
    if not math.log(SMALLEST_MULTIPLIER) <= root <= math.log(_LARGEST_MULTIPLIER):
        return None
    above = _excess(root - _KEPT, accountant, target, delta, levels, rate)
    return root if -_CONFIRMED * target <= above <= 0 else None


def _excess(
    log_multiplier: float,
    accountant: str,
    target: float,
    delta: float,
    levels: _Levels,
    rate: Draws,
) -> float:
    """Epsilon of the releases at this multiplier, minus the target."""
    multiplier = math.exp(log_multiplier)
    events = [(release_event(multiplier * level, rate), count) for level, count in levels]
    # PLD may report infinity for very little noise; any large number keeps the bracket's sign.
    return min(composed_epsilon(events, delta, accountant), 1e6) - target


def _root(target: float, delta: float, levels: _Levels, rate: Draws, accountant: str) -> float:
    """Logarithm of the calibrated multiplier."""

    def excess(log_multiplier: float, kind: str) -> float:
        if kind == "rdp" and accountant in GRIDS and isinstance(rate, Allocation):
            as_often = tuple((level, count * rate.rounds) for level, count in levels)
            often = rate.participations / rate.rounds
            return _excess(log_multiplier, kind, target, delta, as_often, often)
        return _excess(log_multiplier, kind, target, delta, levels, rate)

    def solve(low: float, high: float, kind: str, xtol: float) -> float:
        while excess(high, kind) > 0:
            low, high = high, high + 1.0
            if high > math.log(_LARGEST_MULTIPLIER):
                raise PrivacyError(
                    f"the {accountant} accountant finds no noise multiplier below "
                    f"{_LARGEST_MULTIPLIER:g} that meets epsilon={target:g}, delta={delta:g} after "
                    f"{sum(count for _, count in levels)} releases: raise epsilon or delta, or release fewer times"
                )
        while excess(low, kind) < 0:
            if low <= math.log(SMALLEST_MULTIPLIER):
                return low  # the budget requires hardly any noise, and more noise is safe
            low, high = max(low - 0.5, math.log(SMALLEST_MULTIPLIER)), low
        return float(scipy.optimize.brentq(excess, low, high, args=(kind,), xtol=xtol))

    def polish(root: float) -> float | None:
        """A nearby root, found by Newton steps that use the slope of the cheap accountant; None if
        the steps do not converge.
        """
        slope = (excess(root + 1e-3, COARSE) - excess(root - 1e-3, COARSE)) / 2e-3
        for _ in range(4):
            above = excess(root, accountant) / slope if slope < 0 else math.inf
            if _KEPT <= above <= _TOLERANCE:
                return root
            if not abs(above) < 1e-2:
                return None
            root += _TOLERANCE / 4 - above
        return None

    # RDP is cheap, and its root is close to the root of the requested accountant, so the search for
    # the latter starts there.
    guess = (math.log(0.9), math.log(2.0))
    try:
        start = solve(*guess, "rdp", 1e-3)
    except PrivacyError:  # RDP has no bound for a small epsilon at a small delta
        if accountant == "rdp":
            raise
        start = solve(*guess, accountant if rate == 1 else COARSE, 1e-3)
    root = None
    if accountant == "pld" and rate != 1:
        root = polish(solve(start - 0.2, start + 0.05, COARSE, _TOLERANCE))
    if root is None:
        root = solve(start - 0.2, start + 0.05, accountant, _TOLERANCE / 4)
        while max(excess(root, accountant), excess(root - _KEPT, accountant)) > 0:
            root += _TOLERANCE / 2
    return root


@plain_numbers
def composed_epsilon(
    events: Iterable[tuple[dp_event.DpEvent, int]], delta: float, accountant: str = "pld"
) -> float:
    """Epsilon at `delta` of events composed the given numbers of times; `inf` if an event is not
    private.

    delta = 0 means pure differential privacy. Then the pure epsilons of the events are summed,
    without an accountant. An event without a pure epsilon (Gaussian noise) makes the result `inf`.
    Epsilon holds under the neighbouring relation of the events.

    Grids of privacy losses cannot resolve a delta near the rounding error of doubles. Where this
    matters (for delta below about 2^-52 times the number of releases, divided by 1e-6), "pld" is
    evaluated at delta minus the rounding error. Epsilon is also computed by RDP, which has no such
    error, if RDP supports all events. The result is the smaller of the two upper bounds.

    If a search (`selection_event`) is among the events, all of them are composed by RDP at
    `accountants.ORDERS` for every `accountant`, because no privacy loss distribution of a search is
    known.

    Args:
        events: pairs (event, number of compositions).
        delta: in [0, 1).
        accountant: "pld" or "rdp".

    Raises:
        ConfigError: delta is outside [0, 1), or a number of compositions is not a whole number of
            at least 0; or see `fedlgm.privacy.events.encode`.
        PrivacyError: the accountant cannot handle an event.

    Example:
        >>> from fedlgm.privacy.events import gaussian_event
        >>> round(composed_epsilon([(gaussian_event(2.0), 4)], 1e-5), 4)  # one Gaussian release of multiplier 1
        4.3772
    """
    check_below_one(delta=delta)
    precision, others = merge_events(events)
    if precision > 0 and not others and 0 < delta < 1 and accountant == "pld":
        return gaussian_epsilon(math.sqrt(precision), delta)  # exact, in closed form
    return _composed_epsilon(with_gaussian(precision, others), float(delta), accountant)


Merged = tuple[tuple[str, int], ...]
"""Events as JSON texts, with their counts."""


def merge_events(events: Iterable[tuple[dp_event.DpEvent, int]]) -> tuple[float, Merged]:
    """Count equal events together, and merge all Gaussian releases without sampling into one.

    Args:
        events: pairs (event, number of compositions).

    Returns:
        The inverse square of the noise multiplier of the merged Gaussian release (0 if there is
        none), and the other events.

    Raises:
        ConfigError: a number of compositions is not a whole number of at least 0; or see
            `fedlgm.privacy.events.encode`.

    Example:
        >>> from fedlgm.privacy.events import gaussian_event
        >>> merge_events([(gaussian_event(2.0), 4), (gaussian_event(1.0, 0.1), 0)])
        (1.0, ())
    """
    merged: Counter[str] = Counter()
    precision = 0.0
    for event, count in _unfold(events):
        record = encode(event)  # this checks the event's numbers
        if isinstance(event, dp_event.GaussianDpEvent) and is_private(event):
            precision += count / record["noise_multiplier"] ** 2
        elif count > 0 and not isinstance(event, dp_event.NoOpDpEvent):
            merged[json.dumps(record)] += count
    return precision, tuple(sorted(merged.items()))


def _unfold(
    events: Iterable[tuple[dp_event.DpEvent, int]],
) -> Iterator[tuple[dp_event.DpEvent, int]]:
    """Multiply out the repetitions inside events, and split allocations into single
    participations.
    """
    for event, count in events:
        event, count = unfold_event(event, count)
        if isinstance(event, AllocationDpEvent) and is_private(event):
            encode(event)
            yield from ((draw, number * count) for draw, number in event.draws)
        else:
            yield event, count


def with_gaussian(precision: float, others: Merged) -> Merged:
    """The events that `merge_events` returned, with the merged Gaussian release among them."""
    if not precision > 0:
        return others
    text = json.dumps(encode(dp_event.GaussianDpEvent(precision**-0.5)))
    return tuple(sorted((*others, (text, 1))))


def is_resolved(events: Iterable[tuple[dp_event.DpEvent, int]], delta: float) -> bool:
    """Whether grids of privacy losses resolve this delta for this number of releases; see
    `composed_epsilon`.

    Raises:
        ConfigError: delta is outside [0, 1).
    """
    check_below_one(delta=delta)
    return sum(count for _, count in events) * LOST <= _NEGLIGIBLE * delta


def quick_epsilon(events: Iterable[tuple[dp_event.DpEvent, int]], delta: float) -> float:
    """A lower bound that is slightly below the result of `composed_epsilon`, computed in a tenth of
    the time.

    A grid ten times as coarse overestimates epsilon by at most a relative 1e-3, which is
    subtracted.

    Example:
        >>> from fedlgm.privacy.events import gaussian_event
        >>> events = [(gaussian_event(1.0, 0.1), 10)]
        >>> 0.99 < quick_epsilon(events, 1e-5) / composed_epsilon(events, 1e-5) < 1
        True
    """
    return (1 - _COARSE_ERROR) * composed_epsilon(events, delta, COARSE)


@lru_cache(maxsize=4096)
def _composed_epsilon(events: tuple[tuple[str, int], ...], delta: float, accountant: str) -> float:
    if delta == 0:
        return sum(count * pure_epsilon(decode(json.loads(name))) for name, count in events)
    decoded = [(decode(json.loads(name)), count) for name, count in events]
    if any(not is_private(event) for event, _ in decoded):
        return math.inf
    if not decoded:
        return 0.0
    if any(isinstance(event, dp_event.RepeatAndSelectDpEvent) for event, _ in decoded):
        return _epsilon_of(decoded, delta, SEARCHES)
    if accountant not in GRIDS or is_resolved(decoded, delta):
        return _epsilon_of(decoded, delta, accountant)
    lost = sum(count for _, count in decoded) * LOST  # both are upper bounds
    grid = _epsilon_of(decoded, delta - lost, accountant) if lost < delta else math.inf
    orders = RenyiAccountant()
    return min(
        grid,
        _epsilon_of(decoded, delta, "rdp")
        if all(orders.supports(e) for e, _ in decoded)
        else math.inf,
    )


def compose(
    events: list[tuple[dp_event.DpEvent, int]], accountant: str, delta: float | None = None
) -> Any:
    """An accountant of dp_accounting that has composed the events.

    Args:
        events: pairs (event, number of compositions).
        accountant: name of the accountant.
        delta: the only delta, above 0, at which the accountant will be asked for epsilon; None if
            it may be asked for epsilon at any delta.

    Raises:
        PrivacyError: the accountant cannot handle an event.
    """
    composed = new_accountant(accountant, [event for event, _ in events])
    if delta is not None and isinstance(composed, RenyiAccountant):
        composed.narrow(events, delta)
    for event, count in events:
        if not composed.supports(event):
            able = [
                other for other in ACCOUNTANTS if new_accountant(other, [event]).supports(event)
            ]
            raise PrivacyError(
                f"the {accountant} accountant cannot account for {event}"
                + (f"; use accountant = {' or '.join(map(repr, able))}" if able else "")
            )
        with quiet():
            composed.compose(event, count)
    return composed


def _epsilon_of(events: list[tuple[dp_event.DpEvent, int]], delta: float, accountant: str) -> float:
    try:
        for few_orders_of in (delta, None):
            composed = compose(events, accountant, few_orders_of)
            with quiet():
                found = float(composed.get_epsilon(delta))
            if math.isfinite(found) or accountant != "rdp":
                break
        return found
    except (OverflowError, ZeroDivisionError):
        # with hardly any noise, the exponentials of losses exceed the range of doubles
        return math.inf


def _check(delta: float, accountant: str) -> None:
    check_share(delta=delta)
    check_known("accountant", accountant, ACCOUNTANTS)
