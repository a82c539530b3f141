"""Sums of bounded contributions on the CPU, in float64 and in the given order."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedlgm.aggregation.contributions import Updates, require_bounds, split_answers
from fedlgm.checks import check_count
from fedlgm.errors import PrivacyError
from fedlgm.planning.clipping import LEAST_CLIP
from fedlgm.planning.filling import cut_row_to_level
from fedlgm.planning.layers import SAFETY
from fedlgm.planning.plan import ReleasePlan

_CHUNK = 1 << 15


@dataclass
class BoundedSum:
    """Running sum of contributions. `add` bounds each contribution as the plan requires and adds
    it, in the given order.

    Sums are in float64. Rounding changes the difference of two sums of n contributions by at most
    n^2 2^-52 times their bound. For up to 100,000 clients this is less than half of the margin by
    which contributions are clipped below the bound (`fedlgm.planning.layers.SAFETY`).

    Example:
        >>> from fedlgm import Guarantee, LayerTable, ReleasePlan, RunFacts, Sampling
        >>> layers = LayerTable.from_sizes({"weight": 3})
        >>> facts = RunFacts(1.0, Sampling("poisson", 10, 0.5))
        >>> plan = ReleasePlan(layers, [2.0], [2.0], facts, Guarantee("proven", "an example"))
        >>> total = BoundedSum.empty(plan)
        >>> total.add(torch.tensor([[3.0, 0.0, 4.0]]))
        >>> round(float(total.total.norm()), 4)
        2.0

    Attributes:
        plan: the plan, with the bounds and the released layers.
        total: the sum, [plan.size] float64: first the released layers, then the auxiliary queries.
        count: number of contributions, including those that were discarded.
        discarded: number of contributions that held NaN or Inf and therefore counted as zero; a
            tensor on the device if updates are bounded on a device.

    Raises:
        PrivacyError: a bound is too small for norms in float32.
    """

    plan: ReleasePlan
    total: Tensor
    count: int = 0
    discarded: int | Tensor = 0

    def __post_init__(self) -> None:
        clip = self.plan.clip
        if self.plan.bounded_by == "aggregator" and ((clip > 0) & (clip < LEAST_CLIP)).any():
            raise PrivacyError(f"clip bounds must be 0 or at least 2^-36, got {clip.tolist()}")

    @classmethod
    def empty(cls, plan: ReleasePlan) -> BoundedSum:
        """Make a sum without contributions."""
        return cls(plan, torch.zeros(plan.size, dtype=torch.float64))

    def add(self, updates: Updates) -> None:
        """Add clients' flat updates [b, D], one after another.

        Raises:
            PrivacyError: the trainer has bounded the updates although the plan leaves this to the
                sum; the trainer has not bounded the updates although the plan relies on the
                trainer; the trainer's bounds exceed the plan's bounds; or answers do not belong to
                the plan's queries.
        """
        if self.plan.bounded_by == "trainer":
            for row in self._require_bounds(updates).unbind():
                self._add_bounded(row)
            return
        rows, given = split_answers(updates)
        for i, update in enumerate(torch.atleast_2d(rows)):
            self._add(update, {name: answers[i : i + 1] for name, answers in given.items()})

    def _add(self, update: Tensor, given: Mapping[str, Tensor]) -> None:
        self.count += 1
        layers = self.plan.layers
        if self.plan.fills:
            update = cut_row_to_level(update, self.plan.fills, float(self.plan.clip[0]))
        norms = layers.norms(update, 2 if self.plan.family == "gaussian" else 1)
        if not np.isfinite(norms.numpy()).all():
            self.discarded += 1
            return
        factors = clip_factors(norms.numpy(), self.plan.clip)
        position = 0
        views = layers.split(update)
        for j in self.plan.indices:
            size = int(layers.sizes[j])
            _add_scaled_(self.total[position : position + size], views[j], float(factors[j]))
            position += size
        if self.plan.queries:
            clip = torch.from_numpy(self.plan.clip.copy())
            for noisy in self.plan.queries:
                self.total[position : position + noisy.size] += noisy.contribution(
                    norms[None], clip, given.get(noisy.query.name)
                )[0]
                position += noisy.size

    def _require_bounds(self, updates: Updates) -> Tensor:
        """Return the rows of updates, each followed by the answers to the plan's queries. Refuse
        rows that the trainer has not bounded as the plan requires.
        """
        return torch.atleast_2d(require_bounds(updates, self.plan.bounds, self.plan.asked))

    def _add_bounded(self, row: Tensor) -> None:
        """Add one row that the trainer has bounded, with arithmetic in float64."""
        self.count += 1
        # the sum of finite numbers may overflow
        if not (math.isfinite(float(row.sum())) or row.isfinite().all()):
            self.discarded += 1
            return
        position = 0
        for columns in self.plan.columns:  # one layer at a time, because rows are large
            part = row[columns].to(self.total.device)
            _add_scaled_(self.total[position : position + part.shape[0]], part, 1.0)
            position += part.shape[0]

    def skip(self, clients: int) -> None:
        """Count clients without data, which contribute zero."""
        self.count += check_count("clients", clients, least=0)

    def merge(self, total: Tensor, count: int, discarded: int | Tensor) -> None:
        """Add a partial sum that was made by the same plan."""
        self.total += total
        self.count += count
        self.discarded += discarded


def _add_scaled_(total: Tensor, part: Tensor, factor: float) -> None:
    """Add factor * part (float32) to `total` (float64). The sum is computed in pieces, which is
    four times as fast as torch's arithmetic on mixed types.
    """
    if part.shape[0] <= _CHUNK:
        total.add_(part.to(total.dtype), alpha=factor)
        return
    wide = torch.empty(min(_CHUNK, len(part)), dtype=total.dtype)
    for low in range(0, len(part), _CHUNK):
        piece = part[low : low + _CHUNK]
        total[low : low + _CHUNK].add_(wide[: len(piece)].copy_(piece), alpha=factor)


def clip_factors(norms: np.ndarray, clip: np.ndarray) -> np.ndarray:
    """Compute min(1, s_j / ||g_j||) with s_j reduced by the factor 1 - 2^-16, [K]. The result is 1
    for an infinite bound and 0 for a bound of 0.

    For the gradients of examples, see `fedlgm.training.example_level.scaling.clip_factors`.

    Args:
        norms: norms ||g_j|| of the layers, [K], finite.
        clip: bounds s_j of the layers, [K].

    Example:
        >>> clip_factors(np.array([0.5, 2.0, 3.0]), np.array([1.0, 1.0, 0.0])).round(4).tolist()
        [1.0, 0.5, 0.0]
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        # A norm can be 0 although the layer is not 0, because the squares of tiny numbers are
        # rounded to 0.
        return np.where(norms <= clip * SAFETY, np.sign(clip), SAFETY * clip / norms)


