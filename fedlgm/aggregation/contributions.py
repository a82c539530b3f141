"""Updates from a trainer, which are raw, or already bounded and accompanied by the bounds that the
trainer used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from fedlgm.errors import PrivacyError
from fedlgm.libraries import Tensor, torch

BoundedBy = Literal["aggregator", "trainer"]
"""The party that bounds contributions: the sum to which they are added, or the trainer that makes
them."""


@dataclass(frozen=True)
class BoundedAnswer:
    """Clients' answers to an auxiliary query. The trainer bounded the share of every unit, such as
    an example, before it summed the shares to a client's answer.

    Attributes:
        query: name of the query.
        values: the answers, [b, size] float32 or float64, one row per client.
        bound: l2 bound of one unit's share of a row.

    Example:
        >>> answer = BoundedAnswer("below-bound", torch.tensor([[0.5, -0.5]]), bound=0.7072)
        >>> updates = BoundedUpdates(torch.tensor([[0.6, 0.8]]), (1.0,), (answer,))
        >>> require_bounds(updates, (1.0,), [("below-bound", 2, 0.7072)]).tolist()
        [[0.6000000238418579, 0.800000011920929, 0.5, -0.5]]
    """

    query: str
    values: Tensor
    bound: float


@dataclass(frozen=True)
class BoundedUpdates:
    """Updates that are sums of bounded shares. The trainer bounded the share of every unit, such as
    an example, before it summed the shares to a client's update.

    Attributes:
        values: the updates, [b, D] float32 or float64, one row per client.
        bounds: bound of one unit's share of each layer of a row, [K]. Gaussian noise requires
            bounds in the l2 norm, and Laplace noise in the l1 norm.
        answers: the answers of the same units to the plan's auxiliary queries, in the plan's order.

    Example:
        >>> updates = BoundedUpdates(torch.tensor([[0.6, 0.0], [0.0, 0.5]]), bounds=(1.0,))
        >>> len(updates), require_bounds(updates[1:], clip=(1.0,)).tolist()
        (2, [[0.0, 0.5]])
    """

    values: Tensor
    bounds: tuple[float, ...]
    answers: tuple[BoundedAnswer, ...] = ()

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: slice) -> BoundedUpdates:
        answers = tuple(BoundedAnswer(a.query, a.values[rows], a.bound) for a in self.answers)
        return BoundedUpdates(self.values[rows], self.bounds, answers)


@dataclass(frozen=True)
class AnsweredUpdates:
    """Raw updates, with the clients' answers to auxiliary queries that cannot be computed from the
    norms of an update.

    The answers, like the raw updates, are bounded when they are added to a sum.

    Attributes:
        values: the updates, [b, D], one row per client.
        answers: the answers to each query, by its name, [b, size], one row per client.

    Example:
        >>> updates = AnsweredUpdates(torch.ones(2, 3), {"cut-vote": torch.tensor([[0.5], [-0.5]])})
        >>> len(updates), updates[1:].answers["cut-vote"].tolist()
        (2, [[-0.5]])
    """

    values: Tensor
    answers: Mapping[str, Tensor]

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, rows: slice) -> AnsweredUpdates:
        return AnsweredUpdates(
            self.values[rows], {name: answer[rows] for name, answer in self.answers.items()}
        )


Updates: TypeAlias = "Tensor | BoundedUpdates | AnsweredUpdates"
"""A block of clients' updates, [b, D], raw or bounded by the trainer."""


def split_answers(updates: Updates) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Return the raw updates, and the clients' answers by the name of the query.

    Raises:
        PrivacyError: the trainer has bounded the updates, so it protects another unit than the
            plan.

    Example:
        >>> split_answers(torch.ones(1, 2))
        (tensor([[1., 1.]]), {})
    """
    if isinstance(updates, BoundedUpdates):
        raise PrivacyError(
            "the plan bounds whole clients, but the trainer has bounded single units"
        )
    return (
        (updates.values, updates.answers) if isinstance(updates, AnsweredUpdates) else (updates, {})
    )


def raw_updates(updates: Updates) -> Tensor:
    """Return the raw updates. The errors are those of `split_answers`.

    Example:
        >>> raw_updates(torch.ones(2, 3)).shape
        torch.Size([2, 3])
    """
    return split_answers(updates)[0]


def require_bounds(
    updates: Updates, clip: tuple[float, ...], queries: Sequence[tuple[str, int, float]] = ()
) -> Tensor:
    """Check that the trainer's bounds do not exceed the plan's. Return the updates followed by the
    answers to the queries, [b, D + sizes].

    Args:
        updates: the trainer's updates.
        clip: the plan's bound of each layer, [K].
        queries: name, size and l2 bound of each of the plan's auxiliary queries.

    Raises:
        PrivacyError: the updates are raw, a bound exceeds the plan's, or the answers differ from
            the plan's queries in number, order, size or bound.

    Example:
        >>> require_bounds(BoundedUpdates(torch.ones(1, 2), bounds=(1.5,)), clip=(1.0,))
        Traceback (most recent call last):
            ...
        fedlgm.errors.PrivacyError: the trainer kept the bounds (1.5,), but the plan allows at most (1.0,)
    """
    if not isinstance(updates, BoundedUpdates):
        raise PrivacyError(
            "the plan needs a trainer that bounds its updates, but this one returns raw updates"
        )
    if len(updates.bounds) != len(clip) or any(
        not 0 <= actual <= planned * (1 + 1e-9)
        for actual, planned in zip(updates.bounds, clip, strict=True)
    ):
        raise PrivacyError(
            f"the trainer kept the bounds {updates.bounds}, but the plan allows at most {clip}"
        )
    asked, given = [name for name, _, _ in queries], [answer.query for answer in updates.answers]
    if given != asked:
        raise PrivacyError(
            f"the plan asks for the queries {asked}, but the trainer answered {given}"
        )
    for answer, (name, size, bound) in zip(updates.answers, queries, strict=True):
        if answer.values.shape != (len(updates), size):
            raise PrivacyError(
                f"query {name!r} takes {len(updates)} x {size} numbers, got "
                f"{tuple(answer.values.shape)}"
            )
        if not 0 <= answer.bound <= bound * (1 + 1e-9):
            raise PrivacyError(
                f"the trainer kept the bound {answer.bound} for query {name!r}, but the plan "
                f"relies on {bound}"
            )
    if not updates.answers:
        return updates.values
    rows = updates.values
    # concatenation gives all values the widest dtype
    return torch.cat([rows, *(answer.values.to(rows.device) for answer in updates.answers)], dim=1)
