"""Epsilon of composed releases and noise calibration, by Google's `dp_accounting`.

Noise multipliers are relative to one unit's bound S under add-or-remove-one. Replace-one moves a sum by up to 2 S, so
its multipliers are divided by two before accounting: with fixed-size sampling without replacement this is the sampled
Gaussian mechanism of rate m/N at the doubled sensitivity, with Poisson sampling likewise. One release is then covered
by the amplification theorem for replacement (Balle, Barthe and Gaboardi 2018); compositions are not proven to
be covered (docs/guarantees.md, section Replace-one), and plans say so (status "conditional").
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import absl.logging
import dp_accounting
import scipy.optimize
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant, privacy_loss_distribution
from dp_accounting.rdp import RdpAccountant

from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.privacy.gaussian import gaussian_epsilon
from fedlgm.privacy.guarantee import SENSITIVITY_FACTOR, Relation


@lru_cache(maxsize=32)
def _one_sampled_gaussian(multiplier: float, rate: float, interval: float) -> Any:
    """Privacy loss distribution of one release; nearly all the time that composing many takes."""
    return privacy_loss_distribution.from_gaussian_mechanism(
        standard_deviation=multiplier, value_discretization_interval=interval, sampling_prob=rate
    )


class PldAccountant(PLDAccountant):
    """Google's PLD accountant, which also composes `pure_event`s among events of add-or-remove-one.

    It remembers single sampled Gaussian releases: a run asks for the sum of ever more of the same.
    """

    def _maybe_compose(self, event: dp_event.DpEvent, count: int, do_compose: bool) -> Any:
        match event:
            case dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(multiplier)) if rate * multiplier > 0:
                if do_compose:
                    one = _one_sampled_gaussian(multiplier, rate, self._value_discretization_interval)
                    self._pld = self._pld.compose(one.self_compose(count))  # type: ignore[has-type]
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
def _renyi_curve(multiplier: float, rate: float) -> Any:
    """Renyi divergences of one release at all orders; nearly all the time that composing takes."""
    return RdpAccountant().compose(gaussian_event(multiplier, rate)).rdp


class RenyiAccountant(RdpAccountant):
    """Google's RDP accountant, which remembers single sampled Gaussian releases likewise."""

    def _maybe_compose(self, event: dp_event.DpEvent, count: int, do_compose: bool) -> Any:
        match event:
            case dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(multiplier)) if rate * multiplier > 0:
                if do_compose:
                    self._rdp += count * _renyi_curve(multiplier, rate)  # type: ignore[has-type]
                return None
        return super()._maybe_compose(event, count, do_compose)


ACCOUNTANTS = ("pld", "rdp")
_COARSE = "coarse pld"  # a tenth of the cost; its root is within 1e-4 of the accurate one
_COARSE_ERROR = 1e-3  # relative, ten times what it is
_INTERVALS = {"pld": 1e-4, _COARSE: 1e-3}
_LITTLE_NOISE = 0.3  # below it, grids would grow with the inverse square of the multiplier: they get coarser instead


def _accountant(name: str, events: Iterable[dp_event.DpEvent]) -> dp_accounting.PrivacyAccountant:
    """An accountant for these events; a coarser grid errs on the safe side."""
    if name not in _INTERVALS:
        return RenyiAccountant()
    gaussians = (getattr(event, "event", event) for event in events)
    noise = [event.noise_multiplier for event in gaussians if isinstance(event, dp_event.GaussianDpEvent)]
    coarser = max(1.0, (_LITTLE_NOISE / min(noise)) ** 2) if noise else 1.0
    return PldAccountant(value_discretization_interval=_INTERVALS[name] * coarser)


_LARGEST_MULTIPLIER = 1e7
_SMALLEST_MULTIPLIER = 0.05  # a budget that allows less noise than this gets this
LARGEST_PURE = 700.0
"""Pure epsilon of a release beyond which it counts as not private: exp overflows, and nobody would call it private."""
_TOLERANCE = 1e-6  # relative, on the calibrated multiplier
_KEPT = 1e-8  # relative; a plan keeps nine digits of its multiplier, rounded down


