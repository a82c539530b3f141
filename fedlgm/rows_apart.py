"""Users' functions of rows, called with one row at a time, so that no row can change what another one gives."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedlgm.errors import PrivacyError


def rows_apart(function: Callable[[Tensor], Tensor], rows: Tensor, what: str) -> Tensor:
    """Values of a function for each row [1, ...] alone, as one tensor.

    Args:
        function: gets a copy of a row.
        rows: at least one row.
        what: kind of function, for the message.

    Raises:
        PrivacyError: its value for a row follows from rows that it has seen before.

    Example:
        >>> rows_apart(lambda row: row - row.mean(dim=0), torch.tensor([[1.0], [5.0]]), "scaling").tolist()
        [[0.0], [0.0]]
    """
    each = rows.split(1)
    found = torch.cat([function(row.clone()) for row in each])
    again = torch.cat([function(row.clone()) for row in reversed(each)]).flip(0)
    if not torch.equal(found.nan_to_num(), again.nan_to_num()):
        raise PrivacyError(
            f"{what} remembers what it has seen, or draws at random: its value for a row may depend on that row only"
        )
    return found
