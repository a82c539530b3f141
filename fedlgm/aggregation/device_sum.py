"""Bounded sums where the updates lie: whole blocks on an accelerator, without waiting for it."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedlgm.aggregation import kernels
from fedlgm.clipping import MOVEMENT_SIDE, QUANTILE_SIDE, BoundedSum, unknown_side
from fedlgm.layers import SAFETY
from fedlgm.plan import ReleasePlan


@dataclass(frozen=True)
class ClientNoise:
    """Noise for every client of a block (local trust).

    Attributes:
        scale: noise scale of each part of the plan, [parts] float32 on the device.
        key: Philox key of the round.
        streams: one stream a client, [b] int64 on the device.
    """

    scale: Tensor
    key: tuple[int, int]
    streams: Tensor


class DeviceSum(BoundedSum):
    """A `BoundedSum` over the kernels: sum, counts and sides stay on the device until they are asked for.

    Factors and products are float32, so they differ from the CPU's in the last bits; on Metal the sum is, too.

    Args:
        plan: bounds and released parts.
        device: where the updates are.
        backend: kernels to use; by default those that fit the device.

    Raises:
        PrivacyError: a clip bound too small for norms in float32.
    """

    def __init__(self, plan: ReleasePlan, device: torch.device, backend: kernels.Backend | None = None) -> None:
        super().__init__(plan, torch.zeros(plan.size, device=device, dtype=kernels.widest(device)))
        self._backend = backend
        self._offsets = torch.from_numpy(plan.layers.offsets)
        self._parts = part_offsets(plan)
        bound = plan.clip if self._per_client else np.full(len(plan.layers), np.inf)
        self._bound, self._clip = (torch.tensor(c, dtype=torch.float32, device=device) for c in (bound, plan.clip))
        self._whole = bool(plan.released.all()) and not plan.sides
        self._released = torch.tensor(plan.indices, device=device)
        self._sizes = torch.tensor(plan.layers.sizes, dtype=torch.float32, device=device)

    def add(self, updates: Tensor, noise: ClientNoise | None = None) -> None:
        """Bound clients' flat updates [b, D] on the device and add them, each with its own noise if there is some."""
        updates = torch.atleast_2d(updates)
        self.count += len(updates)
        plan = self.plan
        if len(updates) == 0:
            return
        moments, factors, nonfinite = kernels.clip_factors(
            updates, self._offsets, self._bound, plan.family, backend=self._backend
        )
        accepted = (nonfinite == 0) & moments.isfinite().all(dim=1)
        self.discarded = self.discarded + (~accepted).sum()
        if plan.size == 0:
            return
        factors = torch.where(accepted[:, None], factors, 0.0)
        rows = updates
        if not self._whole:
            norms = moments.sqrt() if plan.family == "gaussian" else moments
            parts = [*self._kept(updates), *(self._side(side.name, norms) for side in plan.sides)]
            rows = kernels.empty_block(len(updates), plan.size, updates.device)
            torch.cat(parts, dim=1, out=rows)
            sides = accepted[:, None].expand(-1, len(plan.sides)).to(factors.dtype)
            factors = torch.cat([factors[:, self._released], sides], dim=1)
        self._accumulate(rows, factors, noise)

    def skip(self, clients: int, noise: ClientNoise | None = None) -> None:
        """Count clients without data: they contribute zero, and their noise if there is some."""
        self.count += clients
        if noise is not None and self.plan.size > 0:
            rows = self._sizes.new_zeros(1, self.plan.size).expand(clients, -1)  # a factor of 0 reads none of it
            self._accumulate(rows, self._sizes.new_zeros(clients, len(self.plan.parts)), noise)

    def _accumulate(self, rows: Tensor, factors: Tensor, noise: ClientNoise | None) -> None:
        if noise is None:
            kernels.clip_scale_sum(rows, self._parts, factors, self.total, backend=self._backend)
            return
        kernels.clip_scale_noise_sum(
            rows, self._parts, factors, self.total, noise.scale, self.plan.family, noise.key, noise.streams,
            backend=self._backend,
        )  # fmt: skip

    def _kept(self, updates: Tensor) -> list[Tensor]:
        """Views of the released layers' columns, neighbours in one piece."""
        offsets, pieces = self.plan.layers.offsets, []
        for released, run in itertools.groupby(range(len(self.plan.layers)), key=lambda j: self.plan.released[j]):
            layers = list(run)
            if released:
                pieces.append(updates[:, int(offsets[layers[0]]) : int(offsets[layers[-1] + 1])])
        return pieces

    def _side(self, name: str, norms: Tensor) -> Tensor:
        """A side's value of every client, [b, K]; see `fedlgm.clipping`."""
        if name == QUANTILE_SIDE:
            return (norms <= self._clip).to(norms.dtype) - 0.5
        if name == MOVEMENT_SIDE:
            movement = norms / self._sizes.sqrt()
            # By the largest first: squares of tiny numbers vanish in float32.
            movement = movement / movement.amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
            length = torch.linalg.vector_norm(movement, dim=1, keepdim=True)
            return SAFETY * movement / length.clamp(min=1.0)
        raise unknown_side(name)


def part_offsets(plan: ReleasePlan) -> Tensor:
    """Boundaries of the plan's parts (released layers, then sides), int64 [parts + 1]."""
    return torch.tensor([0, *np.cumsum([size for _, size, _, _ in plan.parts])], dtype=torch.int64)


def sum_on(plan: ReleasePlan, device: torch.device, backend: kernels.Backend | None = None) -> BoundedSum:
    """The sum of nothing, for updates on `device`."""
    return BoundedSum.empty(plan) if device.type == "cpu" else DeviceSum(plan, device, backend)