def epsilon(
    noise_multiplier: float,
    delta: float,
    *,
    steps: int,
    sampling_rate: float = 1.0,
    relation: Relation = "add-remove",
    accountant: str = "pld",
) -> float:
    """Epsilon after `steps` releases of a sampled Gaussian mechanism.

    Args:
        noise_multiplier: noise std of the sum over one unit's l2 bound S (see the module's note on replace-one).
        delta: target delta in (0, 1).
        steps: number of releases T >= 0.
        sampling_rate: probability q in (0, 1] that a unit takes part in a release.
        relation: neighbouring relation, "add-remove", "replace-one" or "zero-out".
        accountant: "pld" or "rdp".

    Raises:
        ConfigError: an argument outside its range; the message says which.

    >>> round(epsilon(1.0, 1e-5, steps=10, sampling_rate=0.1), 2)
    2.85
    """
    _check(delta=delta, steps=steps, sampling_rate=sampling_rate, relation=relation, accountant=accountant)
    if not noise_multiplier >= 0:
        raise ConfigError(f"noise_multiplier must be at least 0, got {noise_multiplier}")
    event = gaussian_event(noise_multiplier / SENSITIVITY_FACTOR[relation], sampling_rate)
    return composed_epsilon([(event, steps)], delta, accountant)


def calibrate(
    epsilon: float,
    delta: float,
    *,
    steps: int,
    sampling_rate: float = 1.0,
    relation: Relation = "add-remove",
    accountant: str = "pld",
) -> float:
    """Smallest noise multiplier sigma_* whose `steps` releases stay within (epsilon, delta).

    The inverse of `epsilon` in its first argument, to a relative accuracy of 1e-6 on the safe side.

    Args:
        epsilon: budget of all releases, > 0.
        delta: its delta, in (0, 1).
        steps: number of releases T >= 1.
        sampling_rate: probability q in (0, 1] that a unit takes part in a release.
        relation: neighbouring relation, "add-remove", "replace-one" or "zero-out".
        accountant: "pld" or "rdp".

    Returns:
        Noise std of the sum over one unit's l2 bound.

    Raises:
        ConfigError: an argument outside its range.
        PrivacyError: no finite noise meets the budget.

    >>> round(calibrate(3.0, 1e-5, steps=100, sampling_rate=0.1), 3)
    1.675
    """
    if steps == 0:
        raise ConfigError("steps must be at least 1: there is nothing to calibrate for no release")
    return calibrate_levels(
        {1.0: steps}, epsilon, delta, sampling_rate=sampling_rate, relation=relation, accountant=accountant
    )


def calibrate_levels(
    levels: Mapping[float, int],
    epsilon: float,
    delta: float,
    *,
    sampling_rate: float = 1.0,
    relation: Relation = "add-remove",
    accountant: str = "pld",
) -> float:
    """Smallest a such that releases whose noise multipliers are a times given levels stay within (epsilon, delta).

    Args:
        levels: number of releases at each relative noise level; levels are positive, numbers at least 1.
        epsilon: budget of all releases.
        delta: its delta.
        sampling_rate: Poisson rate q of each release.
        relation: neighbouring relation (replace-one doubles the result).
        accountant: "pld" or "rdp".

    Returns:
        The factor a, to a relative accuracy of 1e-6 on the safe side.

    Raises:
        ConfigError: an argument outside its range.
        PrivacyError: no finite noise meets the budget.
    """
    _check(
        delta=delta, steps=sum(levels.values()), sampling_rate=sampling_rate, relation=relation, accountant=accountant
    )
    if not (math.isfinite(epsilon) and epsilon > 0):
        raise ConfigError(f"epsilon must be finite and positive, got {epsilon}")
    if not levels or not all(math.isfinite(level) and level > 0 and count >= 1 for level, count in levels.items()):
        raise ConfigError(f"levels must be positive, with at least one release each, got {dict(levels)}")
    least = min(levels)
    over_least = tuple(sorted((float(level / least), int(count)) for level, count in levels.items()))
    unit = _calibrate(float(epsilon), float(delta), over_least, float(sampling_rate), accountant)
    return unit / least * SENSITIVITY_FACTOR[relation]


