"""A sequence of tensor operations that is recorded once and replayed many times. A replay needs no
allocations, views or look-ups of names.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# For products of at least this number of multiplications, oneDNN saves more time than copying its
# result takes.
_MANY = 1 << 21


@cache
def _is_of_amd() -> bool:
    cpus = Path("/proc/cpuinfo")
    return cpus.exists() and "AuthenticAMD" in cpus.read_text()


def _multiply_by_onednn(a: Tensor, b: Tensor, bias: Tensor | None, out: Tensor) -> None:
    out.copy_(torch.ops.mkldnn._linear_pointwise(a, b, bias, "none", [], ""))


class Memory:
    """Named tensors that all tapes of a model share. A tensor is zero when it is allocated, and is
    allocated again only if a larger size is needed.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device | None = None) -> None:
        self._dtype, self._device = dtype, device
        self._held: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """Return a contiguous tensor of this name and shape. Tensors of the same name share their
        memory until a larger one is needed.
        """
        size = torch.Size(shape).numel()
        if name not in self._held or self._held[name].numel() < size:
            self._held[name] = torch.zeros(size, dtype=self._dtype, device=self._device)
        return self._held[name][:size].view(shape)


class Tape:
    """Records operations on fixed tensors, and replays them.

    Args:
        memory: memory for the layers' results.
    """

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self._calls: list[partial[Any]] = []

    def do(self, operation: Callable[..., Any], *arguments: Any, out: Tensor) -> Tensor:
        """Append an operation that writes its result to `out`. Return `out`."""
        self._calls.append(partial(operation, *arguments, out=out))
        return out

    def multiply(self, a: Tensor, b: Tensor, bias: Tensor | None = None, *, out: Tensor) -> Tensor:
        """Append an operation that writes `a @ b + bias` to `out`. Return `out`.

        PyTorch uses MKL for products, and MKL does not use AVX-512 on AMD processors. On these
        processors, oneDNN multiplies large matrices in half the time.
        """
        by_onednn = (
            len(a) * b.numel() >= _MANY
            and a.dtype == torch.float32
            and torch.backends.cpu.get_cpu_capability() == "AVX512"
            and _is_of_amd()
        )
        if by_onednn:
            self.apply(_multiply_by_onednn, a, b.t(), bias, out)
        elif bias is None:
            self.do(torch.mm, a, b, out=out)
        else:
            self.do(torch.addmm, bias, a, b, out=out)
        return out

    def copy(self, name: str, view: Tensor) -> Tensor:
        """Append an operation that copies a view to contiguous memory of this name. Return the
        copy.
        """
        copy = self.memory.take(name, *view.shape)
        self.apply(copy.copy_, view)
        return copy

    def apply(self, method: Callable[..., Any], *arguments: Any) -> None:
        """Append a call that changes a tensor in place."""
        self._calls.append(partial(method, *arguments))

    def replay(self) -> None:
        """Run all recorded operations on the tensors' current values."""
        for call in self._calls:
            call()
