"""PCA as a federation: clients hold rows, one round releases the sum of their second-moment matrices.

The unit of privacy is a row: `pca.covariance_sum` bounds every row's share, so a client's sum needs no bound of its
own. Where entries are clipped, the matrix is released as two layers, "diagonal" and "off-diagonal", each with the
bound that the clipping gives it. Where rows are bounded as a whole, no pair of per-layer bounds says what is known: a
row long on the diagonal is short above it. The upper triangle is then one layer, in units in which the noise is the
same for all entries, and its bound is the row's norm in these units.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedlgm import inputs
from fedlgm.applications.pca import Array, CovariancePlan, covariance_sum
from fedlgm.layers import LayerTable
from fedlgm.mechanisms.base import Mechanism
from fedlgm.plan import Budget, ReleasePlan
from fedlgm.training.base import ClientTask
from fedlgm.transcript import Transcript


def covariance_table(plan: CovariancePlan) -> LayerTable:
    """The layers of the released vector [M (M + 1) / 2]: the diagonal, then the entries above it by rows."""
    above = plan.dimension * (plan.dimension - 1) // 2
    if plan.entry_clip is None:
        return LayerTable.from_sizes({"upper-triangle": plan.dimension + above})
    return LayerTable.from_sizes({"diagonal": plan.dimension} | ({"off-diagonal": above} if above else {}))


def pack(matrix: Array, plan: CovariancePlan) -> Tensor:
    """Symmetric matrix [M, M] as the released vector, float32 [M (M + 1) / 2]."""
    above = matrix[np.triu_indices(plan.dimension, 1)] * _unit(plan)
    return torch.from_numpy(np.concatenate([np.diag(matrix), above]).astype(np.float32))


def unpack(vector: Tensor, plan: CovariancePlan) -> Array:
    """Inverse of `pack`, float64 [M, M]."""
    values, size = vector.double().numpy(), plan.dimension
    matrix = np.zeros((size, size))
    matrix[np.triu_indices(size, 1)] = values[size:] / _unit(plan)
    return np.asarray(matrix + matrix.T + np.diag(values[:size]))


class CovarianceSums:
    """Trainer: a client's sum of bounded outer products, whatever the model.

    Args:
        plan: how rows are bounded.
    """

    def __init__(self, plan: CovariancePlan) -> None:
        self._plan = plan

    def updates(self, model: Tensor, tasks: Iterable[ClientTask]) -> Iterator[Tensor]:
        """Yield the packed sum, float32 [1, M (M + 1) / 2], of each task (x: rows [n, M])."""
        for task in tasks:
            yield pack(covariance_sum(inputs.first(task.x).double().numpy(), self._plan), self._plan)[None]


@dataclass(frozen=True)
class CovarianceRelease(Mechanism):
    """Mechanism: the one release of a `CovariancePlan`.

    Attributes:
        covariance: bounds, noise and guarantee.
        claimed_epsilon: what its authors state for a method whose guarantee is "none".
    """

    covariance: CovariancePlan = None  # type: ignore[assignment]
    claimed_epsilon: float | None = None

    def plan(self, layers: LayerTable, budget: Budget, transcript: Transcript) -> ReleasePlan:
        """Bounds in l2 (Gaussian) or l1 (Laplace) norm and noise of each layer."""
        known, order = self.covariance, 2 if self.covariance.family == "gaussian" else 1
        if known.entry_clip is None:
            scales = np.array([known.diagonal])
            # The plan's own multiplier says what a row's norm may be in units of the noise.
            clip = scales / float(getattr(known.event, "noise_multiplier", known.diagonal))
        else:
            scales = np.array([known.diagonal, known.off_diagonal])[: len(layers)]
            clip = np.array(known.entry_clip)[: len(layers)] * layers.sizes ** (1 / order)
        claim = None if self.claimed_epsilon is None else {"epsilon": self.claimed_epsilon}
        return ReleasePlan(layers, clip, scales, budget, known.guarantee, family=known.family, claim=claim)


def _unit(plan: CovariancePlan) -> float:
    return 1.0 if plan.entry_clip is not None else plan.diagonal / plan.off_diagonal