@lru_cache(maxsize=256)
def _calibrate(
    target: float, delta: float, levels: tuple[tuple[float, int], ...], rate: float, accountant: str
) -> float:
    def excess(log_multiplier: float, kind: str) -> float:
        multiplier = math.exp(log_multiplier)
        events = [(gaussian_event(multiplier * level, rate), count) for level, count in levels]
        # PLD may report infinity for very little noise; any large number keeps the bracket's sign.
        return min(composed_epsilon(events, delta, kind), 1e6) - target

    def solve(low: float, high: float, kind: str, xtol: float) -> float:
        while excess(high, kind) > 0:
            low, high = high, high + 1.0
            if high > math.log(_LARGEST_MULTIPLIER):
                releases = sum(count for _, count in levels)
                raise PrivacyError(
                    f"the {accountant} accountant finds no noise multiplier below {_LARGEST_MULTIPLIER:g} that meets "
                    f"epsilon={target:g}, delta={delta:g} after {releases} releases: raise epsilon or delta, or "
                    "release fewer times"
                )
        while excess(low, kind) < 0:
            if low <= math.log(_SMALLEST_MULTIPLIER):
                return low  # a budget that hardly asks for noise: more of it than needed is safe
            low, high = max(low - 0.5, math.log(_SMALLEST_MULTIPLIER)), low
        return float(scipy.optimize.brentq(excess, low, high, args=(kind,), xtol=xtol))

    def polish(root: float) -> float | None:
        """A root nearby by Newton steps, with the slope that the cheap accountant sees; None if that leads nowhere."""
        slope = (excess(root + 1e-3, _COARSE) - excess(root - 1e-3, _COARSE)) / 2e-3
        for _ in range(4):
            above = excess(root, accountant) / slope if slope < 0 else math.inf
            if _KEPT <= above <= _TOLERANCE:
                return root
            if not abs(above) < 1e-2:
                return None
            root += _TOLERANCE / 4 - above
        return None

    # RDP is cheap and close: it brackets the root for the accountant that was asked for.
    guess = (math.log(0.9), math.log(2.0))
    try:
        start = solve(*guess, "rdp", 1e-3)
    except PrivacyError:  # it has no answer for little epsilon at little delta
        if accountant == "rdp":
            raise
        start = solve(*guess, accountant if rate == 1 else _COARSE, 1e-3)
    root = None
    if accountant == "pld" and rate < 1:
        root = polish(solve(start - 0.2, start + 0.05, _COARSE, _TOLERANCE))
    if root is None:
        root = solve(start - 0.2, start + 0.05, accountant, _TOLERANCE / 4)
        while max(excess(root, accountant), excess(root - _KEPT, accountant)) > 0:
            root += _TOLERANCE / 2
    return math.exp(root)


def gaussian_event(multiplier: float, sampling_rate: float = 1.0) -> dp_event.DpEvent:
    """Event of one (Poisson-sampled) Gaussian release; a multiplier of 0 is not private at all."""
    if multiplier == 0:
        return dp_event.NonPrivateDpEvent()
    if math.isinf(multiplier):
        return dp_event.NoOpDpEvent()
    return sampled(dp_event.GaussianDpEvent(multiplier), sampling_rate)


def laplace_event(epsilon: float, sampling_rate: float = 1.0, relation: Relation = "add-remove") -> dp_event.DpEvent:
    """Event of one (Poisson-sampled) release with Laplace noise, of any dimension, that is `epsilon`-DP by its scales.

    A product of Laplace coordinates shifted by a_i scales is dominated by one scalar Laplace release shifted by
    a >= sum_i a_i, so the scalar's event covers it. Proof: let o(e) = integral min(P, exp(e) Q) = 1 - delta(e).

    * One coordinate has o(e) = exp((e - a) / 2) for |e| <= a, 1 above and exp(e) below. It never falls when the shift
      shrinks, so a smaller shift is dominated by a larger one and sum_i a_i = a may be assumed.
    * min(P_1 P_2, exp(e_1 + e_2) Q_1 Q_2) >= min(P_1, exp(e_1) Q_1) min(P_2, exp(e_2) Q_2) pointwise, so
      o(e_1 + e_2) >= o_1(e_1) o_2(e_2). For |e| <= a take e_i = e a_i / a: the product's o(e) is at least
      exp(sum_i (e_i - a_i) / 2) = exp((e - a) / 2), the scalar's.
    * For e > a both have o(e) = 1 and for e < -a both have o(e) = exp(e): no loss exceeds a.

    So delta(e) of the product is at most the scalar's for every real e, in both directions (by reflection). Under
    Poisson sampling and add-or-remove-one, delta(e) of either direction is a non-decreasing function of the unsampled
    delta at one other e, as (1-q) Q + q P - c Q and Q - c ((1-q) Q + q P) are combinations of P and Q alone. The other
    units' participation is averaged over, which joint convexity allows, and composition preserves domination (Zhu, Dong
    and Wang 2022, Theorems 10 and 11).

    Args:
        epsilon: sum over coordinates of what a neighbour may move, over the scale b: l1 sensitivity in noise units.
        sampling_rate: probability q of a unit's participation.
        relation: neighbouring relation. Sampling under "replace-one" is amplified in closed form, as a pure
            ln(1 + q (exp(epsilon) - 1)): no direction of the add-or-remove pair dominates a replacement at every e.
    """
    if epsilon == 0:
        return dp_event.NoOpDpEvent()
    if epsilon > LARGEST_PURE:
        return dp_event.NonPrivateDpEvent()
    if sampling_rate < 1 and relation == "replace-one":
        return pure_event(math.log1p(sampling_rate * math.expm1(epsilon)))
    return sampled(dp_event.LaplaceDpEvent(1.0 / epsilon), sampling_rate)


