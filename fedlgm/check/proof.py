"""Computation of the epsilon that is proven for a run, from its settings and the verdicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedlgm import privacy
from fedlgm.check.settings import LEAST_NOISE, MOST_NOISE, Settings
from fedlgm.check.verdict import Verdict
from fedlgm.privacy.guarantee import Relation

_ROUNDING = 1 - 1e-12  # factor that allows for rounding errors of a noise multiplier
_LARGEST_LOSS = 2e6  # largest number of samples over their squared noise that a grid can hold
_LARGEST_PURE = 30.0  # sum of Laplace releases' epsilons above which no other figure is computed
_MOST_STEPS = 100  # units of a group; `AttackRates.of_units` makes one step for each unit


@dataclass(frozen=True)
class Proof:
    """Upper bounds that are proven for one unit, or one person, of a run.

    Attributes:
        epsilon: proven epsilon at the stated delta; None if no epsilon is proven, infinite if there
            is too little noise.
        relation: neighbouring relation of the figures.
        rates: upper bounds on the success of attacks; None if no bounds are proven.

    Example:
        >>> Proof(1.0, "add-remove", None).epsilon
        1.0
    """

    epsilon: float | None
    relation: Relation
    rates: privacy.AttackRates | None


def prove(settings: Settings, verdicts: Sequence[Verdict]) -> Proof:
    """Compute the figures that are proven for a run.

    Sampling lowers the figures only if every verdict allows it. Otherwise the figures are those of
    `participation_count` releases of the Gaussian or Laplace mechanism without sampling, because
    one unit takes part in at most so many releases, whatever the schedule. By joint convexity, a
    bound that holds for every schedule also holds for a random schedule.

    Args:
        settings: the run.
        verdicts: verdicts on the run's assumptions, whose effects are combined.

    Example:
        >>> run = Settings(noise_multiplier=1.0, sampler="shuffle", epochs=1, delta=1e-5)
        >>> proof = prove(run, [Verdict("broken", "", scheduled=True)])
        >>> round(proof.epsilon, 3), proof.relation  # one Gaussian release
        (4.377, 'zero-out')
    """
    scheduled = any(verdict.scheduled for verdict in verdicts)
    relation: Relation = "zero-out" if scheduled else settings.relation or "add-remove"
    if settings.relation == "replace-one":
        relation = "replace-one"
    multiplier, times, units = _effects(settings, verdicts)
    # Without amplification, the contributions of a group's units add up. With Poisson sampling, the
    # group property of the privacy profile covers a group.
    count = (settings.participation_count or 0) * times
    candidates = [_figures(settings, multiplier / units, 1.0, count, 1)]
    count = (settings.releases or 0) * times
    fits = multiplier == 0 or count <= _LARGEST_LOSS * min(1, multiplier) ** 2
    amplified = settings.sampler == "poisson" and not scheduled
    if amplified and settings.rate is not None and units <= _MOST_STEPS and fits:
        candidates.append(_figures(settings, multiplier, settings.rate, count, units))
    proofs = [pair for pair in candidates if pair is not None]
    if not proofs or not all(verdict.bound for verdict in verdicts):
        return Proof(None, relation, None)
    epsilon, rates = min(proofs, key=lambda pair: pair[0])
    if not math.isfinite(epsilon):
        return Proof(math.inf, relation, None)
    return Proof(None if settings.delta is None else epsilon, relation, rates)


def _effects(settings: Settings, verdicts: Sequence[Verdict]) -> tuple[float, int, int]:
    """Combine the effects of all verdicts: return the noise multiplier, the number of repetitions
    of all releases, and the number of units in a group.
    """
    multiplier = (settings.noise_multiplier or 0.0) * _ROUNDING
    multiplier *= math.prod(verdict.factor for verdict in verdicts)
    times = math.prod(verdict.times for verdict in verdicts)
    return multiplier, times, math.prod(verdict.units for verdict in verdicts)


def _figures(
    settings: Settings, multiplier: float, rate: float, count: int, units: int
) -> tuple[float, privacy.AttackRates | None] | None:
    """Return epsilon and attack rates of `count` releases; epsilon is infinite if there is too
    little noise. Return None if a setting is missing.
    """
    from fedlgm.privacy.accounting import composed_epsilon
    from fedlgm.privacy.attackers import AttackRates, attack_rates
    from fedlgm.privacy.events import gaussian_event, laplace_event

    if not settings.noise_multiplier or count == 0:
        return None
    if multiplier < LEAST_NOISE:
        return math.inf, None
    multiplier = min(multiplier, MOST_NOISE)
    if settings.mechanism == "laplace":
        pure = count * units / multiplier * (1 + 1e-12)  # without amplification
        if pure > _LARGEST_PURE:
            fits = pure < 700  # the exponential is then finite
            rates = AttackRates(np.array([pure]), np.array([0.0])) if fits else None
            return pure if fits else math.inf, rates
        event = laplace_event(1 / multiplier, rate)
    else:
        event = gaussian_event(multiplier, rate)
    rates = attack_rates(event, steps=count).of_units(units)
    if settings.delta is None:
        return rates.advantage, rates  # the candidates are compared by the advantage
    if units > 1:
        return group_epsilon(rates, units, settings.delta), rates
    return composed_epsilon([(event, count)], settings.delta), rates


def group_epsilon(rates: privacy.AttackRates, units: int, delta: float) -> float:
    """Compute the epsilon of a group of `units` units at `delta` from the privacy profile of one
    unit.

    If (e, d) holds for one unit, (k e, d (1 + exp(e) + ... + exp((k - 1) e))) holds for a group of
    k units (Vadhan 2017, lemma 2.2). The result is the smallest epsilon over the points of the
    profile, or infinite.

    Example:
        >>> from fedlgm.privacy import attack_rates, epsilon
        >>> rates = attack_rates(4.0)
        >>> 2 * epsilon(4.0, 1e-5, steps=1) < group_epsilon(rates, 2, 1e-5)
        True
    """
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        growth = np.expm1(units * rates.epsilons) / np.expm1(rates.epsilons)
        growth = np.where(rates.epsilons > 0, growth, units)
        fits = rates.deltas * growth <= delta * (1 - 1e-9)
    return float(units * rates.epsilons[fits].min()) if fits.any() else math.inf
