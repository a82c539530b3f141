"""Calls of users' functions with one row at a time, so that no row affects another row's value."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TypeVar

from fedlgm.errors import PrivacyError
from fedlgm.extension.loader import users_code
from fedlgm.libraries import Tensor, torch

T = TypeVar("T")


def rows_apart(
    owner: T, function: Callable[[T, Tensor], Tensor], rows: Tensor, what: str
) -> Tensor:
    """Compute the values of a user's object for each row [1, ...] separately, and return them as
    one tensor.

    For every row the object is copied anew, so nothing that a copy remembers can affect another
    row. An object that is found to remember rows, in itself or outside itself, is refused, because
    its author expects other values. So is an object that draws random numbers.

    Args:
        owner: the user's object.
        function: function that computes the values from a copy of the object and a copy of a row.
        rows: at least one row.
        what: kind of object, for the message.

    Raises:
        ConfigError: the object cannot be copied.
        PrivacyError: the object's value for a row depends on earlier rows or on random numbers.

    Example:
        >>> rows_apart(2.0, lambda two, row: two * (row - row.mean(dim=0)), torch.tensor([[1.0], [5.0]]), "scaling")
        tensor([[0.],
                [0.]])
    """

    def fresh() -> T:
        with users_code(f"{what} cannot be copied", owner):
            return copy.deepcopy(owner)

    def after(earlier: float) -> Tensor:
        used = fresh()
        function(used, earlier * public)
        return function(used, public.clone())

    each, public = rows.split(1), torch.ones_like(rows[:1])
    before = function(fresh(), public.clone())
    values = torch.cat([function(fresh(), row.clone()) for row in each])
    again = torch.cat([function(fresh(), row.clone()) for row in reversed(each)]).flip(0)
    pairs = [(values, again), (before, after(3.0)), (before, after(0.25))]
    if not all(torch.equal(single.nan_to_num(), other.nan_to_num()) for single, other in pairs):
        raise PrivacyError(
            f"{what} remembers what it has seen, or draws random numbers: its value for a row may "
            "depend only on that row"
        )
    return values
