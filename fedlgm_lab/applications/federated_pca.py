"""PCA as a federation: clients hold rows, and one round releases the sum of their second-moment
matrices.

The unit of privacy is a row: `pca.covariance_sum` bounds every row's share, so a client's sum needs
no further bound. If entries are clipped, the matrix is released as two layers, "diagonal" and
"off-diagonal", each with the bound that the clipping gives it. If rows are bounded as a whole, a
pair of per-layer bounds would be too loose, because a row that is large on the diagonal is small
above it. The upper triangle is then one layer. Its entries are scaled such that all have the same
noise, and its bound is the norm of a row's share at this scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from fedlgm.aggregation.contributions import BoundedUpdates
from fedlgm.mechanisms.mechanism import Mechanism
from fedlgm.planning.facts import RunFacts
from fedlgm.planning.layers import SAFETY, LayerTable
from fedlgm.planning.plan import ReleasePlan, UnprotectedPlan
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.guarantee import Claim, Unit
from fedlgm.training import inputs
from fedlgm.training.base import ClientTask
from fedlgm_lab.applications.pca import Array, CovariancePlan, covariance_sum


def covariance_table(plan: CovariancePlan) -> LayerTable:
    """Make the layer table of the released vector [M (M + 1) / 2]: the diagonal, then the entries
    above the diagonal by rows.
    """
    above = plan.dimension * (plan.dimension - 1) // 2
    if plan.entry_clip is None:
        return LayerTable.from_sizes({"upper-triangle": plan.dimension + above})
    return LayerTable.from_sizes(
        {"diagonal": plan.dimension} | ({"off-diagonal": above} if above else {})
    )


def layer_bounds(plan: CovariancePlan) -> tuple[Array, Array]:
    """Compute a row's bound and the noise scale in each layer of `covariance_table(plan)`."""
    layers, order = covariance_table(plan), 2 if plan.family == "gaussian" else 1
    if plan.entry_clip is None:
        scales = np.array([plan.diagonal])
        # The inverse of the plan's noise multiplier is the largest norm of a row in units of the
        # noise.
        return scales / float(getattr(plan.event, "noise_multiplier", plan.diagonal)), scales
    scales = np.array([plan.diagonal, plan.off_diagonal])[: len(layers)]
    return np.array(plan.entry_clip)[: len(layers)] * layers.sizes ** (1 / order), scales


def pack(matrix: Array, plan: CovariancePlan) -> Tensor:
    """Convert a symmetric matrix [M, M] to the released vector, float64 [M (M + 1) / 2]."""
    above = matrix[np.triu_indices(plan.dimension, 1)] * _unit(plan)
    return torch.from_numpy(np.concatenate([np.diag(matrix), above]))


def unpack(vector: Tensor, plan: CovariancePlan) -> Array:
    """Convert a released vector back to the symmetric matrix, float64 [M, M]."""
    values, size = vector.double().numpy(), plan.dimension
    matrix = np.zeros((size, size))
    matrix[np.triu_indices(size, 1)] = values[size:] / _unit(plan)
    return np.asarray(matrix + matrix.T + np.diag(values[:size]))


class CovarianceSums:
    """Trainer whose update is a client's sum of bounded outer products; it does not depend on the
    model.

    Args:
        plan: how rows are bounded.
    """

    def __init__(self, plan: CovariancePlan) -> None:
        self._plan, self._bounds = plan, tuple(layer_bounds(plan)[0].tolist())

    def updates(self, model: Tensor, tasks: Iterable[ClientTask]) -> Iterator[BoundedUpdates]:
        """Yield the packed sum, float64 [1, M (M + 1) / 2], of each task (x: rows [n, M])."""
        for task in tasks:
            total = pack(
                covariance_sum(inputs.first(task.x).double().numpy(), self._plan), self._plan
            )
            # The sum is scaled down slightly, so that rounding errors over many rows cannot carry
            # one row's share above its bound.
            yield BoundedUpdates(SAFETY * total[None], self._bounds)


@dataclass(frozen=True)
class CovarianceRelease(Mechanism):
    """Mechanism that makes the single release of a `CovariancePlan`.

    Attributes:
        covariance: bounds, noise and guarantee.
        claimed_epsilon: the authors' epsilon for a method whose guarantee is "none".
    """

    unit: ClassVar[Unit] = "example"  # a row

    covariance: CovariancePlan = None  # type: ignore[assignment]
    claimed_epsilon: float | None = None

    def costs(self, layers: LayerTable, rounds: int) -> np.ndarray:
        """Return the release's cost for facts with noise multiplier 1 (see `Mechanism.costs`)."""
        clip, scales = layer_bounds(self.covariance)
        order = 2 if self.covariance.family == "gaussian" else 1
        return np.full(rounds, np.linalg.norm(np.asarray(clip) / np.asarray(scales), order) ** 2)

    def plan(self, layers: LayerTable, facts: RunFacts, transcript: Transcript) -> ReleasePlan:
        """Plan the release, with bounds in l2 norm (Gaussian noise) or l1 norm (Laplace noise)."""
        covariance = self.covariance
        clip, scales = layer_bounds(covariance)
        claim: Claim | None = (
            None if self.claimed_epsilon is None else {"epsilon": self.claimed_epsilon}
        )
        kind = ReleasePlan if covariance.protected else UnprotectedPlan
        return kind(
            layers,
            clip,
            scales,
            facts,
            covariance.guarantee,
            family=covariance.family,
            claim=claim,
            bounded_by="trainer",
        )


def _unit(plan: CovariancePlan) -> float:
    return 1.0 if plan.entry_clip is not None else plan.diagonal / plan.off_diagonal
