"""Buffered linear Toeplitz strategies: c_0 = 1, c_j = sum_i scale_i decay_i^(j-1), with a few
buffers as state.

Source: Dvijotham et al. 2024 (arXiv 2404.16706); McMahan, Xu and Zhang 2024 (arXiv 2408.08868).
If the scales sum to at most 1 and the decays are at most 1, the coefficients do not increase. The
pattern with the earliest possible participations then determines the sensitivity.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import minimize
from scipy.signal import lfilter
from scipy.special import expit

from fedlgm.noise.correlation.sensitivities import earliest_pattern
from fedlgm.noise.correlation.toeplitz import Reduce, output_weights
from fedlgm.noise.correlation.workloads import Workload

# (largest decay, sum of scales) at the starting points of the optimiser
_STARTS = ((0.5, 0.6), (0.9, 0.6), (0.98, 0.35))
_LEAST = 2.0**-1000


def coefficients(decays: np.ndarray, scales: np.ndarray, rounds: int) -> np.ndarray:
    """The coefficients c_0 .. c_{T-1} for T = `rounds`, float64 [T]."""
    powers = decays ** np.arange(rounds - 1)[:, None]
    rest = np.minimum.accumulate(powers @ scales)  # coefficients must not increase through rounding
    return np.concatenate([[1.0], rest])


def optimal(
    workload: Workload, rounds: int, buffers: int, separation: int, most: int, reduce: Reduce
) -> tuple[np.ndarray, np.ndarray]:
    """Decays and scales that minimise sensitivity times error, each [buffers], the largest decay
    first.

    Args:
        workload: workload whose error is minimised.
        rounds: number T of rounds.
        buffers: number of buffers, at least 1. Under minimum separation a second buffer lowers the
            error by about one per cent, and a third buffer lowers it no further.
        separation: smallest number of rounds from one participation of a client to the next.
        most: largest number of participations of a client.
        reduce: whether the "mean" or the "max" of the outputs' errors is minimised.
    """
    column = workload.column(rounds)
    weights = output_weights(rounds, reduce)
    lags = np.arange(rounds - 1)

    def loss(x: np.ndarray) -> tuple[float, np.ndarray]:
        decays, (scales, jacobian) = expit(x[:buffers]), _scales(x[buffers:])
        numerator, denominator = _filter(decays, scales)
        output = lfilter(denominator, numerator, column)
        error = float(weights @ output**2)
        # C^-T times the gradient
        back = lfilter(denominator, numerator, (2 * weights * output)[::-1])[::-1]
        powers = decays ** lags[:, None]
        c = np.concatenate([[1.0], powers @ scales])
        pattern = earliest_pattern(c, rounds, separation, most)
        norm = float(pattern @ pattern)
        pulled = np.zeros(rounds)  # gradient of the norm with respect to c
        for start in range(0, min(rounds, most * separation), separation):
            pulled[: rounds - start] += 2 * pattern[start:]
        slope = np.zeros_like(x)
        for i, (decay, scale) in enumerate(zip(decays, scales, strict=True)):
            shifted = lfilter([0.0, 1.0], [1.0, -decay], output)
            twice = lfilter([0.0, 1.0], [1.0, -decay], shifted)
            # The derivative of c_j with respect to decay_i is scale_i (j - 1) decay_i^(j-2), which
            # is a second pass of the same filter.
            by_decay = scale * lags[1:] * powers[:-1, i]
            slope[i] = -scale * (back @ twice) / error + (pulled[2:] @ by_decay) / norm
            slope[buffers + i] = -(back @ shifted) / error + (pulled[1:] @ powers[:, i]) / norm
        slope[:buffers] *= decays * (1 - decays)
        slope[buffers:] = jacobian @ slope[buffers:]
        return float(np.log(error) + np.log(norm)), slope

    options = {"maxiter": 3000, "maxfun": 6000, "ftol": 1e-15, "gtol": 1e-8, "maxcor": 20}
    best = None
    for decay, total in _STARTS:
        slow = np.log(decay / (1 - decay)) - 2.5 * np.arange(buffers)
        split = np.full(buffers, np.log(total / (1 - total) / buffers))
        result = minimize(
            loss, np.concatenate([slow, split]), jac=True, method="L-BFGS-B", options=options
        )
        if best is None or result.fun < best.fun - 1e-12:
            best = result
    assert best is not None
    decays, (scales, _) = expit(best.x[:buffers]), _scales(best.x[buffers:])
    # The scales of buffers that the optimum does not need end at the limit of the range of doubles.
    decays, scales = np.clip(decays, _LEAST, 1 - 2.0**-53), np.maximum(scales, _LEAST)
    order = np.argsort(-decays)
    return decays[order], scales[order]


def _scales(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Positive scales with a sum below 1, and their symmetric Jacobian. The scales are a softmax
    with one further, constant entry.
    """
    largest = max(0.0, float(x.max()))
    raw = np.exp(x - largest)
    scales = raw / (np.exp(-largest) + raw.sum())
    return scales, np.diag(scales) - np.outer(scales, scales)


def _filter(decays: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Coefficients of C as a rational filter, in powers of the delay: numerator and denominator,
    each [buffers + 1].
    """
    denominator = np.poly(decays)
    numerator = denominator.copy()
    for i, scale in enumerate(scales):
        numerator[1:] += scale * np.poly(np.delete(decays, i))
    return numerator, denominator
