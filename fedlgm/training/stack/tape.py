"""A sequence of tensor operations that is prepared once and replayed, without allocations, views or
look-ups.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor


class Memory:
    """Tensors by name that every tape of a model shares, allocated once for the largest batch and
    zero at first.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device | None = None) -> None:
        self._dtype, self._device = dtype, device
        self._held: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """A contiguous tensor; a name keeps its memory until a larger tensor is needed."""
        size = torch.Size(shape).numel()
        if name not in self._held or self._held[name].numel() < size:
            self._held[name] = torch.zeros(size, dtype=self._dtype, device=self._device)
        return self._held[name][:size].view(shape)


class Tape:
    """Operations on fixed tensors.

    Args:
        memory: memory of the layers' results.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._calls: list[Callable[[], Any]] = []

    def do(self, operation: Callable[..., Any], *arguments: Any, out: Tensor) -> Tensor:
        """Append an operation that writes `out`; returns `out`."""
        self._calls.append(partial(operation, *arguments, out=out))
        return out

    def apply(self, method: Callable[..., Any], *arguments: Any) -> None:
        """Append a call that changes a tensor in place."""
        self._calls.append(partial(method, *arguments))

    def replay(self) -> None:
        """Run all operations again on the tensors' current values."""
        for call in self._calls:
            call()
