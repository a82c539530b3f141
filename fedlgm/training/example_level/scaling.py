"""Scaling of each example's gradient: clipping, normalisation and reweighting as factors per layer.

An example i with layer gradients g_i1 .. g_iK contributes sum_j f_ij g_ij. A `Scaling` computes the
factors f_ij from the norms ||g_ij|| and states a bound on the contribution that holds for all
values of the norms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from fedlgm.errors import ConfigError
from fedlgm.extension.loader import is_bundled
from fedlgm.extension.per_row import rows_apart
from fedlgm.planning.clipping import Scaling as Scaling

SAFETY = 1 - 2.0**-19
"""Fraction of the bound to which gradients are clipped, so that no gradient exceeds the bound
because of the rounding error of its norm (a relative error of at most 2^-20). A float64 sum of n <=
2^15 gradients has a rounding error of at most n^2 2^-52 <= 2^-22 times the bound. Even with this
error, one example changes a sum by no more than the bound.
"""
LEAST_BOUND = 2.0**-36
"""Smallest allowed bound other than 0. The squares of float32 numbers below 1e-19 underflow, so
only norms above 5e-15 are accurate.
"""
LEAST_STABILISER = 1e-6
"""Smallest allowed stabiliser. A stabiliser limits how far gradients with a small norm are scaled
up.
"""
LEAST_NORM = 2.0**-46
"""Norms below this value count as 0 when gradients are normalised, because float32 is too inexact
for the direction of such a small gradient.
"""


class _OneByOne:
    """A wrapper that calls a user's scaling with one example at a time. If a factor would scale a
    gradient above the scaling's bound, the factor is reduced.

    The bounds are read only once. If they were read again, they could differ from the bounds that
    the plan checks.
    """

    def __init__(self, scaling: Scaling) -> None:
        self.scaling, self.norm = scaling, getattr(scaling, "norm", None)
        self._bounds: np.ndarray | None = None

    def factors(self, norms: Tensor) -> Tensor:
        factors = (
            rows_apart(self.scaling, _alone, norms, "scaling")
            if len(norms)
            else torch.zeros_like(norms)
        )
        limit = (
            SAFETY
            * torch.from_numpy(self.bounds(norms.shape[1])).to(norms)
            / norms.clamp(min=LEAST_NORM)
        )
        return torch.nan_to_num(factors, nan=0.0).clamp(min=0.0).minimum(limit)

    def bounds(self, layers: int) -> np.ndarray:
        if self._bounds is None:
            self._bounds = np.array(self.scaling.bounds(layers), dtype=np.float64)
        return self._bounds

    @property
    def bound(self) -> float:
        return self.scaling.bound


def _alone(scaling: Scaling, norms: Tensor) -> Tensor:
    factors = scaling.factors(norms)
    if factors.shape != norms.shape:
        wanted = f"the shape of the norms, {tuple(norms.shape)} for one example"
        raise ConfigError(f"a scaling's factors must have {wanted}, got {tuple(factors.shape)}")
    return factors


def one_by_one(scaling: Scaling) -> Scaling:
    """Return a scaling that treats each example alone. A bundled scaling is returned unchanged; a
    user's scaling gets one example at a time, and its factors are limited by its bounds.

    If factors depended on other examples' norms (as in clipping to the batch's median), an added
    example would also change the factors of the other examples, so the effect of one example would
    have no bound.

    Args:
        scaling: a mechanism's scaling.

    Example:
        >>> class Median(PerLayerClip):
        ...     __module__ = "mypkg.scalings"
        ...
        ...     def factors(self, norms):
        ...         return (norms.median(dim=0).values / norms).clamp(max=1.0)
        >>> norms = torch.tensor([[1.0], [2.0], [8.0]])
        >>> Median((9.0,)).factors(norms).tolist(), one_by_one(Median((9.0,))).factors(norms).tolist()
        ([[1.0], [1.0], [0.25]], [[1.0], [1.0], [1.0]])
    """
    return scaling if is_bundled(scaling) else _OneByOne(scaling)


def clip_factors(norms: Tensor, bound: float | Tensor) -> Tensor:
    """Compute the factor min(1, c / norm) of each norm, slightly reduced for rounding (`SAFETY`)
    where it is below 1. The factor is 1 for an infinite bound and 0 for a bound of 0.

    This function is for gradients of examples, in tensors on any device. For clients' updates,
    whose sums have more terms and need a larger margin, see `fedlgm.aggregation.clip_factors`.

    Args:
        norms: l2 norms, of any shape.
        bound: c, one number or a tensor that broadcasts with the norms.

    Example:
        >>> clip_factors(torch.tensor([0.5, 4.0]), 1.0).round(decimals=4).tolist()
        [1.0, 0.25]
    """
    if (
        isinstance(bound, float | int)
        and norms.dtype == torch.float64
        and 0 < SAFETY * bound < math.inf
    ):
        # the same result in two operations, which NumPy computes in a third of the time for a few
        # numbers
        limit = SAFETY * bound
        if norms.device.type == "cpu":
            return torch.from_numpy(np.asarray(limit / np.maximum(norms.numpy(), limit)))
        return torch.tensor(limit, dtype=norms.dtype, device=norms.device) / norms.clamp(min=limit)
    bound = torch.as_tensor(bound, dtype=norms.dtype, device=norms.device)
    unclipped = norms <= bound * SAFETY
    cut = SAFETY * bound / torch.where(unclipped, 1.0, norms)
    return torch.where(unclipped, torch.sign(bound).expand_as(norms), cut)


def check_bounds(bounds: Sequence[float] | np.ndarray, layers: int | None = None) -> np.ndarray:
    """Check clipping bounds, and return them as a float64 vector [K].

    Args:
        bounds: one bound per layer.
        layers: number K of layers, if known.

    Raises:
        ConfigError: a bound is negative, NaN or too small for norms in float32, or the number of
            bounds is not the number of layers.

    Example:
        >>> check_bounds([0.0, 1], layers=2).tolist()
        [0.0, 1.0]
    """
    values = np.asarray(bounds, dtype=np.float64)
    if values.ndim != 1 or (layers is not None and len(values) != layers):
        wanted = (
            "one bound per layer" if layers is None else f"one bound for each of {layers} layers"
        )
        raise ConfigError(f"clip must be a number or {wanted}, got {values.tolist()}")
    if (
        np.isnan(values).any()
        or (values < 0).any()
        or ((values > 0) & (values < LEAST_BOUND)).any()
    ):
        raise ConfigError(f"clip bounds must be 0 or at least 2^-36, got {values.tolist()}")
    return values


@dataclass(frozen=True)
class PerLayerClip(Scaling):
    """f_ij = min(1, c_j / ||g_ij||): the gradient of every layer is clipped to a separate bound.

    Attributes:
        clip: one bound c_j per layer.

    Raises:
        ConfigError: a bound is out of range.

    Example:
        >>> scaling = PerLayerClip((1.5, 8.0))
        >>> scaling.factors(torch.tensor([[3.0, 4.0]])).round(decimals=4).tolist(), round(scaling.bound, 2)
        ([[0.5, 1.0]], 8.14)
    """

    clip: tuple[float, ...]

    def __post_init__(self) -> None:
        check_bounds(self.clip)

    @override
    def factors(self, norms: Tensor) -> Tensor:
        return clip_factors(norms, torch.tensor(self.clip, dtype=norms.dtype, device=norms.device))

    def factors_of(self, layer: int, norms: Tensor) -> Tensor:
        """Compute column `layer` of the factors from the norms [n] of that layer alone.

        With this scaling, a layer's factor depends only on the norm of the layer's gradient, so
        gradients can be scaled and added during the backward pass. With other scalings, gradients
        can be scaled only when the pass has reached all layers.
        """
        limit = SAFETY * self.clip[layer]
        if 0 < limit < math.inf:
            return limit / norms.clamp(min=limit)  # equals `clip_factors` up to rounding
        return clip_factors(norms, self.clip[layer])

    @override
    def bounds(self, layers: int) -> np.ndarray:
        return check_bounds(self.clip, layers)

    @property
    @override
    def bound(self) -> float:
        return math.hypot(*self.clip)


class _Whole(Scaling):
    """A scaling by one factor per example, which depends on the norm of the example's gradient over
    all layers. The bound C on this gradient also holds for each layer.
    """

    clip: float

    def __post_init__(self) -> None:
        check_bounds([self.clip])

    @override
    def factors(self, norms: Tensor) -> Tensor:
        if norms.shape[1] == 1:  # with one layer, the layer's norm is the whole norm, bit for bit
            return self.of_whole(norms)
        return self.of_whole(torch.linalg.vector_norm(norms, dim=1))[:, None].expand_as(norms)

    def of_whole(self, norms: Tensor) -> Tensor:
        """Compute the factor of each gradient from its norm over all layers. The norms may have any
        shape.
        """
        raise NotImplementedError

    @override
    def bounds(self, layers: int) -> np.ndarray:
        return np.full(layers, float(self.clip))

    @property
    @override
    def bound(self) -> float:
        return float(self.clip)


@dataclass(frozen=True)
class FlatClip(_Whole):
    """f_i = min(1, C / ||g_i||): an example's gradient over all layers is clipped (DP-SGD; Abadi et
    al., CCS 2016).

    Attributes:
        clip: C.

    Raises:
        ConfigError: C is out of range.

    Example:
        >>> FlatClip(2.5).factors(torch.tensor([[3.0, 4.0]])).round(decimals=4).tolist()
        [[0.5, 0.5]]
    """

    clip: float

    @override
    def of_whole(self, norms: Tensor) -> Tensor:
        return clip_factors(norms, self.clip)


@dataclass(frozen=True)
class AutoS(_Whole):
    """f_i = C / (||g_i|| + gamma): Auto-S (Bu et al., NeurIPS 2023), equal to NSGD (Yang et al.,
    2022).

    Attributes:
        clip: C, a strict bound on the contribution's norm; the papers absorb C into the learning
            rate.
        gamma: stabiliser, 0.01 in the paper.

    Raises:
        ConfigError: C is out of range or infinite, or gamma is below 1e-6 or infinite.

    Example:
        >>> AutoS(1.0, gamma=3.0).factors(torch.tensor([[3.0, 4.0]])).round(decimals=4).tolist()  # 1 / (5 + 3)
        [[0.125, 0.125]]
    """

    clip: float = 1.0
    gamma: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (
            math.isfinite(self.gamma)
            and self.gamma >= LEAST_STABILISER
            and math.isfinite(self.clip)
        ):
            raise ConfigError(
                f"Auto-S: clip and gamma must be finite, and gamma at least 1e-6, got {self.clip} and "
                f"{self.gamma}"
            )

    @override
    def of_whole(self, norms: Tensor) -> Tensor:
        return SAFETY * self.clip / (norms + self.gamma)


@dataclass(frozen=True)
class PSAC(_Whole):
    """f_i = C / (||g_i|| + r / (||g_i|| + r)): DP-PSAC (Xia et al., AAAI 2023).

    The LM-DP-SGD paper quotes this formula without the gradient that the factor multiplies. The
    norm of the scaled gradient stays below C. For small gradients, the factor is about C, whereas
    the factor of Auto-S grows to C / gamma.

    Attributes:
        clip: C.
        r: stabiliser, 0.1 in the authors' MNIST example.

    Raises:
        ConfigError: C is out of range or infinite, or r is below 1e-6 or infinite.

    Example:
        >>> PSAC(3.0, r=1.0).factors(torch.tensor([[1.0]])).round(decimals=4).tolist()  # 3 / (1 + 1 / (1 + 1))
        [[2.0]]
    """

    clip: float = 1.0
    r: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (math.isfinite(self.r) and self.r >= LEAST_STABILISER and math.isfinite(self.clip)):
            raise ConfigError(
                f"DP-PSAC: clip must be finite and r at least 1e-6, got {self.clip} and {self.r}"
            )

    @override
    def of_whole(self, norms: Tensor) -> Tensor:
        return SAFETY * self.clip / (norms + self.r / (norms + self.r))


@dataclass(frozen=True)
class Reweighted(Scaling):
    """f_ij = w_j min(C, ||g_i||) / ||g_ij||, or 0 where ||g_ij|| = 0: LM-DP-SGD (equation 1) for
    fixed weights.

    The gradient of layer j is scaled to the norm w_j C_i with C_i = min(C, ||g_i||), so the norm of
    one example's contribution is at most C ||w||_2 <= C.

    Attributes:
        clip: C.
        weights: w_j >= 0 with sum_j w_j^2 = 1 (or below 1).

    Raises:
        ConfigError: C is out of range or infinite, a weight is negative or not finite, or the
            squares of the weights add up to more than 1.

    Example:
        >>> Reweighted(1.0, (0.6, 0.8)).factors(torch.tensor([[1.2, 1.6]])).round(decimals=4).tolist()
        [[0.5, 0.5]]
    """

    clip: float
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        check_bounds([self.clip])
        w = np.asarray(self.weights, dtype=np.float64)
        if (
            not math.isfinite(self.clip)
            or not np.isfinite(w).all()
            or (w < 0).any()
            or float(w @ w) > 1 + 1e-9
        ):
            raise ConfigError(
                f"layer weights must be non-negative with squares adding up to 1, got {w.tolist()}"
            )

    @override
    def factors(self, norms: Tensor) -> Tensor:
        total = torch.linalg.vector_norm(norms, dim=1, keepdim=True).clamp(max=self.clip)
        w = torch.tensor(self.weights, dtype=norms.dtype, device=norms.device)
        nonzero = norms >= LEAST_NORM
        return torch.where(nonzero, SAFETY * w * total / torch.where(nonzero, norms, 1.0), 0.0)

    @override
    def bounds(self, layers: int) -> np.ndarray:
        if len(self.weights) != layers:
            raise ConfigError(f"{len(self.weights)} layer weights for {layers} layers")
        return self.clip * np.asarray(self.weights)

    @property
    @override
    def bound(self) -> float:
        return self.clip * math.hypot(*self.weights)


def of_style(style: str, clip: float | Sequence[float] | np.ndarray, layers: int) -> Scaling:
    """Create the scaling of style "per-layer" or "flat". With "per-layer", a single number is the
    bound of every layer.

    Raises:
        ConfigError: the style is unknown, a bound is out of range, or the number of bounds does not
            suit the style.

    Example:
        >>> of_style("per-layer", 0.5, layers=2)
        PerLayerClip(clip=(0.5, 0.5))
    """
    if style == "per-layer":
        bounds = np.full(layers, clip) if np.ndim(clip) == 0 else np.asarray(clip)
        return PerLayerClip(tuple(check_bounds(bounds, layers).tolist()))
    if style == "flat":
        if np.ndim(clip) != 0:
            raise ConfigError(
                "style 'flat' has one bound for the whole gradient: give clip as a number"
            )
        return FlatClip(float(clip))  # type: ignore[arg-type]
    raise ConfigError(f"unknown clipping style {style!r}; known: per-layer, flat")
