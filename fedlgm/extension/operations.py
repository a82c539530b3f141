"""Search for users' own rules for `torch.func.vmap`, on which the guarantee cannot rely.

Code that runs under vmap gets one row (or one client) and cannot access the other rows. A
hand-written rule is the exception, because it gets the whole batch.
"""

from __future__ import annotations

from typing import Any

import torch

from fedlgm.extension.separation import KNOWN, package_of_code, reach


def own_vmap_rule(**parts: Any) -> str | None:
    """Return the name of the first `torch.autograd.Function` with a hand-written rule for vmap that
    the user's objects can reach; None if there is no such function.

    Args:
        parts: the user's objects by name, such as `model` and `task`; None is ignored.

    Example:
        >>> class Halve(torch.autograd.Function):
        ...     __module__ = "mypkg.models"
        ...     @staticmethod
        ...     def vmap(info, dims, x): ...
        >>> class Own(torch.nn.Linear):
        ...     __module__ = "mypkg.models"
        ...     half = Halve
        >>> own_vmap_rule(model=Own(2, 1)), own_vmap_rule(model=torch.nn.Linear(2, 1))
        ('Halve', None)
    """
    rule = torch.autograd.Function.vmap
    for name, part in parts.items():
        for item in () if part is None else reach(part, name):
            kind = item.value
            if (
                isinstance(kind, type)
                and issubclass(kind, torch.autograd.Function)
                and package_of_code(kind) not in KNOWN
                and kind.vmap is not rule
            ):
                return kind.__name__
    return None