def pure_event(epsilon: float) -> dp_event.DpEvent:
    """Event of any `epsilon`-DP release: randomized response, which dominates all of them (Kairouz et al. 2015)."""
    if epsilon > LARGEST_PURE:
        return dp_event.NonPrivateDpEvent()
    return dp_event.RandomizedResponseDpEvent(2.0 / (1.0 + math.exp(epsilon)), 2)


def sampled(event: dp_event.DpEvent, sampling_rate: float) -> dp_event.DpEvent:
    """`event` under Poisson sampling at `sampling_rate`; the event itself at rate 1."""
    return event if sampling_rate == 1 else dp_event.PoissonSampledDpEvent(sampling_rate, event)


def composed_epsilon(events: Iterable[tuple[dp_event.DpEvent, int]], delta: float, accountant: str = "pld") -> float:
    """Epsilon at `delta` of events composed the given numbers of times; `inf` if one of them is not private.

    delta = 0 asks for pure differential privacy. No accountant is involved then: the events' own pure epsilons add up,
    and one event that has none (Gaussian noise) makes the answer `inf`.

    Raises:
        PrivacyError: the accountant cannot handle one of the events.
    """
    merged: dict[str, int] = {}
    precision = 0.0  # Gaussian releases without sampling are together one Gaussian release
    for event, count in (_unfolded(event, count) for event, count in events):
        if isinstance(event, dp_event.GaussianDpEvent) and event.noise_multiplier > 0:
            precision += count / event.noise_multiplier**2
        elif count > 0 and not isinstance(event, dp_event.NoOpDpEvent):
            name = json.dumps(encode(event))
            merged[name] = merged.get(name, 0) + count
    if precision > 0 and not merged and 0 < delta < 1 and accountant == "pld":
        return gaussian_epsilon(math.sqrt(precision), delta)  # exact, in closed form
    if precision > 0:
        merged[json.dumps(encode(dp_event.GaussianDpEvent(precision**-0.5)))] = 1
    return _composed_epsilon(tuple(sorted(merged.items())), float(delta), accountant)


def quick_epsilon(events: Iterable[tuple[dp_event.DpEvent, int]], delta: float) -> float:
    """An epsilon for lower bounds, at a tenth of the cost of `composed_epsilon`.

    It is that of a grid ten times as coarse, which is at most 1e-3 of it too large, less a thousandth.
    """
    return (1 - _COARSE_ERROR) * composed_epsilon(events, delta, _COARSE)


def repeated(event: dp_event.DpEvent, count: int) -> dp_event.DpEvent:
    """`count` releases of one event as one event; the event itself for a single one."""
    return event if count == 1 else dp_event.SelfComposedDpEvent(event, count)


def _unfolded(event: dp_event.DpEvent, count: int) -> tuple[dp_event.DpEvent, int]:
    while isinstance(event, dp_event.SelfComposedDpEvent):
        event, count = event.event, count * event.count
    return event, count


