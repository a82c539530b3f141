"""Coefficients of banded Toeplitz strategies: the square root in closed form, and the optimum by
L-BFGS.

If the number of bands equals the number of rounds between participations, the sensitivity for k
participations is sqrt(k) times the coefficients' norm. The optimum then does not depend on the
schema, and one C can be used with minimum separation, fixed cycles and amplification.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import numpy as np
from scipy.optimize import minimize
from scipy.signal import lfilter

from fedlgm.noise.correlation.workloads import Workload

Reduce = Literal["mean", "max"]

_EXPLODED = 1e3  # the loss where the error exceeds the range of doubles


def square_root(workload: Workload, bands: int) -> np.ndarray:
    """First coefficients of the square root of the workload's matrix A, normalised, [bands].

    Before normalisation, the coefficients r_j for prefix sums are 1, 1/2, 3/8, 5/16, ...
    (Fichtenberger et al. 2022, arXiv 2202.11205). With momentum beta and decay alpha, coefficient j
    is sum_i r_i r_{j-i} alpha^i beta^{j-i} (Kalinin and Lampert 2024, arXiv 2405.13763, Theorem 1).
    """
    j = np.arange(bands)
    root = np.cumprod(np.concatenate([[1.0], (2 * j[1:] - 1) / (2 * j[1:])]))
    return _unit(np.convolve(root * workload.decay**j, root * workload.momentum**j)[:bands])


def optimal(workload: Workload, rounds: int, bands: int, reduce: Reduce) -> np.ndarray:
    """Normalised coefficients that minimise the product of norm and error, [bands].

    Args:
        workload: workload whose error is minimised.
        rounds: number T of rounds.
        bands: number of coefficients, at most T.
        reduce: "mean" minimises the root mean square of the outputs' errors, "max" the largest
            error.
    """
    start = square_root(workload, bands)
    if bands == 1:
        return start
    error_of = _toeplitz_loss(workload.column(rounds), reduce)

    def loss(c: np.ndarray) -> tuple[float, np.ndarray]:
        with np.errstate(over="ignore", invalid="ignore"):
            error, gradient = error_of(c)
        norm = c @ c
        # If C^-1 overflows, the line search takes a shorter step.
        if not (np.isfinite(error) and np.isfinite(gradient).all()):
            return _EXPLODED, np.zeros_like(c)
        return np.log(error * norm), gradient / error + 2 * c / norm

    options = {"maxiter": 2000, "maxfun": 4000, "ftol": 1e-15, "gtol": 1e-11, "maxcor": 20}
    # The loss does not depend on the scale of c. The optimiser's first step has length 1, which is
    # small for a start of length 100.
    return _unit(minimize(loss, 100 * start, jac=True, method="L-BFGS-B", options=options).x)


def _unit(c: np.ndarray) -> np.ndarray:
    return c / np.linalg.norm(c)


def _backward(c: np.ndarray, gradient: np.ndarray, output: np.ndarray) -> np.ndarray:
    """Gradient with respect to c of a function of output = C^-1 a, given the gradient with respect
    to the output.
    """
    solved = lfilter([1.0], c, gradient[::-1])[::-1]  # times C^-T
    return -np.array([solved[j:] @ output[: output.size - j] for j in range(c.size)])


def output_weights(rounds: int, reduce: Reduce) -> np.ndarray:
    """Weights [T] of a Toeplitz matrix's squared coefficients in the mean (or the largest) squared
    norm of its rows.
    """
    return np.ones(rounds) if reduce == "max" else (rounds - np.arange(rounds)) / rounds


def _toeplitz_loss(
    column: np.ndarray, reduce: Reduce
) -> Callable[[np.ndarray], tuple[float, np.ndarray]]:
    """A function that computes the mean (or largest, which is the last) squared error of a Toeplitz
    workload, and the gradient, in O(T b).
    """
    weights = output_weights(column.size, reduce)

    def loss(c: np.ndarray) -> tuple[float, np.ndarray]:
        output = lfilter([1.0], c, column)
        return float(weights @ output**2), _backward(c, 2 * weights * output, output)

    return loss
