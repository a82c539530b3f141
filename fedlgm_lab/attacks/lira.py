"""LiRA: the likelihood-ratio membership attack (Carlini, Chien, Nasr, Song, Terzis and Tramer, S&P
2022).

Shadow models are trained with and without every example. Their confidences on an example are
described by one normal law for the models that were trained on the example, and by another normal
law for the models that were not. The online attack compares the attacked model's confidence with
both laws. The offline attack uses only the second law.

    membership = random_halves(len(y), models=16, seed=0)
    scores = np.stack([confidence_logits(train(np.flatnonzero(row)), x, y) for row in membership])
    result = pooled(scores, membership, likelihood_ratios)
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from scipy.stats import norm
from torch import Tensor, nn

from fedlgm.errors import ConfigError
from fedlgm_lab.attacks.membership import MembershipResult, evaluate_scores

# number of shadow models below which all examples share one variance (Carlini et al., Section VI-D)
_FEW = 64
_LEAST_STD = 1e-6


@torch.no_grad()
def confidence_logits(module: nn.Module, x: Tensor, y: Tensor) -> np.ndarray:
    """Compute ln(p / (1 - p)) of the true class's probability p, without overflow, float64 [n].

    Args:
        module: a classifier, which maps inputs to logits.
        x: inputs [n, ...].
        y: labels [n].

    Source: Carlini et al., S&P 2022, Section VI-A.

    Example:
        >>> confidence_logits(nn.Identity(), torch.tensor([[2.0, 0.0]]), torch.tensor([0]))
        array([2.])
    """
    module.eval()
    confidences = []
    for inputs, labels in zip(x.split(1000), y.split(1000), strict=True):
        logits = module(inputs).double()
        true_class = logits.gather(1, labels[:, None])
        others = logits.scatter(1, labels[:, None], -torch.inf)
        confidences.append((true_class[:, 0] - torch.logsumexp(others, dim=1)).numpy())
    return np.concatenate(confidences)


def random_halves(examples: int, models: int, seed: int = 0, *, equal: bool = False) -> np.ndarray:
    """Draw the examples (or clients) on which each model trains, bool [models, examples].

    Models come in pairs that divide the examples between them. Every example is therefore in the
    training sets of exactly half of the models, even if a pair is left out.

    Args:
        examples: number of examples.
        models: number of models.
        seed: seed of the draws.
        equal: whether all models train on the same number of examples, as federations of a given
            number of clients do.

    Raises:
        ConfigError: the number of models is odd.

    Example:
        >>> random_halves(examples=5, models=4).sum(axis=0).tolist()  # every example is in half of the models
        [2, 2, 2, 2, 2]
    """
    if models % 2:
        raise ConfigError(
            f"membership attacks divide examples between pairs of models, got {models} models"
        )
    rng = np.random.default_rng(seed)
    drawn = rng.random((models // 2, examples))
    first = drawn.argsort(axis=1).argsort(axis=1) < examples // 2 if equal else drawn < 0.5
    return np.stack([first, ~first], axis=1).reshape(models, examples)


def check_shapes(target: np.ndarray, shadows: np.ndarray, membership: np.ndarray) -> None:
    """Refuse arrays of an attack whose shapes do not fit each other, with a ConfigError."""
    if shadows.shape != membership.shape or target.shape != shadows.shape[1:]:
        raise ConfigError(
            f"the attack takes a target [n] and shadows and membership [S, n], got {target.shape}, "
            f"{shadows.shape} and {membership.shape}"
        )


def likelihood_ratios(
    target: np.ndarray,
    shadows: np.ndarray,
    membership: np.ndarray,
    *,
    online: bool = True,
    shared_variance: bool | None = None,
) -> np.ndarray:
    """Compute membership scores of a target model's examples, float64 [n]; higher means "member".

    The online score is ln N(s; mu_in, sd_in) - ln N(s; mu_out, sd_out). The offline score, which
    uses no models that were trained on the example, is ln Pr[Z <= s] for Z ~ N(mu_out, sd_out). The
    means mu are estimated by medians, as in the authors' code.

    Args:
        target: confidence logits s of the target model, [n].
        shadows: confidence logits of the shadow models, [S, n].
        membership: examples on which each shadow model was trained, bool [S, n].
        online: whether shadow models that were trained on the example are used.
        shared_variance: whether all examples share one variance; by default they do if there are
            fewer than 64 shadow models.

    Raises:
        ConfigError: the shapes do not fit, or an example has fewer than two shadow models that were
            trained without it (or, online, with it).

    Example:
        >>> membership = np.array([[True], [True], [False], [False]])
        >>> shadows = np.array([[3.0], [5.0], [-1.0], [1.0]])
        >>> float(likelihood_ratios(np.array([2.0]), shadows, membership)[0])  # as near to 4 as to 0
        0.0
    """
    check_shapes(target, shadows, membership)
    shared = len(shadows) < _FEW if shared_variance is None else shared_variance
    out_mean, out_std = _normal(shadows, ~membership, shared, "without")
    if not online:
        return norm.logcdf(target, out_mean, out_std)
    in_mean, in_std = _normal(shadows, membership, shared, "with")
    return norm.logpdf(target, in_mean, in_std) - norm.logpdf(target, out_mean, out_std)


def pooled(
    scores: np.ndarray,
    membership: np.ndarray,
    attack: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray],
    **options: object,
) -> MembershipResult:
    """Attack each model, with the other pairs of models as shadow models, and pool all scores.

    The other model of the attacked model's pair is not a shadow model either. Otherwise fewer of a
    member's shadow models would have been trained with this member than without it, and this would
    change the scores. The scores of one example for different models are not independent, so the
    intervals are somewhat too narrow.

    Args:
        scores: confidence logits, [M, n].
        membership: examples on which each model was trained, from `random_halves`, bool [M, n].
        attack: (confidence logits of the target [n], those of its shadow models [S, n], the shadow
            models' membership [S, n]) -> membership scores [n].
        **options: options of `fedlgm_lab.attacks.membership.evaluate_scores`.

    Raises:
        ConfigError: scores and membership have different shapes, the models do not come in pairs,
            or there are fewer than four models.

    Example:
        >>> membership = random_halves(examples=20, models=4)
        >>> pooled(1.0 * membership, membership, lambda target, shadows, inside: target).auc
        1.0
    """
    if np.shape(scores) != np.shape(membership):
        raise ConfigError(
            f"pooled attacks take scores and membership [M, n] of the same models, got "
            f"{np.shape(scores)} and {np.shape(membership)}"
        )
    if len(membership) < 4 or len(membership) % 2 or (membership[::2] == membership[1::2]).any():
        raise ConfigError(
            f"pooled attacks take at least 4 models of `random_halves`, got {len(membership)} "
            "models"
        )
    rows = np.arange(len(scores))
    ratios = np.stack(
        [
            attack(scores[i], scores[rows // 2 != i // 2], membership[rows // 2 != i // 2])
            for i in rows
        ]
    )
    return evaluate_scores(ratios[membership], ratios[~membership], **options)  # type: ignore[arg-type]


def _normal(
    shadows: np.ndarray, used: np.ndarray, shared: bool, side: str
) -> tuple[np.ndarray, np.ndarray]:
    """Compute the median and the standard deviation of every example's confidences over the models
    that `used` marks, each [n].
    """
    if (used.sum(axis=0) < 2).any():
        example = int(np.flatnonzero(used.sum(axis=0) < 2)[0])
        raise ConfigError(
            f"example {example} has fewer than two shadow models that were trained {side} it: "
            "train more shadow models"
        )
    values = np.where(used, shadows, np.nan)
    mean = np.nanmedian(values, axis=0)
    if shared:
        return mean, np.full(len(mean), max(float(np.nanstd(values - mean)), _LEAST_STD))
    return mean, np.maximum(np.nanstd(values, axis=0), _LEAST_STD)
