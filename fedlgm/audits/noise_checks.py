"""Checks of the noise of a run itself, from what its canaries saw: its scale in every layer, and its independence."""

from __future__ import annotations

import math

import numpy as np
import scipy.stats

from fedlgm.audits.level import Shares
from fedlgm.audits.record import CanaryRecord
from fedlgm.audits.result import Check
from fedlgm.layers import LayerTable


def noise_checks(record: CanaryRecord, layers: LayerTable, shares: Shares) -> tuple[Check, ...]:
    """Whether the noise is as large as planned in every layer, and independent over layers and rounds.

    The mean square has a chi-square law and a correlation a t law, both exact for independent Gaussian noise.
    """
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
    z, value = _most_correlated(record)
    return (
        Check("noise scale", least >= 1, f"least in {worst}"),
        Check(
            "noise independence",
            bool(z <= _correlation_limit(shares)),
            f"largest correlation over rounds or layers {value:.4f} ({z:.2f} standard errors)",
        ),
    )


def _most_correlated(record: CanaryRecord) -> np.ndarray:
    """(z, correlation) of the most conspicuous correlation of all rounds."""
    return np.asarray(record.correlation[int(np.argmax(record.correlation[:, 0]))])


def _correlation_limit(shares: Shares) -> float:
    return float(scipy.stats.norm.isf(shares.correlation / 2))


def cancelled_by(record: CanaryRecord, shares: Shares) -> float:
    """By how much correlated noise can be made smaller by whoever sees the noise that it is correlated with.

    Above 1 only where the check of the noise's independence fails, so it takes no share of the level.
    """
    z, value = _most_correlated(record)
    limit = _correlation_limit(shares)
    if z <= limit or value == 0:
        return 1.0
    certain = math.tanh(abs(math.atanh(min(abs(value), 1 - 1e-15))) * (1 - limit / z))
    return 1.0 / math.sqrt(max(1 - certain**2, 1e-12))
