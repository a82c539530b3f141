"""What a trainer hands over: raw updates, or updates that it has bounded itself together with the bounds it kept."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedlgm.errors import PrivacyError

BoundedBy = Literal["aggregator", "trainer"]
"""Who bounds contributions: the sum that they are added to, or the trainer that makes them."""


@dataclass(frozen=True)
class BoundedUpdates:
    """Updates in which the trainer has bounded every unit's share (a row's, an example's) before adding it up.

    Attributes:
        values: [b, D] float32 or float64, one row per client.
        bounds: bound per layer that one unit's share of a row was kept to, [K], in the norm that the plan's noise
            needs (l2 for Gaussian, l1 for Laplace noise).
    """

    values: Tensor
    bounds: tuple[float, ...]

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: slice) -> BoundedUpdates:
        return BoundedUpdates(self.values[rows], self.bounds)


Updates = Tensor | BoundedUpdates
"""A block of clients' updates, [b, D], raw or bounded by the trainer."""


def unbounded(updates: Updates) -> Tensor:
    """The raw updates.

    Raises:
        PrivacyError: the trainer has bounded them: the plan bounds another unit than the trainer does.
    """
    if isinstance(updates, BoundedUpdates):
        raise PrivacyError("the plan bounds whole clients, the trainer has bounded its units itself: they do not fit")
    return updates


def bounded(updates: Updates, clip: tuple[float, ...]) -> Tensor:
    """The values of updates that the trainer bounded at most at `clip`, [K].

    Raises:
        PrivacyError: raw updates, or bounds above the plan's.
    """
    if not isinstance(updates, BoundedUpdates):
        raise PrivacyError("the plan counts on a trainer that bounds its updates, this one returns raw updates")
    if len(updates.bounds) != len(clip) or any(
        not kept <= planned * (1 + 1e-9) for kept, planned in zip(updates.bounds, clip, strict=True)
    ):
        raise PrivacyError(f"the trainer kept the bounds {updates.bounds}, the plan counts on at most {clip}")
    return updates.values
