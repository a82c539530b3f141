"""Calls of the compiled kernel: tensors to addresses. The caller has checked shapes and ranges (`Program`)."""

from __future__ import annotations

import ctypes
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

_ALIGNED = 16  # floats of a cache line


@dataclass(frozen=True)
class Settings:
    """The kernel's `Optimizer`; `clip` is the l2 norm to which a batch's gradient is clipped, 0 for none."""

    adam: bool
    lr: float
    momentum: float = 0.0
    clip: float = 0.0


def area(library: ctypes.CDLL, ops: Tensor, batch: int) -> Tensor:
    """Working memory for batches up to this size."""
    size = int(library.fedlgm_workspace(_address(ops), ctypes.c_int64(len(ops)), ctypes.c_int64(batch)))
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
    """Fill `update` [D] with the trained model minus `model` or, without settings, with the gradient of the first
    batch.

    Args:
        library: the kernel.
        ops: a program, int64 [layers, 15].
        x: inputs [N, ...].
        y: targets [N] or [N, outputs].
        order: rows of every epoch, int64 [epochs, n].
        batch: examples of a step.
        loss: 0 for cross-entropy, 1 for the mean squared error, 2 for binary cross-entropy.
        settings: settings of the optimizer.
        model: parameters [D].
        update: array for the result.
        memory: see `area`.
    """
    tensors = (ops, x, y, order, model, update)
    assert all(tensor.is_contiguous() and tensor.device.type == "cpu" for tensor in tensors)
    assert ops.dtype == order.dtype == torch.int64
    assert x.dtype == model.dtype == update.dtype == torch.float32
    assert y.dtype == (torch.float32 if loss else torch.int64)
    values = (ctypes.c_double * 4)(*map(float, astuple(settings))) if settings else None
    count, n, epochs, size, kind = map(
        ctypes.c_int64, (len(ops), order.shape[1], len(order) if settings else 0, batch, loss)
    )
    library.fedlgm_train(
        _address(ops), count, _address(x), _address(y), _address(order), n, epochs, size, kind, values,
        _address(model), _address(update), _address(memory),
    )  # fmt: skip


class Examples:
    """Norms of the gradients of a block of examples, and their weighted sum: `measure`, then `add`.

    Args:
        library: the kernel.
        ops: a program, int64 [layers, 15].
        columns: layer of the layer table of every op's weight and bias, int64 [layers, 2].
        width: number of layers of the table, K.
        most: examples of a block at most.
    """

    def __init__(self, library: ctypes.CDLL, ops: Tensor, columns: Tensor, width: int, most: int) -> None:
        self._library, self._most, self._measured = library, most, 0
        self._size, kept = sizes(library, ops)
        scaled = torch.empty(16 * most, dtype=torch.float64)
        self._held = ops, columns, area(library, ops, most), torch.empty(most * kept), torch.arange(most), scaled
        self._ops, self._columns, self._area, self._gradients, self._rows, self._scaled = map(_address, self._held)
        self._count, self._width = ctypes.c_int64(len(ops)), ctypes.c_int64(width)

    def measure(self, x: Tensor, y: Tensor, loss: int, model: Tensor, order: int) -> Tensor:
        """Amounts of the norms of the gradients of `x` [n, ...], float64 [n, K]; `add` then adds these gradients.

        Args:
            x: inputs, at most as many as a block holds.
            y: targets [n] or [n, outputs].
            loss: 0 for cross-entropy, 1 for the mean squared error, 2 for binary cross-entropy.
            model: parameters [D].
            order: 1 for absolute values, 2 for squares.
        """
        rows = x.shape[0]  # `len` of a tensor takes as long as arithmetic
        assert rows == y.shape[0] <= self._most
        assert all(tensor.is_contiguous() for tensor in (x, y, model))
        assert x.dtype == model.dtype == torch.float32
        assert y.dtype == (torch.float32 if loss else torch.int64)
        self._measured = rows
        amounts = torch.zeros(rows, self._width.value, dtype=torch.float64)
        n, kind, power = map(ctypes.c_int64, (rows, loss, order))
        self._library.fedlgm_examples(
            self._ops, self._count, _address(x), _address(y), n, kind, _address(model), self._columns, self._width,
            power, self._rows, self._gradients, _address(amounts), self._area,
        )  # fmt: skip
        return amounts

    def add(self, factors: Tensor, sums: Tensor) -> None:
        """Add the measured gradients times factors, float64 [n, K], to packed `sums`; a factor of zero adds nothing."""
        factors = factors.contiguous()
        assert factors.dtype == sums.dtype == torch.float64
        assert factors.shape == (self._measured, self._width.value)  # their memory is laid out by the number of rows
        assert sums.shape == (self._size,)
        n = ctypes.c_int64(self._measured)
        self._library.fedlgm_add(
            self._ops, self._count, self._gradients, n, self._columns, self._width, _address(factors), self._scaled,
            _address(sums), self._area,
        )  # fmt: skip

    def sums(self) -> Tensor:
        """Packed sums of no examples."""
        return torch.zeros(self._size, dtype=torch.float64)

    def unpacked(self, sums: Tensor, parameters: int) -> Tensor:
        """Sums in the order of the model, float64 [D]."""
        total = torch.empty(parameters, dtype=torch.float64)
        self._library.fedlgm_unpack(self._ops, self._count, _address(sums), _address(total))
        return total


def sizes(library: ctypes.CDLL, ops: Tensor) -> tuple[int, int]:
    """Numbers of the packed parameters, and of what is kept of one example's gradient."""
    found = (ctypes.c_int64 * 2)()
    library.fedlgm_sizes(_address(ops), ctypes.c_int64(len(ops)), found)
    return found[0], found[1]


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
