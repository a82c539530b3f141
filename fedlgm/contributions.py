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
        answers: sums of every unit's contribution to the auxiliary queries `queries`, [b, their sizes together]; each
            unit's was cut to the query's own bound by `AuxiliaryQuery.contribution`. None without queries.
        queries: names of the queries that were answered, in order.
    """

    values: Tensor
    bounds: tuple[float, ...]
    answers: Tensor | None = None
    queries: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: slice) -> BoundedUpdates:
        answers = None if self.answers is None else self.answers[rows]
        return BoundedUpdates(self.values[rows], self.bounds, answers, self.queries)


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


def bounded(updates: Updates, clip: tuple[float, ...], queries: tuple[str, ...] = ()) -> BoundedUpdates:
    """The updates, where the trainer bounded them at most at `clip`, [K], and answered the plan's queries.

    Raises:
        PrivacyError: raw updates, bounds above the plan's, or other queries.
    """
    if not isinstance(updates, BoundedUpdates):
        raise PrivacyError("the plan counts on a trainer that bounds its updates, this one returns raw updates")
    if len(updates.bounds) != len(clip) or any(
        not kept <= planned * (1 + 1e-9) for kept, planned in zip(updates.bounds, clip, strict=True)
    ):
        raise PrivacyError(f"the trainer kept the bounds {updates.bounds}, the plan counts on at most {clip}")
    if updates.queries != queries:
        raise PrivacyError(f"the trainer answered the queries {updates.queries}, the plan releases {queries}")
    return updates
