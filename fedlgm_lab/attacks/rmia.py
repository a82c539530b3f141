"""RMIA: the robust membership attack, for few shadow models (Zarifzadeh, Liu and Shokri, ICML
2024).

The score of a unit x is the share of units z that x dominates, that is, for which Pr(x|theta)/Pr(x)
is at least gamma times Pr(z|theta)/Pr(z). Pr(x) is the mean probability of x over reference models.
One or two reference models are enough, since no distribution is fitted to the confidences.
"""

from __future__ import annotations

import numpy as np

from fedlgm.errors import ConfigError
from fedlgm_lab.attacks.lira import check_shapes

GAMMA = 2.0
"""Least quotient of two units' ratios Pr(x|theta)/Pr(x) at which one unit dominates the other."""
OFFLINE = 0.3
"""The paper's a in Pr(x) = ((1 + a) Pr(x)_out + 1 - a) / 2, used if no reference model was trained
on x."""


def relative_ratios(
    target: np.ndarray,
    shadows: np.ndarray,
    membership: np.ndarray,
    *,
    online: bool = True,
    gamma: float = GAMMA,
) -> np.ndarray:
    """Compute membership scores of a target model's units, float64 [n]; higher means "member".

    Args:
        target: mean confidence logit ln(p / (1 - p)) of each unit under the target model, where p
            is the true class's probability, [n].
        shadows: confidence logits of the shadow models, [S, n].
        membership: units on which each shadow model was trained, bool [S, n].
        online: whether models that were trained on a unit are used. Otherwise Pr(x) is a corrected
            estimate from the models that were not trained on the unit.
        gamma: see `GAMMA`.

    Raises:
        ConfigError: the shapes do not fit, gamma is below 1, or no shadow model was trained without
            some unit (or, online, with it).

    Source: Zarifzadeh et al., Section 3; the offline form is in their appendix.

    Example:
        >>> membership = np.array([[True, False, True], [False, True, False]])
        >>> shadows = np.array([[3.0, 0.0, 2.0], [0.0, 3.0, 0.0]])
        >>> relative_ratios(np.array([3.0, -2.0, -2.0]), shadows, membership, online=False).round(2).tolist()
        [0.67, 0.0, 0.0]
    """
    check_shapes(target, shadows, membership)
    if not gamma >= 1:
        raise ConfigError(f"gamma must be at least 1, got {gamma}")
    sides = (membership, ~membership) if online else (~membership,)
    missing = np.flatnonzero(np.any([~side.any(axis=0) for side in sides], axis=0))
    if len(missing):
        raise ConfigError(
            f"unit {missing[0]} needs shadow models trained with it and without it: train more of "
            "them"
        )
    p = _probability(shadows)
    means = [np.where(side, p, 0.0).sum(axis=0) / side.sum(axis=0) for side in sides]
    marginal = sum(means) / 2 if online else ((1 + OFFLINE) * means[0] + 1 - OFFLINE) / 2
    ratios = _probability(target) / np.maximum(marginal, 1e-300)
    beaten = np.searchsorted(np.sort(ratios), ratios / gamma, side="right")
    # Units that dominate the same number of other units are ordered by their ratios. A gamma close
    # to 1 would do the same.
    return beaten / len(ratios) + 1e-6 * ratios / (1 + ratios)


def _probability(logits: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-np.clip(logits, -700, 700)))
