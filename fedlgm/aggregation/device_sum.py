"""Bounded sums on the device that holds the updates. The host does not wait for the device while
blocks are bounded and added.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from fedlgm.aggregation import kernels
from fedlgm.aggregation.bounded_sum import BoundedSum, bound_each
from fedlgm.aggregation.contributions import Updates, split_answers
from fedlgm.planning.filling import cut_to_level
from fedlgm.planning.plan import ReleasePlan


class DeviceSum(BoundedSum):
    """A `BoundedSum` that the kernels compute. The sum and the number of discarded updates stay on
    the device until they are read.

    Factors and products are float32, so their last bits differ from those of `BoundedSum`. On Metal
    the sum is float32, too.

    Args:
        plan: the plan, with the bounds and the released layers.
        device: device of the updates.
        backend: kernels to use; by default those that fit the device.

    Raises:
        PrivacyError: a bound is too small for norms in float32.
    """

    def __init__(
        self, plan: ReleasePlan, device: torch.device, backend: kernels.Backend | None = None
    ) -> None:
        super().__init__(plan, torch.zeros(plan.size, device=device, dtype=kernels.widest(device)))
        self._backend = backend
        self._offsets = torch.tensor(plan.layers.offsets)
        self._parts = part_offsets(plan)
        self._clip = torch.tensor(plan.clip, dtype=torch.float32, device=device)
        self._whole = plan.complete and not plan.queries
        self._released = torch.tensor(plan.indices, device=device)

    def add(self, updates: Updates) -> None:
        """Bound clients' flat updates [b, D] on the device and add them (see `BoundedSum.add`)."""
        plan = self.plan
        if plan.bounded_by == "trainer":
            self._add_all_bounded(self._require_bounds(updates))
            return
        rows, given = split_answers(updates)
        rows = torch.atleast_2d(rows)
        self.count += len(rows)
        if len(rows) == 0:
            return
        if plan.fills:
            rows = self._cut_to_level(rows)
        moments, factors, nonfinite = kernels.clip_factors(
            rows, self._offsets, self._clip, plan.family, backend=self._backend
        )
        accepted = (nonfinite == 0) & moments.isfinite().all(dim=1)
        self.discarded = self.discarded + (~accepted).sum()
        if plan.size == 0:
            return
        factors = torch.where(accepted[:, None], factors, 0.0)
        if not self._whole:
            norms = moments.sqrt() if plan.family == "gaussian" else moments
            answers = [
                noisy.contribution(norms, self._clip, given.get(noisy.query.name))
                for noisy in plan.queries
            ]
            parts = [*(rows[:, columns] for columns in plan.columns), *answers]
            rows = kernels.empty_block(len(parts[0]), plan.size, self.total.device)
            torch.cat(parts, dim=1, out=rows)
            counted = accepted[:, None].expand(-1, len(plan.queries)).to(factors.dtype)
            factors = torch.cat([factors[:, self._released], counted], dim=1)
        kernels.clip_scale_sum(rows, self._parts, factors, self.total, backend=self._backend)

    def _cut_to_level(self, rows: Tensor) -> Tensor:
        """Cut the norms of each row's layers to a common level (see `fedlgm.planning.filling`)."""
        plan = self.plan
        ends = torch.tensor([0, *np.cumsum(plan.fills)], dtype=torch.int64)
        bounds = self._clip.expand(len(plan.fills)).contiguous()
        squares, *_ = kernels.clip_factors(rows, ends, bounds, plan.family, backend=self._backend)
        return cut_to_level(rows, squares, plan.fills, float(plan.clip[0]))

    def _add_all_bounded(self, rows: Tensor) -> None:
        """Add rows that the trainer has bounded, one after another; rows that are not finite count
        as zero.
        """
        self.count += len(rows)
        finite = rows.isfinite().all(dim=1)
        self.discarded = self.discarded + (~finite).sum()
        for row, good in zip(rows, finite, strict=True):
            position = 0
            for columns in self.plan.columns:
                part = row[columns]
                self.total[position : position + len(part)] += torch.where(good, part, 0.0).to(
                    self.total
                )
                position += len(part)


def part_offsets(plan: ReleasePlan) -> Tensor:
    """Return the boundaries of the plan's parts (released layers, then auxiliary queries), int64
    [parts + 1].
    """
    return torch.tensor([0, *np.cumsum([part.size for part in plan.parts])], dtype=torch.int64)


def sum_on(
    plan: ReleasePlan, device: torch.device, backend: kernels.Backend | None = None
) -> BoundedSum:
    """Make a sum without contributions, for updates on `device`."""
    return BoundedSum.empty(plan) if device.type == "cpu" else DeviceSum(plan, device, backend)


def bound_on(
    device: torch.device,
    updates: Updates | None,
    plan: ReleasePlan,
    clients: int,
    backend: kernels.Backend | None = None,
) -> Tensor:
    """Compute the clients' bounded contributions [clients, plan.size] on `device` (see
    `bound_each`); zeros if `updates` is None.
    """
    if updates is not None and device.type == "cpu":
        return bound_each(updates, plan)
    sums = [sum_on(plan, device, backend) for _ in range(clients)]
    if updates is not None:
        for client, client_sum in enumerate(sums):
            client_sum.add(updates[client : client + 1])
    return torch.stack([client_sum.total for client_sum in sums])
