"""Users' functions of rows, called with one row at a time, so that no row can change the value of another one."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from fedlgm.errors import PrivacyError
from fedlgm.extension import users_code

T = TypeVar("T")


def rows_apart(owner: T, function: Callable[[T, Tensor], Tensor], rows: Tensor, what: str) -> Tensor:
    """Values of a user's object for each row [1, ...] alone, as one tensor.

    The calls use copies of the object, so nothing that it remembers reaches the rows of another call.

    Args:
        owner: the object.
        function: called with a copy of it, and with a copy of a row.
        rows: at least one row.
        what: kind of object, for the message.

    Raises:
        ConfigError: the object cannot be copied.
        PrivacyError: its value for a row depends on rows that it has seen before.

    Example:
        >>> rows_apart(2.0, lambda two, row: two * (row - row.mean(dim=0)), torch.tensor([[1.0], [5.0]]), "scaling")
        tensor([[0.],
                [0.]])
    """
    each = rows.split(1)
    with users_code(f"{what} cannot be copied", owner):
        first, one, other = (copy.deepcopy(owner) for _ in range(3))
    public = torch.ones_like(each[0])  # what is kept outside of the object is of this row, or shows in its value
    probes = [function(first, public.clone())]
    found = torch.cat([function(one, row.clone()) for row in each])
    probes += [function(one, public.clone()), function(other, public.clone())]
    again = torch.cat([function(other, row.clone()) for row in reversed(each)]).flip(0)
    probes += [function(other, public.clone())]
    pairs = [(found, again), *((probes[0], probe) for probe in probes[1:])]
    if not all(torch.equal(before.nan_to_num(), after.nan_to_num()) for before, after in pairs):
        raise PrivacyError(
            f"{what} remembers what it has seen, or draws random numbers: its value for a row may depend only on "
            "that row"
        )
    return found
