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
    """Working memory for batches of up to that size."""
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
    """Fill `update` [D] with local model minus `model`, or, without settings, with the gradient of a first batch.

    Args:
        library: the kernel.
        ops: a program, int64 [layers, 15].
        x: inputs [N, ...].
        y: targets [N] or [N, outputs].
        order: rows of every epoch, int64 [epochs, n].
        batch: examples of a step.
        loss: 0 for cross-entropy, 1 for the mean squared error.
        settings: of the optimizer.
        model: parameters [D].
        update: where to write.
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


def _address(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())
