"""How contributions are bounded: which bounds s_j a plan uses, and how an update is cut to them.

All rules spread one l2 bound S over K layers so that sum_j s_j^2 = S^2: the vector of a whole contribution then has
sensitivity S under add-or-remove-one, whatever the rule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.layers import SAFETY, LayerTable
from fedlgm.plan import ReleasePlan

# Squares of float32 numbers vanish below 1e-19: a layer's norm is only known to 5e-15.
LEAST_CLIP = 2.0**-36
_CHUNK = 1 << 15


def eq_clip(bound: float, layers: int) -> np.ndarray:
    """EqClip: s_j = S / sqrt(K) (SNR-consistent allocation paper, Section 5.1), float64 [K]."""
    return np.full(layers, bound / math.sqrt(layers))


def med_clip(bound: float, norms: np.ndarray, floor: float = 0.0) -> np.ndarray:
    """s_j = S m_j / ||m||_2 for public or released layer norms m_j, float64 [K].

    Args:
        bound: total l2 bound S.
        norms: m_j >= 0, [K].
        floor: no layer's bound falls below this share of S / sqrt(K) before normalisation.
    """
    m = np.maximum(norms, floor * np.linalg.norm(norms) / math.sqrt(len(norms)))
    total = float(np.linalg.norm(m))
    return np.asarray(bound * m / total) if total > 0 else eq_clip(bound, len(norms))


def med_clip_published(bound: float, private_norms: np.ndarray) -> np.ndarray:
    """MedClip as printed: medians over the cohort's PRIVATE layer norms, normalised by their sum. Not private.

    Args:
        bound: S.
        private_norms: unclipped layer norms of every sampled client, [clients, K].

    Source: SNR-consistent allocation paper, Section 5.1, rule (2). Its l2 sensitivity lies between S / sqrt(K) and S.
    """
    medians = np.median(private_norms, axis=0)
    total = float(medians.sum())
    return np.asarray(bound * medians / total) if total > 0 else eq_clip(bound, private_norms.shape[1])


def released_norms(mean_update: Tensor, plan: ReleasePlan) -> np.ndarray:
    """Layer norms of a released mean update with the noise's share taken off, float64 [K].

    m_j = sqrt(max(||G_j||^2 - d_j (sigma_j / (q N))^2, 0)); layers that were not released give 0. Post-processing of a
    release, so it costs nothing.

    Args:
        mean_update: released mean of the plan's parts, [plan.size].
        plan: the plan that released it.
    """
    energy, noise = _energies(mean_update, plan)
    return np.sqrt(np.maximum(energy - noise, 0.0))


def signal_share(mean_update: Tensor, plan: ReleasePlan) -> np.ndarray:
    """Share of each layer's energy in a released mean that is not noise, float64 [K]; 0 where nothing was released.

    Args:
        mean_update: released mean of the plan's parts, [plan.size].
        plan: the plan that released it.
    """
    energy, noise = _energies(mean_update, plan)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(energy > 0, np.maximum(1 - noise / energy, 0.0), 0.0)


def _energies(mean_update: Tensor, plan: ReleasePlan) -> tuple[np.ndarray, np.ndarray]:
    """Squared norm of each layer of a released mean, and what of it the noise is expected to be; 0 if not released."""
    energy, noise = np.zeros(len(plan.layers)), np.zeros(len(plan.layers))
    # Under local trust every client of the expected cohort adds its own noise.
    draws = plan.denominator if plan.budget.trust == "local" else 1.0
    sizes = [size for _, size, _, _ in plan.parts]
    for j, part in zip(plan.indices, mean_update.split(sizes), strict=False):
        energy[j] = float(torch.linalg.vector_norm(part.double()) ** 2)
        noise[j] = plan.layers.sizes[j] * draws * (plan.sigma[j] / plan.denominator) ** 2
    return energy, noise


def next_quantile_bounds(clip: np.ndarray, below: np.ndarray, bound: float, target: float, rate: float) -> np.ndarray:
    """Adaptive per-layer bounds for the next round from released shares of unclipped clients, float64 [K].

    s_j <- s_j exp(-rate (b_j - target)), renormalised to S: where more than `target` of the clients stay below their
    bound, the bound shrinks (Andrew et al. 2021, Algorithm 1, per layer).

    Args:
        clip: bounds s_j of the round that released `below`.
        below: released, noisy shares of clients with ||g_j|| <= s_j.
        bound: total l2 bound S.
        target: quantile in (0, 1).
        rate: learning rate of the geometric update.
    """
    moved = clip * np.exp(-rate * (np.clip(below, 0.0, 1.0) - target))
    return np.asarray(bound * moved / np.linalg.norm(moved))


QUANTILE_SIDE = "below-bound"
MOVEMENT_SIDE = "layer-movement"


@dataclass
class BoundedSum:
    """Running sum of bounded contributions, always added up in the order they are given.

    In float64: rounding moves the difference of two sums of n contributions by at most n^2 2^-52 of their bound, which
    up to 100,000 clients is less than half of what contributions are cut short by (`fedlgm.layers.SAFETY`).

    Attributes:
        plan: bounds and released parts.
        total: [plan.size] float64, layers then sides.
        count: contributions added, the discarded ones included.
        discarded: contributions that held NaN or Inf and counted as zero; a number on the device where updates are
            bounded on one.

    Raises:
        PrivacyError: a bound too small for norms in float32.
    """

    plan: ReleasePlan
    total: Tensor
    count: int = 0
    discarded: int | Tensor = 0

    def __post_init__(self) -> None:
        clip = self.plan.clip
        if self._per_client and ((clip > 0) & (clip < LEAST_CLIP)).any():
            raise PrivacyError(f"clip bounds must be 0 or at least 2^-36, got {clip.tolist()}")

    @property
    def _per_client(self) -> bool:
        """Whether updates are bounded here; where the unit is an example, the trainer has bounded every example's."""
        return self.plan.guarantee.unit == "client"

    @classmethod
    def empty(cls, plan: ReleasePlan) -> BoundedSum:
        """The sum of nothing."""
        return cls(plan, torch.zeros(plan.size, dtype=torch.float64))

    def add(self, updates: Tensor) -> None:
        """Bound clients' flat updates [b, D] (or one client's [D]) on the CPU and add them, one after another."""
        for update in torch.atleast_2d(updates):
            self._add(update)

    def _add(self, update: Tensor) -> None:
        self.count += 1
        layers = self.plan.layers
        norms = layers.norms(update, 2 if self.plan.family == "gaussian" else 1).numpy()
        if not np.isfinite(norms).all():
            self.discarded += 1
            return
        factors = clip_factors(norms, self.plan.clip) if self._per_client else np.ones(len(norms))
        position = 0
        views = layers.split(update)
        for j in self.plan.indices:
            size = int(layers.sizes[j])
            _add_scaled_(self.total[position : position + size], views[j], float(factors[j]))
            position += size
        for side in self.plan.sides:
            value = _side_value(side.name, norms, self.plan)
            if len(value) != side.size:
                raise PrivacyError(f"the plan asks for {side.size} values of {side.name!r}, a client has {len(value)}")
            self.total[position : position + side.size] += value
            position += side.size

    def skip(self, clients: int) -> None:
        """Count clients without data: they contribute zero."""
        self.count += clients

    def merge(self, total: Tensor, count: int, discarded: int | Tensor) -> None:
        """Add another partial sum of the same plan."""
        self.total += total
        self.count += count
        self.discarded += discarded


