"""Scores of how far a layer has moved, by which LaDP-FL allocates noise.

Source: LaDP-FL paper, Algorithm 3 and Definition 2. If two weight vectors are close, the divergence
of their softmaxes is about half the variance of their difference and therefore tiny (1e-5 to 1e-8
for trained layers). Computed as a difference of logarithms, the divergence would lose half its
digits, or be negative.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedlgm.errors import ConfigError
from fedlgm.planning.layers import LayerTable

_CHUNK = 1 << 16  # size of a piece that fits into the cache as float64
_SERIES = 0.05  # below this |x| the series of e^-x - 1 + x is exact to double precision
_LARGEST = 30.0  # above this |x| e^-x could overflow; the divergence is then not small


def kl_score(local: npt.ArrayLike | Tensor, reference: npt.ArrayLike | Tensor) -> float:
    """Compute KL(softmax(local) || softmax(reference)) in nats over all entries, at least 0.

    Both vectors are flattened, and the divergence is computed in float64. Adding a constant to all
    entries of a vector has no effect, so the score of two vectors that differ by a constant is 0.

    Args:
        local: weights of one layer, any shape.
        reference: weights of the same layer in the reference model, with equally many entries.

    Returns:
        The divergence to a relative accuracy of about 1e-12; NaN if a weight is NaN or infinite.

    Raises:
        ConfigError: the two do not have equally many entries, or have none.

    Source: LaDP-FL paper, Algorithm 3, lines 1 to 4.
    """
    a, b = _flat(local), _flat(reference)
    if a.shape != b.shape or a.numel() == 0:
        raise ConfigError(
            f"kl_score takes two models with equally many weights, got {a.numel()} and {b.numel()}"
        )
    if not (torch.isfinite(a).all() and torch.isfinite(b).all()):
        return math.nan
    top = float(a.max())
    mass = mean = 0.0
    low, high = math.inf, -math.inf
    for piece_a, piece_b in zip(a.split(_CHUNK), b.split(_CHUNK), strict=True):
        weight, change = _weights(piece_a, top), piece_a.double() - piece_b
        mass += float(weight.sum())
        mean += float(torch.dot(weight, change))
        low, high = min(low, float(change.min())), max(high, float(change.max()))
    mean /= mass
    # KL = log E_p[e^-x] with x = change - E_p[change], hence log(1 + E_p[e^-x - 1 + x]): every term
    # is at least 0.
    if max(high - mean, mean - low) > _LARGEST:
        exponents = a.double() - top - (a.double() - b.double() - mean)
        return max(float(torch.logsumexp(exponents, 0)) - math.log(mass), 0.0)
    excess = 0.0
    for piece_a, piece_b in zip(a.split(_CHUNK), b.split(_CHUNK), strict=True):
        excess += float(
            torch.dot(_weights(piece_a, top), _excess(piece_a.double() - piece_b - mean))
        )
    return math.log1p(excess / mass)


def layer_divergences(layers: LayerTable, local: Tensor, reference: Tensor) -> np.ndarray:
    """Compute `kl_score` of every layer of two flat models [D], float64 [K]."""
    pairs = zip(layers.split(local), layers.split(reference), strict=True)
    return np.array([kl_score(a, b) for a, b in pairs])


def layer_changes(layers: LayerTable, local: Tensor, reference: Tensor) -> np.ndarray:
    """Compute the mean squared difference of the weights, ||a_j - b_j||^2 / d_j, of every layer of
    two flat models [D], float64 [K].
    """
    return layers.squared_norms(local - reference).numpy() / layers.sizes


def _flat(values: npt.ArrayLike | Tensor) -> Tensor:
    tensor = (
        values.detach()
        if isinstance(values, Tensor)
        else torch.as_tensor(np.asarray(values, dtype=np.float64))
    )
    return tensor.reshape(-1).cpu()


def _weights(piece: Tensor, top: float) -> Tensor:
    return (piece.double() - top).exp_()


def _excess(x: Tensor) -> Tensor:
    """Compute e^-x - 1 + x without cancellation near 0."""
    # x^2/2 - x^3/6 + x^4/24 - ... to x^9, by Horner's rule.
    series = torch.full_like(x, -1 / 362880)
    for coefficient in (1 / 40320, -1 / 5040, 1 / 720, -1 / 120, 1 / 24, -1 / 6, 1 / 2):
        series.mul_(x).add_(coefficient)
    series.mul_(x).mul_(x)
    far = x.abs() > _SERIES
    if far.any():
        series[far] = torch.expm1(-x[far]) + x[far]
    return series
