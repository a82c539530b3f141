"""Bounded sums of contributions, on the CPU and on accelerators, and the kernels that compute them.

A release takes three steps: `sum_on(plan, device)` makes an empty sum on the updates' device, `add` bounds and adds
them, and `fedlgm.noise.release.release` adds the plan's noise.
"""

from __future__ import annotations

from fedlgm.aggregation.bounded_sum import BoundedSum, bound_each, bound_update, clip_factors
from fedlgm.aggregation.device_sum import DeviceSum, bound_on, part_offsets, sum_on

__all__ = [
    "BoundedSum",
    "DeviceSum",
    "bound_each",
    "bound_on",
    "bound_update",
    "clip_factors",
    "part_offsets",
    "sum_on",
]
