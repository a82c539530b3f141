"""Checks of the scale, independence, repetition and law of a run's noise, which an auditor who
knows the canaries can compute.

Every statistic has an exact law for independent Gaussian noise of the planned scale: chi-square for
a sum of squares, t for the cosine of two vectors, binomial for the count of a cell.
"""

from __future__ import annotations

import numpy as np
import scipy.special
import scipy.stats

from fedlgm.planning.layers import LayerTable
from fedlgm_lab.audits.level import Shares
from fedlgm_lab.audits.record import CanaryRecord
from fedlgm_lab.audits.result import Check
from fedlgm_lab.audits.scores import Array

# limits on the number of leading values that are compared: most per layer, most per round, least
# per pair of layers
_HEAD, _HEADS, _FEWEST = 256, 4096, 8
# edges of the cells in which magnitudes are counted; numbers without noise fall into the first cell
_EDGES = np.array([1e-4, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0])
_PLANNED = np.diff(scipy.stats.chi(1).cdf([0.0, *_EDGES, np.inf]))


def figures(noise: Array, spans: dict[int, tuple[int, int]], layers: int) -> dict[str, Array]:
    """Compute the figures of a round's noise for the checks: each layer's mean square, leading
    numbers and counts by cell of magnitude.

    Args:
        noise: noise of a round, in units of the plan's noise.
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
    """Divide the level of an audit of a record.

    The number of statements depends only on the numbers of rounds and layers.

    Args:
        record: the canaries' observations.
        confidence: confidence of the audit.
        per_layer: whether bounds on single layers are computed.
    """
    rounds, layers = record.energy.shape
    heads = rounds * layers
    pairs, cells = heads * (heads - 1) // 2, (layers + 1) * len(_PLANNED)
    return Shares.of(
        confidence, layers, distances=rounds - 1, pairs=pairs, cells=cells, per_layer=per_layer
    )


def noise_checks(record: CanaryRecord, layers: LayerTable, shares: Shares) -> tuple[Check, ...]:
    """Check that the noise has its planned scale in every layer, is independent over rounds, does
    not repeat earlier noise and is Gaussian.
    """
    apart, most, pair = similar(record.head)
    far = int(np.argmax(apart))
    first, second = (f"{layers.names[j]} in round {int(record.round[t])}" for t, j in pair)
    return (
        _scale(record, layers, shares),
        Check(
            "noise independence",
            bool(apart[far] <= _limit(shares.distance)),
            f"largest correlation of rounds: {apart[far]:.2f} standard errors, {far} rounds apart",
        ),
        Check(
            "noise repetition",
            most <= _limit(shares.pair),
            f"most similar: {first} and {second}, by {most:.2f} standard errors",
        ),
        _law(record, layers, shares),
    )


def similar(heads: Array) -> tuple[Array, float, tuple[tuple[int, int], tuple[int, int]]]:
    """Compute the significance |z| of the correlation between rounds at each distance, [T], and
    find the two layers whose noise is most similar.

    Two layers are compared in the leading numbers that both layers have, if there are at least
    eight such numbers. The correlation at a distance combines the correlations of each layer's
    noise with the same layer's noise that many rounds earlier.

    Args:
        heads: leading numbers of each layer's noise in each round, [T, K, width]; NaN beyond the
            layer's end and where nothing was observed.

    Returns:
        The significances, the largest significance of any two layers, and (round, layer) of these
        two layers.

    Example:
        >>> noise = np.random.default_rng(0).normal(size=(3, 1, 100))
        >>> noise[2] = noise[0]
        >>> apart, most, pair = similar(noise)
        >>> np.round(apart), round(most), pair
        (array([ 0.,  1., 37.]), 37, ((0, 0), (2, 0)))
    """
    rounds, layers, width = heads.shape
    mask = (~np.isnan(heads)).reshape(-1, width).astype(np.float64)
    rows, counts, each = (
        np.nan_to_num(heads).reshape(-1, width),
        mask.sum(axis=1),
        np.arange(layers),
    )
    sums, times = np.zeros((2, rounds))
    highest, most, pair = 0.0, 0.0, ((0, 0), (0, 0))
    for t in range(rounds):
        new, all_ = slice(t * layers, (t + 1) * layers), slice((t + 1) * layers)
        squares = (rows[new] ** 2 @ mask[all_].T) * (mask[new] @ rows[all_].T ** 2)
        cosines = np.clip(
            rows[new] @ rows[all_].T / np.sqrt(np.maximum(squares, 1e-300)), 1e-15 - 1, 1 - 1e-15
        )
        sizes = np.minimum.outer(counts[new], counts[all_])
        cosines[sizes < _FEWEST] = 0.0
        cosines[each, new.start + each] = 0.0  # a layer is not compared with itself
        same_layer = each, each + layers * np.arange(t, -1, -1)[:, None]  # now, one round ago, ...
        sums[: t + 1] += normal_quantile(cosines[same_layer], sizes[same_layer]).sum(axis=1)
        times[: t + 1] += np.sum(sizes[same_layer] >= _FEWEST, axis=1)
        ranks = np.abs(np.arctanh(cosines)) * np.sqrt(sizes)  # approximates |z| quickly
        j, at = np.unravel_index(int(np.argmax(ranks)), ranks.shape)
        if ranks[j, at] > highest:
            highest, most = (
                float(ranks[j, at]),
                float(abs(normal_quantile(cosines[j, at], sizes[j, at]))),
            )
            pair = (int(at) // layers, int(at) % layers), (t, int(j))
    return np.abs(sums) / np.sqrt(np.maximum(times, 1)), most, pair


def normal_quantile(cosines: Array, sizes: Array) -> Array:
    """Convert cosines of independent Gaussian vectors into normal quantiles z, of magnitude at most
    38.
    """
    freedom = np.maximum(sizes - 1, 1)
    tail = scipy.special.stdtr(freedom, -np.abs(cosines) * np.sqrt(freedom / (1 - cosines**2)))
    return np.copysign(scipy.special.ndtri(np.maximum(tail, 1e-300)), cosines)


def _scale(record: CanaryRecord, layers: LayerTable, shares: Shares) -> Check:
    freedom = np.sum(~np.isnan(record.energy), axis=0) * layers.sizes
    squares = np.nansum(record.energy, axis=0) * layers.sizes
    chance = np.where(freedom > 0, scipy.stats.chi2.cdf(squares, np.maximum(freedom, 1)), 1.0)
    j = int(np.argmin(chance))
    scale = float(np.sqrt(squares[j] / max(int(freedom[j]), 1)))
    detail = f"least in {layers.names[j]}: {scale:.4f} of the planned standard deviation"
    if freedom[j] == 0:
        detail = "no round's noise was seen as a whole"
    return Check("noise scale", bool(chance[j] >= shares.scale), detail)


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
        f"least likely in {(*layers.names, 'all layers')[j]}: "
        f"{counts[j, cell] / max(1.0, total[j, 0]):.3%} of its noise lies between {low:g} and {high:g} "
        f"standard deviations from 0, planned {_PLANNED[cell]:.3%}"
    )
    return Check("noise law", bool(values[j, cell] >= shares.cell), detail)


def _limit(share: float) -> float:
    return float(scipy.stats.norm.isf(share / 2))
