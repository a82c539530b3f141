"""Calls of the compiled kernel, which takes the addresses of tensors. Callers must have checked
shapes and ranges (see `Program`).
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

_ALIGNED = 16  # floats of a cache line


@dataclass(frozen=True)
class Settings:
    """Settings of the kernel's optimizer (`Optimizer` in kernel.cpp). `clip` is the l2 norm to
    which a batch's gradient is clipped; with 0, gradients are not clipped.
    """

    adam: bool
    lr: float
    momentum: float = 0.0
    clip: float = 0.0


def area(library: ctypes.CDLL, ops: Tensor, batch: int) -> Tensor:
    """Allocate working memory for batches of up to `batch` examples."""
    size = int(library.fedlgm_workspace(ops.data_ptr(), len(ops), batch))
    assert size >= 0, "more layers than the kernel has room for"
    memory = torch.empty(size + _ALIGNED)
    return memory[-memory.data_ptr() // memory.element_size() % _ALIGNED :]


def run(
    library: ctypes.CDLL,
    ops: Tensor,
    x: Tensor,
    y: Tensor,
    order: Tensor,
    batch: int,
    loss: int,
    settings: Settings | None,
    model: Tensor,
    update: Tensor,
    memory: Tensor,
) -> None:
    """Fill `update` [D] with the trained model minus `model` or, if `settings` is None, with the
    gradient of the first batch.

    Args:
        library: the kernel.
        ops: a program, int64 [layers, 15].
        x: inputs [N, ...].
        y: targets [N] or [N, outputs].
        order: order of the row numbers in every epoch, int64 [epochs, n].
        batch: number of examples in a step.
        loss: 0 for cross-entropy, 1 for the mean squared error, 2 for binary cross-entropy.
        settings: settings of the optimizer; None computes a gradient only.
        model: parameters [D].
        update: tensor for the result, float32 [D].
        memory: see `area`.
    """
    tensors = (ops, x, y, order, model, update)
    assert all(tensor.is_contiguous() and tensor.device.type == "cpu" for tensor in tensors)
    assert ops.dtype == order.dtype == torch.int64
    assert x.dtype == model.dtype == update.dtype == torch.float32
    assert y.dtype == (torch.float32 if loss else torch.int64)
    values = (ctypes.c_double * 4)(*map(float, vars(settings).values())) if settings else None
    epochs = len(order) if settings else 0
    library.fedlgm_train(
        ops.data_ptr(),
        len(ops),
        x.data_ptr(),
        y.data_ptr(),
        order.data_ptr(),
        order.shape[1],
        epochs,
        batch,
        loss,
        values,
        model.data_ptr(),
        update.data_ptr(),
        memory.data_ptr(),
    )


class Examples:
    """Computes the norms of the gradients of a block of examples (`measure`), and then the weighted
    sum of these gradients (`add`).

    Args:
        library: the kernel.
        ops: a program, int64 [layers, 15].
        columns: index of the table's layer that contains the weight and the bias of every op, int64
            [layers, 2].
        width: number of layers of the table, K.
        most: largest number of examples in a block.
    """

    def __init__(
        self, library: ctypes.CDLL, ops: Tensor, columns: Tensor, width: int, most: int
    ) -> None:
        self._library, self._most, self._measured = library, most, 0
        self._size, per_example = sizes(library, ops)
        scaled = torch.empty(16 * most, dtype=torch.float64)
        self._held = (
            ops,
            columns,
            area(library, ops, most),
            torch.empty(most * per_example),
            torch.arange(most),
            scaled,
        )
        addresses = (held.data_ptr() for held in self._held)
        self._ops, self._columns, self._area, self._gradients, self._rows, self._scaled = addresses
        self._count, self._width = len(ops), width

    def measure(self, x: Tensor, y: Tensor, loss: int, model: Tensor, order: int) -> Tensor:
        """Compute the gradients of the examples `x` [n, ...], and return the sums of their absolute
        values or squares in each layer, float64 [n, K]. `add` then adds these gradients.

        Args:
            x: inputs of at most as many examples as a block can contain.
            y: targets [n] or [n, outputs].
            loss: 0 for cross-entropy, 1 for the mean squared error, 2 for binary cross-entropy.
            model: parameters [D].
            order: 1 for absolute values, 2 for squares.
        """
        rows = x.shape[0]  # `len(x)` would take as long as the arithmetic on a small tensor
        assert rows == y.shape[0] <= self._most
        assert x.is_contiguous()
        assert y.is_contiguous()
        assert model.is_contiguous()
        assert x.dtype == model.dtype == torch.float32
        assert y.dtype == (torch.float32 if loss else torch.int64)
        self._measured = rows
        amounts = torch.zeros(rows, self._width, dtype=torch.float64)
        self._library.fedlgm_examples(
            self._ops,
            self._count,
            x.data_ptr(),
            y.data_ptr(),
            rows,
            loss,
            model.data_ptr(),
            self._columns,
            self._width,
            order,
            self._rows,
            self._gradients,
            amounts.data_ptr(),
            self._area,
        )
        return amounts

    def add(self, factors: Tensor, sums: Tensor) -> None:
        """Multiply the measured gradients by `factors`, float64 [n, K], and add them to the packed
        `sums`. A gradient with the factor 0 is left out.
        """
        factors = factors.contiguous()
        assert factors.dtype == sums.dtype == torch.float64
        # the number of rows determines the layout of the memory
        assert factors.shape == (self._measured, self._width)
        assert sums.shape == (self._size,)
        self._library.fedlgm_add(
            self._ops,
            self._count,
            self._gradients,
            self._measured,
            self._columns,
            self._width,
            factors.data_ptr(),
            self._scaled,
            sums.data_ptr(),
            self._area,
        )

    def sums(self) -> Tensor:
        """Create packed sums that are zero."""
        return torch.zeros(self._size, dtype=torch.float64)

    def unpack(self, sums: Tensor, parameters: int) -> Tensor:
        """Rearrange packed sums into the order of the model's parameters, float64 [D]."""
        total = torch.empty(parameters, dtype=torch.float64)
        self._library.fedlgm_unpack(self._ops, self._count, sums.data_ptr(), total.data_ptr())
        return total


def sizes(library: ctypes.CDLL, ops: Tensor) -> tuple[int, int]:
    """Return the number of packed parameters, and the number of values that are kept for one
    example's gradient.
    """
    pair = (ctypes.c_int64 * 2)()
    library.fedlgm_sizes(ops.data_ptr(), len(ops), pair)
    return pair[0], pair[1]