def bound_update(update: Updates, plan: ReleasePlan) -> Tensor:
    """Compute one client's bounded contribution [plan.size], float64. It is zero if the update [D]
    or [1, D] contains NaN or Inf.

    Raises:
        PrivacyError: see `BoundedSum.add`.

    Example:
        >>> from fedlgm import Guarantee, LayerTable, RunFacts, Sampling
        >>> layers, facts = LayerTable.from_sizes({"a": 2, "b": 1}), RunFacts(1.0, Sampling("poisson", 10, 0.5))
        >>> plan = ReleasePlan(layers, [1.0, 1.0], [2.0, 2.0], facts, Guarantee("proven", "an example"))
        >>> bound_update(torch.tensor([3.0, 4.0, 0.5]), plan).round(decimals=3).tolist()
        [0.6, 0.8, 0.5]
    """
    single = BoundedSum.empty(plan)
    single.add(update)
    return single.total


def bound_each(updates: Updates, plan: ReleasePlan) -> Tensor:
    """Compute every client's bounded contribution, float64 [b, plan.size]. It is zero for an update
    that contains NaN or Inf.

    Each row equals the total of a `BoundedSum` to which only this client's update was added.

    Args:
        updates: the clients' updates [b, D], on the CPU.
        plan: the plan, with the bounds and the released layers.

    Raises:
        PrivacyError: see `BoundedSum.add`.
    """
    if plan.bounded_by == "aggregator":
        return torch.stack(
            [bound_update(updates[place : place + 1], plan) for place in range(len(updates))]
        )
    rows = require_bounds(updates, plan.bounds, plan.asked)
    contributions, position = torch.zeros(len(rows), plan.size, dtype=torch.float64), 0
    for columns in plan.columns:
        part = rows[:, columns].to(contributions.dtype)
        contributions[:, position : position + part.shape[1]] += (
            part  # not copied: -0.0 becomes 0.0, as in a sum
        )
        position += part.shape[1]
    # the sum of finite numbers may overflow
    for place, total in enumerate(rows.sum(dim=1).tolist()):
        if not (math.isfinite(total) or rows[place].isfinite().all()):
            contributions[place] = 0.0
    return contributions
