"""LM-DP-SGD: every layer of an example's gradient is scaled to a share w_l of its clipped length.

    g_hat_il = w_l min(C, ||g_i||) g_il / ||g_il||,   sum_l w_l^2 = 1

For fixed weights one example moves the sum by at most C. The paper takes the weights from the batch
itself, so an example also changes every other example's contribution, and the sum moves by up to C
sqrt(B^2 + (B + 1)^2). The variant `published` is therefore not private. The sound variant takes the
weights from public data, from past releases, or from the noisy answer to a charged query.
`fedlgm.mechanisms.risk_aware` makes the plans; this module contains the formulas.

Source: LM-DP-SGD paper, equation 1, Algorithm 1 and Appendix D.2. docs/guarantees.md explains why
the published form is not private.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from fedlgm.checks import check_at_least_one, check_fraction, check_positive
from fedlgm.errors import ConfigError
from fedlgm.training.example_level.scaling import Reweighted, check_bounds

__all__ = ["aggregate", "bias_minimising_weights", "published_weights", "risk_weights"]

Root = Literal["least", "greatest"]
"""Choice between the least and the greatest root of the equation for the multiplier in Appendix
D.2.
"""
FLOOR = 0.05
"""Least weight of a layer as a share of 1 / sqrt(K). This limit ensures that every layer is
trained; privacy does not need it.
"""


def aggregate(
    grads: Sequence[Tensor],
    clip: float,
    error_rates: Sequence[float] | np.ndarray | None = None,
    emphasis: float = 1.0,
    weights: Sequence[float] | np.ndarray | Tensor | None = None,
) -> list[Tensor]:
    """Sum the reweighted, clipped gradients of a batch. No noise is added.

    If `weights` do not depend on the batch, adding or removing one example changes the concatenated
    sum by at most `clip` in l2 norm (times ||weights||_2). With `weights=None` the weights come
    from the batch, as published. The change is then bounded only by clip * sqrt(B^2 + (B + 1)^2),
    and noise of scale clip * sigma does not make the sum private.

    Args:
        grads: one tensor [B, d_l] per layer, l = 1 .. L; B may be 0.
        clip: C > 0.
        error_rates: error rate ER_l in [0, 0.5] of the membership adversary of each layer. None
            gives all layers the same rate.
        emphasis: r >= 1, exponent of the error rates.
        weights: w_l >= 0 with sum_l w_l^2 = 1; None stands for the published rule. If weights are
            given, the error rates are not used.

    Returns:
        One tensor [d_l] per layer. An example with NaN or Inf counts as zero.

    Raises:
        ConfigError: arguments are out of range or of different sizes.

    >>> ones = [torch.ones(2, 3), torch.ones(2, 1)]
    >>> tuple(round(float(part.norm()), 4) for part in aggregate(ones, 1.0, weights=(0.6, 0.8)))
    (1.2, 1.6)
    """
    if not grads or any(g.dim() != 2 or len(g) != len(grads[0]) for g in grads):
        raise ConfigError(
            "grads must be one tensor [B, d] per layer, all with the same number of examples"
        )
    check_positive(clip=clip)
    check_bounds([clip])
    rates = check_risk(error_rates, emphasis, len(grads))
    norms = torch.stack([torch.linalg.vector_norm(g.double(), dim=1) for g in grads], dim=1)
    counted = torch.isfinite(norms).all(dim=1)
    norms = torch.where(counted[:, None], norms, 0.0)
    if weights is None:
        w = published_weights(norms[counted].cpu().numpy(), clip, rates, emphasis)
    else:
        w = np.asarray(
            weights.detach().cpu() if isinstance(weights, Tensor) else weights, dtype=np.float64
        )
    if w.shape != (len(grads),):
        raise ConfigError(f"{w.size} layer weights for {len(grads)} layers")
    factors = Reweighted(float(clip), tuple(w.tolist())).factors(norms)
    return [
        (torch.where(counted[:, None], g, 0.0) * factors[:, j : j + 1].to(g)).sum(0)
        for j, g in enumerate(grads)
    ]


def check_risk(
    error_rates: Sequence[float] | np.ndarray | None, emphasis: float, layers: int
) -> np.ndarray:
    """Check the error rates and return them as float64 [L]; return ones if no rates are given.

    Args:
        error_rates: error rate ER_l of the membership adversary of each layer, or None.
        emphasis: r, the exponent of the error rates.
        layers: number L of layers.

    Raises:
        ConfigError: a rate is outside [0, 0.5] (worse than a coin toss) although not all rates are
            1 (no adversaries), r < 1, or the number of layers is wrong.

    Example:
        >>> check_risk([0.5, 0.25], emphasis=2.0, layers=2).tolist(), check_risk(None, 1.0, layers=2).tolist()
        ([0.5, 0.25], [1.0, 1.0])
    """
    check_at_least_one(emphasis=emphasis)
    if error_rates is None:
        return np.ones(layers)
    rates = np.asarray(error_rates, dtype=np.float64)
    if rates.shape != (layers,):
        raise ConfigError(f"{rates.size} error rates for {layers} layers")
    if np.all(rates == 1.0):
        return rates  # there are no adversaries, so all rates are equal
    if not ((rates >= 0) & (rates <= 0.5)).all():
        raise ConfigError(
            f"error rates must lie in [0, 0.5], where 0.5 is a coin toss, got {rates.tolist()}"
        )
    return rates


def published_weights(
    norms: np.ndarray,
    clip: float,
    error_rates: Sequence[float] | np.ndarray | None = None,
    emphasis: float = 1.0,
) -> np.ndarray:
    """Compute the weights of Algorithm 1, lines 8 to 10, from the unprotected layer norms [B, L] of
    the batch. NOT PRIVATE.

    w_l is proportional to mean_i(||g_il|| / min(C, ||g_i||)) ER_l^r; float64 [L] with sum_l w_l^2 =
    1.

    Raises:
        ConfigError: the bound, an error rate or r is out of range, or the number of rates differs
            from the number of layers.

    Example:
        >>> published_weights(np.array([[3.0, 4.0], [0.3, 0.4]]), clip=1.0).round(4).tolist()
        [0.6, 0.8]
    """
    check_positive(clip=clip)
    rates = check_risk(error_rates, emphasis, norms.shape[1])
    lengths = np.linalg.norm(norms, axis=1)
    nonzero = lengths > 0
    if not nonzero.any():
        return np.full(norms.shape[1], 1 / math.sqrt(norms.shape[1]))
    means = (norms[nonzero] / np.minimum(clip, lengths[nonzero])[:, None]).sum(0) / len(norms)
    return as_weights(means * rates**emphasis)


def risk_weights(
    strengths: np.ndarray,
    error_rates: Sequence[float] | np.ndarray | None = None,
    emphasis: float = 1.0,
    floor: float = FLOOR,
) -> np.ndarray:
    """Compute weights from public, released or noisy strengths of the layers, float64 [L] with
    sum_l w_l^2 = 1.

    w_l is proportional to strength_l ER_l^r. Before the last normalisation, no weight is below
    floor / sqrt(L).

    Args:
        strengths: size of each layer's gradients, [L]; negative strengths (from noise) count as 0.
        error_rates: error rate ER_l in [0, 0.5] of the membership adversary of each layer.
        emphasis: exponent r >= 1 of the error rates.
        floor: least weight as a share of 1 / sqrt(L), in [0, 1].

    Raises:
        ConfigError: an error rate, r or the floor is out of range, or the number of rates differs
            from the number of layers.

    Example:
        >>> risk_weights(np.array([3.0, 4.0])).round(4).tolist()
        [0.6, 0.8]
        >>> risk_weights(np.array([3.0, 4.0]), error_rates=[0.4, 0.3]).round(4).tolist()
        [0.7071, 0.7071]
    """
    check_fraction(floor=floor)
    rates = check_risk(error_rates, emphasis, len(strengths))
    w = as_weights(np.maximum(np.asarray(strengths, dtype=np.float64), 0.0) * rates**emphasis)
    return as_weights(np.maximum(w, floor / math.sqrt(len(w))))


def bias_minimising_weights(
    squares: Sequence[float] | np.ndarray,
    products: Sequence[float] | np.ndarray,
    root: Root = "least",
) -> np.ndarray:
    """Minimise sum_l (w_l^2 A_l - 2 w_l B_l) subject to sum_l w_l^2 = 1. Return the weights,
    float64 [L], which may be negative.

    Stationary points have w_l = B_l / (A_l - lambda), where sum_l w_l^2 = 1 determines lambda. This
    equation has several roots lambda. The minimiser belongs to the least root, which is at most min
    A. A bisection that starts above max A ends at the greatest root, where the objective is
    largest.

    Args:
        squares: A_l = ||u_l||^2, where u_l is the mean of the clipped directions of layer l.
        products: B_l = <u_l, gradient of layer l>.
        root: "least" for the minimiser, "greatest" for the maximiser, whose weights have the signs
            of -B.

    Source: LM-DP-SGD paper, Appendix D.2, equations 10 and 11, which wrongly calls the multiplier
        unique.

    Raises:
        ConfigError: the lists differ in length or hold values that are not finite, or the root is
            unknown.

    >>> bias_minimising_weights([4.0, 1.0], [1.0, 2.0]).round(5).tolist()
    [0.19839, 0.98012]
    >>> bias_minimising_weights([4.0, 1.0], [1.0, 2.0], root="greatest").round(5).tolist()
    [-0.8757, -0.48286]
    """
    a, b = np.asarray(squares, dtype=np.float64), np.asarray(products, dtype=np.float64)
    if (
        a.shape != b.shape
        or a.ndim != 1
        or not len(a)
        or not (np.isfinite(a).all() and np.isfinite(b).all())
    ):
        raise ConfigError("A and B must be two equally long lists of finite numbers")
    if root == "greatest":  # the maximiser of g(w; A, B) is the minimiser of g(w; -A, -B)
        return bias_minimising_weights(-a, -b)
    if root != "least":
        raise ConfigError(f"unknown root {root!r}; known: least, greatest")
    size = float(np.linalg.norm(b))
    if size == 0:
        # any unit vector in the flattest direction
        return np.asarray(np.eye(len(a))[int(np.argmin(a))])
    least = float(a.min())
    flat = a == least

    def excess(gap: float) -> float:
        return float(np.sum((b / (a - least + gap)) ** 2)) - 1

    if np.linalg.norm(b[flat]) <= 1e-12 * size:
        rest = np.zeros_like(b)
        rest[~flat] = b[~flat] / (a[~flat] - least)
        with np.errstate(over="ignore"):  # an infinite length is above 1
            length = float(rest @ rest)
        if length <= 1:  # the multiplier is min A itself
            rest[int(np.argmax(flat))] = math.sqrt(1 - length)
            return rest
    # lambda = min A - gap; the sum of squares falls with the gap and is at most 1 at ||B||
    low, high = 0.0, size
    # bisect down to neighbouring floats, because the gap may be as small as their distance
    while low < (middle := (low + high) / 2) < high:
        low, high = (middle, high) if excess(middle) > 0 else (low, middle)
    return as_weights(b / (a - least + high))


def as_weights(values: np.ndarray) -> np.ndarray:
    """Scale a vector [L] to norm 1. For the zero vector, return the vector of norm 1 with equal
    entries.

    Example:
        >>> as_weights(np.array([3.0, 4.0])).tolist(), as_weights(np.zeros(4)).tolist()
        ([0.6, 0.8], [0.5, 0.5, 0.5, 0.5])
    """
    length = float(np.linalg.norm(values))
    if length == 0:
        return np.full(len(values), 1 / math.sqrt(len(values)))
    return np.asarray(values / length)
