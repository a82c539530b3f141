"""Rules that compute the bounds s_j of a plan from constants or from released updates.

All rules except `med_clip_published` spread one l2 bound S over K layers so that sum_j s_j^2 = S^2.
The whole contribution then has sensitivity S under add-or-remove-one.
"""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np

from fedlgm.checks import check_count, check_fraction, check_positive, check_share
from fedlgm.libraries import Tensor, torch
from fedlgm.planning.plan import ReleasePlan

LEAST_CLIP = 2.0**-36
"""Least bound above 0. The squares of float32 numbers below 1e-19 vanish, so a norm can be too
small by up to 5e-15.
"""


def eq_clip(bound: float, layers: int) -> np.ndarray:
    """Bounds s_j = S / sqrt(K) of the rule EqClip (SNR-consistent allocation paper, Section 5.1),
    float64 [K].

    Raises:
        ConfigError: the bound is not finite and positive, or there is no layer.

    Example:
        >>> eq_clip(1.0, 4).tolist()
        [0.5, 0.5, 0.5, 0.5]
    """
    check_positive(bound=bound)
    count = check_count("layers", layers)
    return np.full(count, bound / math.sqrt(count))


def med_clip(bound: float, norms: np.ndarray, floor: float = 0.0) -> np.ndarray:
    """Bounds s_j = S m_j / ||m||_2 for public or released layer norms m_j, float64 [K].

    Args:
        bound: total l2 bound S.
        norms: layer norms m_j >= 0, [K].
        floor: least bound of a layer before normalisation, as a share of S / sqrt(K).

    Raises:
        ConfigError: the bound is not finite and positive, or the floor is outside [0, 1].

    Example:
        >>> med_clip(1.0, np.array([3.0, 4.0])).tolist()
        [0.6, 0.8]
    """
    check_positive(bound=bound)
    check_fraction(floor=floor)
    m = np.maximum(norms, floor * np.linalg.norm(norms) / math.sqrt(len(norms)))
    total = float(np.linalg.norm(m))
    return np.asarray(bound * m / total) if total > 0 else eq_clip(bound, len(norms))


def med_clip_published(bound: float, private_norms: np.ndarray) -> np.ndarray:
    """MedClip as the paper states it: medians of the cohort's unprotected layer norms, normalised
    by their sum. It is not differentially private.

    Args:
        bound: total bound S.
        private_norms: unclipped layer norms of every sampled client, [clients, K].

    Raises:
        ConfigError: the bound is not finite and positive.

    Source: SNR-consistent allocation paper, Section 5.1, rule (2). The l2 norm of the bounds lies
        between S / sqrt(K) and S.

    Example:
        >>> med_clip_published(1.0, np.array([[1.0, 3.0], [3.0, 3.0]])).tolist()
        [0.4, 0.6]
    """
    check_positive(bound=bound)
    medians = np.median(private_norms, axis=0)
    total = float(medians.sum())
    return (
        np.asarray(bound * medians / total) if total > 0 else eq_clip(bound, private_norms.shape[1])
    )


def released_norms(mean_update: Tensor, plan: ReleasePlan) -> np.ndarray:
    """Layer norms of a released mean update, after subtraction of the expected squared norm of the
    noise, float64 [K].

    Under central trust, a layer with d_j coordinates and the released mean G_j has the norm m_j =
    sqrt(max(||G_j||^2 - d_j (sigma_j / (q N))^2, 0)), where sigma_j is the scale of this round's
    noise (`ReleasePlan.upload_sigma`). Layers that were not released give 0. The norms are
    post-processing of a release, so they cost nothing.

    Args:
        mean_update: released mean of the plan's parts, [plan.size].
        plan: the plan of this release.

    Example:
        >>> from fedlgm import Guarantee, LayerTable, RunFacts, Sampling
        >>> layers, facts = LayerTable.from_sizes({"a": 4}), RunFacts(2.0, Sampling("poisson", 100, 0.1))
        >>> plan = ReleasePlan(layers, [5.0], [10.0], facts, Guarantee("proven", "an example"))
        >>> released_norms(torch.full((4,), 1.25), plan).tolist()  # sqrt(4 * 1.25^2 - 4 * 1^2)
        [1.5]
    """
    energy, noise = _energies(mean_update, plan)
    return np.sqrt(np.maximum(energy - noise, 0.0))


