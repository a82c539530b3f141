"""Inputs of a model: one array whose first axis counts examples, or a tuple of such arrays.

A model with several inputs takes them as positional arguments. All functions work on tensors and,
unless stated otherwise, on NumPy arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

Inputs: TypeAlias = Tensor | tuple[Tensor, ...]
Arrays: TypeAlias = np.ndarray | tuple[np.ndarray, ...]
_In = TypeVar("_In")

# tolerated differences between float32 figures that should be equal
RELATIVE, ABSOLUTE = 1e-3, 1e-5


def each(function: Callable[[Any], Any], x: Any) -> Any:
    """Apply `function` to the array, or to each of several arrays; return the result or the tuple
    of results.
    """
    return tuple(function(part) for part in x) if isinstance(x, tuple) else function(x)


def parts(x: Any) -> tuple[Any, ...]:
    """Return all arrays as a tuple."""
    return x if isinstance(x, tuple) else (x,)


def first(x: Any) -> Any:
    """Return the only array, or the first of several arrays."""
    return parts(x)[0]


def take(x: _In, rows: Any) -> _In:
    """Take the examples `rows` of every array."""
    taken: _In = each(lambda part: part[rows], x)
    return taken


def to(x: Inputs, device: torch.device) -> Inputs:
    """Move the tensors to a device."""
    moved: Inputs = each(lambda part: part.to(device), x)
    return moved


def tensors(x: Arrays) -> Inputs:
    """Convert NumPy arrays to tensors that share their memory."""
    shared: Inputs = each(torch.from_numpy, x)
    return shared


def concatenate(many: Sequence[Inputs]) -> Inputs:
    """Join the examples of several inputs, one after the other."""
    if isinstance(many[0], tuple):
        return tuple(torch.cat(parts) for parts in zip(*many, strict=True))
    return torch.cat([x for x in many if isinstance(x, Tensor)])


def split(x: Inputs, size: int) -> Iterator[Inputs]:
    """Split inputs into consecutive examples, at most `size` at a time. For tensors only."""
    if isinstance(x, tuple):
        return zip(*(part.split(size) for part in x), strict=True)
    return iter(x.split(size))


def call(module: Callable[..., Tensor] | nn.Module, x: Inputs) -> Tensor:
    """Compute the model's outputs for a batch."""
    outputs: Tensor = module(*x) if isinstance(x, tuple) else module(x)
    return outputs


def close(left: Tensor, right: Tensor) -> bool:
    """Whether two float32 results of the same computation agree up to rounding."""
    scale = float(right.nan_to_num(0.0, 0.0, 0.0).abs().max()) if right.numel() else 0.0
    return torch.allclose(
        left, right, rtol=RELATIVE, atol=ABSOLUTE * max(scale, 1e-3), equal_nan=True
    )
