"""Detection of noise that returns permuted, reversed or with other signs, by its sorted absolute values."""

from __future__ import annotations

import numpy as np

from fedlgm_lab.audits.scores import Array

_FEWEST, _LARGEST, _SPREAD = 8, 16, 16  # numbers of a layer, at least; the largest and evenly spread ones that are kept
_EQUAL = 1e-4  # in units of the noise: more than rounding, far below what two draws differ by


def ordered(noise: Array, spans: dict[int, tuple[int, int]], layers: int) -> Array:
    """Sorted absolute values at fixed ranks, of every layer and of all noise, [K + 1, 32]; NaN where there are none.

    Args:
        noise: noise of a round.
        spans: layer -> its start and end in `noise`.
        layers: K.

    Example:
        >>> noise = np.random.default_rng(0).normal(size=50)
        >>> one, other = (ordered(each, {0: (0, 50)}, 1) for each in (noise, -noise[::-1]))
        >>> one.shape, bool((one == other).all())
        ((2, 32), True)
    """
    found = np.full((layers + 1, _LARGEST + _SPREAD), np.nan)
    parts = {j: noise[low:high] for j, (low, high) in spans.items()}
    for j, part in [*parts.items(), (layers, np.concatenate([np.zeros(0), *parts.values()]))]:
        if len(part) < _FEWEST:
            continue
        values = np.sort(np.abs(part))
        ranks = np.concatenate([np.arange(-_LARGEST, 0) + len(values), np.linspace(0, len(values) - 1, _SPREAD)])
        found[j] = values[ranks.clip(0).round().astype(int)]
    return found


def same_values(figures: Array) -> tuple[int, int, int] | None:
    """(layer, one round's index, the other's) of two rounds with the same values; None if there are none.

    Two independent draws of 8 numbers or more agree with a probability below 1e-20, so this takes no share of an
    audit's level.

    Args:
        figures: `ordered` of every round, [T, K + 1, ranks].

    Example:
        >>> draws = np.random.default_rng(0).normal(size=(3, 50))
        >>> rounds = [ordered(each, {0: (0, 50)}, 1) for each in (*draws, draws[1][::-1])]
        >>> same_values(np.stack(rounds)), same_values(np.stack(rounds[:3]))
        ((0, 1, 3), None)
    """
    for j in range(figures.shape[1]):
        known = np.flatnonzero(~np.isnan(figures[:, j]).any(axis=1)) if figures.shape[2] else np.zeros(0, dtype=int)
        known = known[np.argsort(figures[known, j, 0], kind="stable")] if len(known) else known
        rows = figures[known, j]
        for shift in range(1, len(known)):  # of rounds in the order of one value: equal ones are neighbours
            near = rows[shift:, 0] - rows[:-shift, 0] <= _EQUAL
            if not near.any():
                break
            equal = np.flatnonzero(near & (np.abs(rows[shift:] - rows[:-shift]) <= _EQUAL).all(axis=1))
            if len(equal):
                one, other = sorted((int(known[equal[0]]), int(known[equal[0] + shift])))
                return j, one, other
    return None