def signal_share(mean_update: Tensor, plan: ReleasePlan) -> np.ndarray:
    """Share of each layer's squared norm in a released mean that is not noise, float64 [K]; 0 for
    layers that were not released.

    Args:
        mean_update: released mean of the plan's parts, [plan.size].
        plan: the plan of this release.

    Example:
        >>> from fedlgm import Guarantee, LayerTable, RunFacts, Sampling
        >>> layers, facts = LayerTable.from_sizes({"a": 4}), RunFacts(2.0, Sampling("poisson", 100, 0.1))
        >>> plan = ReleasePlan(layers, [5.0], [10.0], facts, Guarantee("proven", "an example"))
        >>> signal_share(torch.full((4,), 1.25), plan).round(4).tolist()  # 1 - 1^2 / 1.25^2
        [0.36]
    """
    energy, noise = _energies(mean_update, plan)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(energy > 0, np.maximum(1 - noise / energy, 0.0), 0.0)


def _energies(mean_update: Tensor, plan: ReleasePlan) -> tuple[np.ndarray, np.ndarray]:
    """Squared norm of each layer of a released mean, and the expected squared norm of the noise in
    the layer; both are 0 for layers that are not released.
    """
    energy, noise = np.zeros(len(plan.layers)), np.zeros(len(plan.layers))
    # Under local trust every client of the expected cohort adds its own noise.
    draws = plan.facts.noised_by.noises_in_sum(plan.denominator)
    sizes = [part.size for part in plan.parts]
    for j, part in zip(plan.indices, mean_update.split(sizes), strict=False):
        energy[j] = float(torch.linalg.vector_norm(part.double()) ** 2)
        noise[j] = plan.layers.sizes[j] * draws * (plan.upload_sigma[j] / plan.denominator) ** 2
    return energy, noise


def next_quantile_bounds(
    clip: np.ndarray, below: np.ndarray, bound: float, target: float, rate: float
) -> np.ndarray:
    """Adaptive per-layer bounds for the next round, float64 [K]. They follow the released shares of
    clients that were not clipped.

    The rule is s_j <- s_j exp(-rate (b_j - target)), where b_j is the released share. If b_j
    exceeds `target`, the bound shrinks. The bounds are then normalised to the l2 norm S (Andrew et
    al. 2021, Algorithm 1, applied to each layer).

    Args:
        clip: bounds s_j of the round that released `below`.
        below: released, noisy shares of clients with ||g_j|| <= s_j.
        bound: total l2 bound S.
        target: target for the shares, in (0, 1).
        rate: learning rate of the geometric update.

    Raises:
        ConfigError: the bound or the rate is not finite and positive, or the target is outside
            (0, 1).

    Example:
        >>> clip, below = np.array([0.6, 0.8]), np.array([1.0, 0.0])
        >>> next_quantile_bounds(clip, below, 1.0, target=0.5, rate=0.2).round(3).tolist()
        [0.523, 0.852]
    """
    check_positive(bound=bound, rate=rate)
    check_share(target=target)
    moved = clip * np.exp(-rate * (np.clip(below, 0.0, 1.0) - target))
    return np.asarray(bound * moved / np.linalg.norm(moved))


class Scaling(Protocol):
    """Factors by which mechanisms that bound examples (`mechanisms.BoundsExamples`) multiply the
    gradient of each example in each layer.

    A user's scaling is called with one example at a time (n = 1), and the factors are reduced where
    the scaled norms would exceed the scaling's bounds (see `one_by_one`).

    A scaling that bounds a norm other than l2 has an attribute `norm` (see
    `fedlgm.training.example_level.norms`).

    Example:
        >>> from fedlgm.training.example_level import PerLayerClip
        >>> scaling: Scaling = PerLayerClip((1.0, 2.0))
        >>> norms = torch.tensor([[3.0, 1.0], [0.5, 9.0]], dtype=torch.float64)
        >>> bool((scaling.factors(norms) * norms <= torch.from_numpy(scaling.bounds(2))).all())
        True
    """

    def factors(self, norms: Tensor) -> Tensor:
        """Factor f_ij >= 0 of each layer j and example i, float64 [n, K], for finite norms [n,
        K].
        """

    def bounds(self, layers: int) -> np.ndarray:
        """Bounds of one example's contribution to each layer, float64 [K].

        Raises:
            ConfigError: bounds or weights are given for another number of layers.
        """

    @property
    def bound(self) -> float:
        """l2 bound of one example's whole contribution; `inf` if there is no bound."""
