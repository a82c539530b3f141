"""A batch's contribution to a step's sum: the sum of the bounded per-example gradients, and the
sums of the examples' answers to the plan's queries.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedlgm.aggregation.contributions import BoundedAnswer, BoundedUpdates
from fedlgm.errors import PrivacyError
from fedlgm.planning.clipping import Scaling
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.queries import NoisyQuery
from fedlgm.training.example_level.engine import ClippedSum
from fedlgm.training.example_level.norms import norm_of
from fedlgm.training.example_level.scaling import one_by_one


def bounded_updates(
    batches: Sequence[ClippedSum], scaling: Scaling, plan: ReleasePlan
) -> BoundedUpdates:
    """Combine the sums of several batches. Each row is the negative sum of a batch's bounded
    gradients; the bounded answers to the plan's queries are added.

    Args:
        batches: the batches' sums of scaled gradients, with the norms that were used for scaling.
            If there is only one batch, the sign of its sum is changed in place.
        scaling: the scaling; a user's scaling must be wrapped by `one_by_one`.
        plan: the plan, whose auxiliary queries are answered; each example's answer is clipped to
            the query's bound.
    """
    totals = (
        torch.stack([batch.total for batch in batches])
        if len(batches) > 1
        else batches[0].total[None]
    )
    return BoundedUpdates(
        totals.neg_(), _bounds(scaling, plan), _answers([batch.norms for batch in batches], plan)
    )


def bound_gradients(gradients: Tensor, scaling: Scaling, plan: ReleasePlan) -> BoundedUpdates:
    """Scale and sum given per-example gradients [B, D], as `bounded_updates` does for one batch.
    Audits and tests use this function without a model.

    An example whose gradient contains NaN or Inf counts as zero.
    """
    scaling = one_by_one(scaling)
    total, norms = scaled_sum(gradients, scaling, plan.layers)
    return BoundedUpdates(-total[None], _bounds(scaling, plan), _answers([norms], plan))


def scaled_sum(gradients: Tensor, scaling: Scaling, layers: LayerTable) -> tuple[Tensor, Tensor]:
    """Compute the scaled sum [D] of given per-example gradients [B, D], and their norms [B, K]
    before scaling, both in float64.

    An example whose gradient contains NaN or Inf counts as zero.
    """
    order = norm_of(scaling).order
    measured = [
        torch.linalg.vector_norm(part.double(), ord=order, dim=1)
        for part in layers.split(gradients)
    ]
    norms = torch.stack(measured, dim=1)
    counted = norms.isfinite().all(dim=1)
    factors = one_by_one(scaling).factors(torch.where(counted[:, None], norms, 0.0))
    parts = layers.split(torch.where(counted[:, None], gradients, 0.0).double())
    total = torch.cat([(part * factors[:, j : j + 1]).sum(dim=0) for j, part in enumerate(parts)])
    return total, norms


def _bounds(scaling: Scaling, plan: ReleasePlan) -> tuple[float, ...]:
    order = norm_of(scaling).order
    if order != (2 if plan.family == "gaussian" else 1):
        raise PrivacyError(
            f"the scaling bounds examples in l{order} norm, which {plan.family} noise does not "
            "protect: bound them in l2 norm for gaussian noise, in l1 norm for laplace noise (its "
            "attribute `norm`)"
        )
    return tuple(scaling.bounds(len(plan.layers)).tolist())


def _answers(norms: Sequence[Tensor], plan: ReleasePlan) -> tuple[BoundedAnswer, ...]:
    """Sum the examples' bounded answers in float64, with one row for each batch. The answers are
    computed from the batch's norms [B, K].

    An example whose norms are not finite counts as zero.
    """
    answers = []
    for noisy in plan.queries:
        rows = [_answer(noisy, batch, plan) for batch in norms]
        answers.append(BoundedAnswer(noisy.query.name, torch.stack(rows), noisy.bound))
    return tuple(answers)


def _answer(noisy: NoisyQuery, norms: Tensor, plan: ReleasePlan) -> Tensor:
    counted = norms.isfinite().all(dim=1, keepdim=True)
    clip = torch.from_numpy(plan.clip.copy()).to(norms)
    rows = torch.where(counted, noisy.contribution(torch.where(counted, norms, 0.0), clip), 0.0)
    return rows.double().sum(dim=0)