def _add_scaled_(total: Tensor, part: Tensor, factor: float) -> None:
    """Add factor * part (float32) to `total` (float64): in pieces, four times as fast as torch's mixed arithmetic."""
    wide = torch.empty(min(_CHUNK, len(part)), dtype=total.dtype)
    for low in range(0, len(part), _CHUNK):
        piece = part[low : low + _CHUNK]
        total[low : low + _CHUNK].add_(wide[: len(piece)].copy_(piece), alpha=factor)


def clip_factors(norms: np.ndarray, clip: np.ndarray) -> np.ndarray:
    """min(1, s_j / ||g_j||), a hair smaller where it cuts; 1 for an infinite bound, 0 for a bound of 0."""
    with np.errstate(divide="ignore", invalid="ignore"):
        # A norm of 0 may be that of numbers whose squares vanish.
        return np.where(norms <= clip * SAFETY, np.sign(clip), SAFETY * clip / norms)


def bound_update(update: Tensor, plan: ReleasePlan) -> Tensor:
    """One client's bounded contribution [plan.size], float64; zeros if the update holds NaN or Inf."""
    single = BoundedSum.empty(plan)
    single.add(update)
    return single.total


def _side_value(name: str, norms: np.ndarray, plan: ReleasePlan) -> Tensor:
    if name == QUANTILE_SIDE:
        return torch.from_numpy((norms <= plan.clip).astype(np.float32) - 0.5)
    if name == MOVEMENT_SIDE:
        # Root mean square of each layer, as a direction: a client's vector has norm 1 whatever its update is.
        movement = norms / np.sqrt(plan.layers.sizes)
        total = float(np.linalg.norm(movement))
        return torch.from_numpy((SAFETY * movement / total if total > 0 else movement).astype(np.float32))
    raise unknown_side(name)


def unknown_side(name: str) -> ConfigError:
    """The error for a side that no client can compute."""
    return ConfigError(f"unknown side release {name!r}; known: {QUANTILE_SIDE}, {MOVEMENT_SIDE}")


def side_clip(name: str, layers: LayerTable) -> float:
    """l2 bound of what a client contributes to a side, whatever its plan says."""
    if name == QUANTILE_SIDE:
        return quantile_side_clip(layers)
    if name == MOVEMENT_SIDE:
        return 1.0
    raise unknown_side(name)


def quantile_side_clip(layers: LayerTable) -> float:
    """l2 bound of a client's centred indicator bits: sqrt(K) / 2."""
    return math.sqrt(len(layers)) / 2
