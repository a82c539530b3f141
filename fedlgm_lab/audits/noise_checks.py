"""Checks of a run's noise from the canaries' observations: scale, independence, repetition, law."""

from __future__ import annotations

import math

import numpy as np
import scipy.stats

from fedlgm.planning.layers import LayerTable
from fedlgm_lab.audits.correlations import correlations
from fedlgm_lab.audits.law import STATISTICS, described, least_likely
from fedlgm_lab.audits.level import Shares
from fedlgm_lab.audits.order import same_values
from fedlgm_lab.audits.record import CanaryRecord
from fedlgm_lab.audits.repeats import compared, most_alike
from fedlgm_lab.audits.result import Check


def shares_of(record: CanaryRecord, confidence: float, *, kept: int = 1, per_layer: bool = True) -> Shares:
    """Levels of an audit of a record. The number of statements depends only on rounds, layers and sizes.

    Args:
        record: the canaries' observations.
        confidence: confidence of the audit.
        kept: vectors that a round's noise leaves behind (see `whitening.kept`).
        per_layer: whether single layers are bounded.
    """
    rounds, layers = record.energy.shape
    return Shares.of(
        confidence,
        layers,
        rounds * correlations(layers, kept),
        pairs=compared(layers, rounds),
        places=int(record.found[:, 2].sum()),
        cells=(layers + 1) * STATISTICS,
        per_layer=per_layer,
    )


def noise_checks(record: CanaryRecord, layers: LayerTable, shares: Shares) -> tuple[Check, ...]:
    """Check that the noise has its planned scale in every layer and is independent, new and Gaussian.

    The mean square has a chi-square law, a correlation a t law and the count of a cell a binomial law. All are exact
    for independent Gaussian noise.
    """
    z, value = _largest(record.correlation)
    return (
        _scale(record, layers, shares),
        Check(
            "noise independence",
            bool(z <= _limit(shares.correlation)),
            f"largest correlation over rounds or layers {value:.4f} ({z:.2f} standard errors)",
        ),
        _repetition(record, layers, shares),
        _law(record, layers, shares),
    )


def _scale(record: CanaryRecord, layers: LayerTable, shares: Shares) -> Check:
    energy, sizes = record.energy, layers.sizes
    least, worst = math.inf, "no layer: no round's noise was seen as a whole"
    for j in range(len(layers)):
        seen = energy[~np.isnan(energy[:, j]), j]
        if len(seen) == 0:
            continue
        freedom = len(seen) * int(sizes[j])
        measured = float(seen.mean())
        limit = float(scipy.stats.chi2.ppf(shares.scale, freedom)) / freedom
        if measured / limit < least:
            least = measured / limit
            worst = f"{layers.names[j]}: {math.sqrt(measured):.4f} of the planned standard deviation"
    return Check("noise scale", least >= 1, f"least in {worst}")


def _repetition(record: CanaryRecord, layers: LayerTable, shares: Shares) -> Check:
    z, value, (layer, one, other) = most_alike(record.sketch)
    rounds = record.round.astype(int)
    if z > _limit(shares.alike):
        seen = f"{layers.names[layer]}: rounds {rounds[one]} and {rounds[other]}"
        return Check("noise repetition", False, f"{seen} have a correlation of {value:.4f} ({z:.2f} standard errors)")
    moved, cosine, _ = _largest(record.found)
    if moved > _limit(shares.found):
        at = rounds[int(np.argmax(record.found[:, 0]))]
        where = f"the noise of round {at} repeats earlier noise in another place"
        return Check("noise repetition", False, f"{where}: correlation {cosine:.4f} ({moved:.2f} standard errors)")
    again = same_values(record.ordered)
    if again is not None:
        layer, one, other = again
        where = "all layers" if layer == len(layers) else layers.names[layer]
        seen = f"rounds {rounds[one]} and {rounds[other]} have the same values, in another order or with other signs"
        return Check("noise repetition", False, f"{where}: {seen}")
    return Check("noise repetition", True, f"rounds and layers differ: at most {max(z, moved):.2f} standard errors")


def _law(record: CanaryRecord, layers: LayerTable, shares: Shares) -> Check:
    by_layer = record.cells.sum(axis=0)
    counts = np.concatenate([by_layer, by_layer.sum(axis=0, keepdims=True)])
    values = [(*least_likely(row), j) for j, row in enumerate(counts) if row.sum()]
    if not values:
        return Check("noise law", True, "no round's noise was seen as a whole")
    least, number, j = min(values)
    name = (*layers.names, "all layers")[j]
    return Check("noise law", least >= shares.cell, f"least likely in {name}: {described(counts[j], number)}")


def _largest(rows: np.ndarray) -> np.ndarray:
    """The round's row [n] of the most significant z, which comes first in each row [T, n]."""
    return rows[int(np.argmax(rows[:, 0]))]


def _limit(share: float) -> float:
    return float(scipy.stats.norm.isf(share / 2))


def cancelled_by(record: CanaryRecord, shares: Shares) -> float:
    """Factor by which an observer of the earlier noise can reduce noise that is correlated with it.

    The factor exceeds 1 only if the check of the noise's independence or repetition fails, so it takes no share of the
    level.
    """
    seen = (
        (*_largest(record.correlation), shares.correlation),
        (*most_alike(record.sketch)[:2], shares.alike),
        (*_largest(record.found)[:2], shares.found),
    )
    return max(_cancelled(float(z), float(value), _limit(share)) for z, value, share in seen)


def _cancelled(z: float, value: float, limit: float) -> float:
    if z <= limit or value == 0:
        return 1.0
    certain = math.tanh(abs(math.atanh(min(abs(value), 1 - 1e-15))) * (1 - limit / z))
    return 1.0 / math.sqrt(max(1 - certain**2, 1e-12))
