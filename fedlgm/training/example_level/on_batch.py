"""Calls of library code for a whole batch, made by user code that `torch.func.vmap` runs for one
row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def call_on_batch(function: Callable[..., Any], row: Tensor, *values: Tensor) -> Any:
    """Call a function once for the whole batch, and return this row's part of the result. The call
    is differentiable.

    Args:
        function: function that is called with each of `values` as a tensor [n, ...]. It returns a
            tensor [n, ...], or a tuple of such tensors.
        row: a tensor of this row, by which vmap knows the batch.
        values: tensors of this row, or tensors that are the same for all rows.

    Example:
        >>> def of_row(x):
        ...     return call_on_batch(lambda rows: 2 * rows + len(rows), x, x)
        >>> torch.func.vmap(of_row)(torch.tensor([1.0, 2.0, 3.0]))
        tensor([5., 7., 9.])
    """
    return _OnBatch.apply(function, row, *values)


class _OnBatch(torch.autograd.Function):
    """A function that has only a rule for vmap. Autograd records the operations of this rule, not
    the function.
    """

    @staticmethod
    def forward(function: Any, row: Tensor, *values: Tensor) -> Any:  # type: ignore[override]
        raise RuntimeError("call_on_batch is for code that torch.func.vmap runs")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing for the backward pass."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, function: Any, row: Tensor, *values: Tensor) -> Any:
        arguments = [
            value.expand(info.batch_size, *value.shape) if axis is None else value.movedim(axis, 0)
            for value, axis in zip(values, in_dims[2:], strict=True)
        ]
        outputs = function(*arguments)
        return outputs, (0,) * len(outputs) if isinstance(outputs, tuple) else 0
