"""Checks of a run's noise, which the auditor of canaries knows: its scale, independence, repetition and law.

Every statistic has an exact law for independent Gaussian noise of the planned scale: chi-square for a mean square, t
for the cosine of two vectors, binomial for the count of a cell.
"""

from __future__ import annotations

import math

import numpy as np
import scipy.special
import scipy.stats

from fedlgm.planning.layers import LayerTable
from fedlgm_lab.audits.level import Shares
from fedlgm_lab.audits.record import CanaryRecord
from fedlgm_lab.audits.result import Check
from fedlgm_lab.audits.scores import Array, Counts

_HEAD, _HEADS, _FEWEST = 256, 4096, 8  # first numbers that are compared: of a layer, of a round, and at least
_EDGES = np.array([1e-4, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0])  # of magnitudes; the first cell is for numbers without noise
_PLANNED = np.diff(scipy.stats.chi(1).cdf([0.0, *_EDGES, np.inf]))


def figures(noise: Array, spans: dict[int, tuple[int, int]], layers: int) -> dict[str, Array]:
    """Figures of a round's noise for the checks: mean squares, first numbers and counts in cells of each layer.

    Args:
        noise: noise of a round, in units of the plan's.
        spans: layer -> its start and end in `noise`.
        layers: number K of layers.
    """
    width = min(_HEAD, max(16, _HEADS // layers))
    energy, head = np.full(layers, np.nan), np.full((layers, width), np.nan)
    cells = np.zeros((layers, len(_PLANNED)))
    for j, (low, high) in spans.items():
        part = noise[low:high]
        energy[j], head[j, : len(part)] = np.mean(part**2), part[:width]
        cells[j] = np.bincount(np.searchsorted(_EDGES, np.abs(part)), minlength=len(_PLANNED))
    return {"energy": energy, "head": head, "cells": cells}


def shares_of(record: CanaryRecord, confidence: float, *, per_layer: bool = True) -> Shares:
    """Levels of an audit of a record. The number of statements depends only on rounds and layers.

    Args:
        record: the canaries' observations.
        confidence: confidence of the audit.
        per_layer: whether single layers are bounded.
    """
    rounds, layers = record.energy.shape
    heads = rounds * layers
    return Shares.of(
        confidence,
        layers,
        distances=int(np.ptp(record.round)),
        pairs=heads * (heads - 1) // 2,
        cells=(layers + 1) * len(_PLANNED),
        per_layer=per_layer,
    )


def noise_checks(record: CanaryRecord, layers: LayerTable, shares: Shares) -> tuple[Check, ...]:
    """Check that the noise has its planned scale in every layer and is independent, new and Gaussian."""
    return (
        _scale(record, layers, shares),
        _independence(record, layers, shares),
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


def _independence(record: CanaryRecord, layers: LayerTable, shares: Shares) -> Check:
    """Correlations of each layer's noise with itself some rounds later, over all rounds and layers together."""
    rounds = record.round.astype(int)
    sums, counts = np.zeros((2, int(np.ptp(rounds)) + 1))
    later, earlier = np.tril_indices(len(rounds), -1)
    distances = np.abs(rounds[later] - rounds[earlier])
    for j, size in enumerate(_compared(record, layers)):
        if size < _FEWEST:
            continue
        unit = _directions(record.head[:, j, :size])
        z = normal_quantile((unit @ unit.T)[later, earlier], size)
        seen = np.flatnonzero(~np.isnan(z))
        np.add.at(sums, distances[seen], z[seen])
        np.add.at(counts, distances[seen], 1)
    z = np.abs(sums) / np.sqrt(np.maximum(counts, 1))
    far = int(np.argmax(z))
    detail = f"largest correlation between rounds: {z[far]:.2f} standard errors, {far} rounds apart"
    return Check("noise independence", bool(z[far] <= _limit(shares.distance)), detail)


def _repetition(record: CanaryRecord, layers: LayerTable, shares: Shares) -> Check:
    """The most similar two of all layers' noise in all rounds."""
    sizes, (rounds, count) = _compared(record, layers), record.energy.shape
    most, where = (0.0, 0.0), "no two layers or rounds can be compared"
    for size in np.unique(sizes[sizes >= _FEWEST]):
        of = np.flatnonzero(sizes >= size)
        rows = np.stack([part.ravel() for part in np.indices((rounds, count))[:, :, of]], axis=1)  # (round, layer)
        unit = np.nan_to_num(_directions(record.head[:, of, :size].reshape(-1, size)))
        for own in np.array_split(np.flatnonzero(sizes[rows[:, 1]] == size), rounds):
            cosines = unit[own] @ unit.T
            cosines[np.arange(len(own)), own] = 0.0
            one, other = np.unravel_index(int(np.argmax(np.abs(cosines))), cosines.shape) if len(own) else (0, 0)
            value = float(cosines[one, other]) if len(own) else 0.0
            z = abs(float(normal_quantile(np.array(value), int(size))))
            if z > most[0]:
                pair = sorted((rows[own[one]], rows[other]), key=tuple)
                names = (f"{layers.names[j]} in round {int(record.round[t])}" for t, j in pair)
                most, where = (z, value), " and ".join(names)
    z, value = most
    detail = f"most similar: {where}, correlation {value:.4f} ({z:.2f} standard errors)"
    return Check("noise repetition", z <= _limit(shares.pair), detail)


def _law(record: CanaryRecord, layers: LayerTable, shares: Shares) -> Check:
    by_layer = record.cells.sum(axis=0)
    counts = np.concatenate([by_layer, by_layer.sum(axis=0, keepdims=True)])
    total = counts.sum(axis=1, keepdims=True)
    below = scipy.stats.binom.cdf(counts, total, _PLANNED)
    above = scipy.stats.binom.sf(counts - 1, total, _PLANNED)
    values = 2 * np.minimum(below, above)
    j, cell = np.unravel_index(int(np.argmin(values)), values.shape)
    low, high = [0.0, *_EDGES, np.inf][cell : cell + 2]
    detail = (
        f"least likely in {(*layers.names, 'all layers')[j]}: {counts[j, cell] / max(1.0, total[j, 0]):.3%} of it lies "
        f"between {low:g} and {high:g} standard deviations from 0, planned {_PLANNED[cell]:.3%}"
    )
    return Check("noise law", bool(values[j, cell] >= shares.cell), detail)


def _compared(record: CanaryRecord, layers: LayerTable) -> Counts:
    """Numbers of each layer that are compared, [K]."""
    return np.minimum(layers.sizes, record.head.shape[2])


def _directions(rows: Array) -> Array:
    return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-300)


def _limit(share: float) -> float:
    return float(scipy.stats.norm.isf(share / 2))


def normal_quantile(cosines: Array, size: int) -> Array:
    """Normal quantiles z of the p-values of cosines of independent Gaussian vectors; at most 37.

    Example:
        >>> np.round(normal_quantile(np.array([0.1, -0.1, 0.0]), 100), 2)
        array([ 0.99, -0.99,  0.  ])
    """
    value, freedom = np.clip(np.abs(cosines), 0.0, 1 - 1e-15), size - 1
    tail = scipy.special.stdtr(freedom, -value * np.sqrt(freedom / (1 - value**2)))
    return np.copysign(-scipy.special.ndtri(np.maximum(tail, 1e-300)), cosines)