@lru_cache(maxsize=4096)
def _composed_epsilon(events: tuple[tuple[str, int], ...], delta: float, accountant: str) -> float:
    if delta == 0:
        return sum(count * _pure_epsilon(decode(json.loads(name))) for name, count in events)
    decoded = [(decode(json.loads(name)), count) for name, count in events]
    if any(not is_private(event) for event, _ in decoded):
        return math.inf
    ledger = _accountant(accountant, [event for event, _ in decoded])
    for event, count in decoded:
        if not ledger.supports(event):
            raise PrivacyError(f"the {accountant} accountant cannot account for {event}; use accountant = 'pld'")
        with _quiet():
            ledger.compose(event, count)
    with _quiet():
        return float(ledger.get_epsilon(delta)) if events else 0.0


def is_private(event: dp_event.DpEvent) -> bool:
    """Whether any bound holds for an event: False for releases that are not private."""
    while hasattr(event, "event"):
        event = event.event
    return not isinstance(event, dp_event.NonPrivateDpEvent)


def _pure_epsilon(event: dp_event.DpEvent) -> float:
    """Epsilon of pure DP of one event; `inf` where there is none."""
    if isinstance(event, dp_event.NoOpDpEvent):
        return 0.0
    if isinstance(event, dp_event.RandomizedResponseDpEvent):
        flipped = event.noise_parameter / event.num_buckets
        return math.log1p(-event.noise_parameter + flipped) - math.log(flipped)
    if isinstance(event, dp_event.LaplaceDpEvent):
        return 1.0 / event.noise_multiplier
    if isinstance(event, dp_event.PoissonSampledDpEvent):
        inner = _pure_epsilon(event.event)
        return math.log1p(event.sampling_probability * math.expm1(inner)) if math.isfinite(inner) else math.inf
    return math.inf


@contextmanager
def _quiet() -> Iterator[None]:
    """dp_accounting logs every Renyi order that it leaves out; leaving some out is routine and safe."""
    before = absl.logging.get_verbosity()
    absl.logging.set_verbosity(absl.logging.ERROR)
    try:
        yield
    finally:
        absl.logging.set_verbosity(before)


def encode(event: dp_event.DpEvent) -> dict[str, Any]:
    """JSON form of an event, for the ledger and for messages."""
    name = type(event).__name__
    if name not in _FIELDS:
        raise ValueError(f"cannot store {name}")
    fields = {field: getattr(event, field) for field in _FIELDS[name]}
    return {"type": name} | {k: encode(v) if isinstance(v, dp_event.DpEvent) else v for k, v in fields.items()}


def decode(record: dict[str, Any]) -> dp_event.DpEvent:
    """Inverse of `encode`.

    Raises:
        ValueError: not the record of a known event.
    """
    fields = dict(record)
    name = fields.pop("type", None)
    if name not in _FIELDS or set(fields) != set(_FIELDS[name]):
        raise ValueError(f"not a stored privacy event: {record}")
    return getattr(dp_event, name)(**{k: decode(v) if isinstance(v, dict) else v for k, v in fields.items()})


_FIELDS: dict[str, tuple[str, ...]] = {
    "NoOpDpEvent": (),
    "NonPrivateDpEvent": (),
    "GaussianDpEvent": ("noise_multiplier",),
    "LaplaceDpEvent": ("noise_multiplier",),
    "RandomizedResponseDpEvent": ("noise_parameter", "num_buckets"),
    "PoissonSampledDpEvent": ("sampling_probability", "event"),
    "SelfComposedDpEvent": ("event", "count"),
}


def _check(*, delta: float, steps: int, sampling_rate: float, relation: str, accountant: str) -> None:
    if not 0 < delta < 1:
        raise ConfigError(f"delta must lie in (0, 1), got {delta}")
    if steps < 0 or int(steps) != steps:
        raise ConfigError(f"steps must be a whole number of at least 0, got {steps}")
    if not 0 < sampling_rate <= 1:
        raise ConfigError(f"sampling_rate must lie in (0, 1], got {sampling_rate}")
    if relation not in SENSITIVITY_FACTOR:
        raise ConfigError(f"unknown relation {relation!r}; known: {', '.join(SENSITIVITY_FACTOR)}")
    if accountant not in ACCOUNTANTS:
        raise ConfigError(f"unknown accountant {accountant!r}; known: {', '.join(ACCOUNTANTS)}")
