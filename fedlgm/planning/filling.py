"""A common cap on the norms of a client's layers, as high as the bound of the whole update permits.

An update belongs to one client, so any function of the update may replace it before the plan bounds
it. The sensitivity, the noise and the charge depend only on the bound. Water-filling determines how
an update beyond the bound is shortened. Flat clipping scales all layers by one factor, so a layer
with a large norm leaves little of the bound to the other layers. Water-filling cuts only the layers
above a common level c, with sum_j min(||g_j||, c)^2 = S^2:

* an update of norm at most S is not changed;
* if all layers have at least the norm S / sqrt(K), each is cut to S / sqrt(K), as by per-layer
  clipping;
* in between, small layers are not cut, and large layers share the rest of the bound.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from fedlgm.checks import check_positive
from fedlgm.planning.layers import LayerTable


def level(squares: Tensor, bound: float) -> Tensor:
    """The level c with sum_j min(||g_j||^2, c^2) = S^2, [b]; infinite for updates of norm at most S
    or without a finite norm.

    Args:
        squares: squared l2 norms of the layers, [b, K].
        bound: l2 bound S of the whole update.

    Raises:
        ConfigError: the bound is not finite and positive.

    Example:
        >>> level(torch.tensor([[0.36, 4.0], [9.0, 4.0], [0.25, 0.5]]), 1.0).tolist()
        [0.800000011920929, 0.7071067690849304, inf]
    """
    check_positive(bound=bound)
    ordered = squares.sort(dim=1).values
    # Squared norm of all smaller layers together. As a difference of two sums, it would be lost to
    # rounding beside a large layer.
    within = torch.nn.functional.pad(ordered[:, :-1].cumsum(dim=1), (1, 0))
    sharing = torch.arange(squares.shape[1], 0, -1, device=squares.device)
    levels = (bound**2 - within) / sharing
    # Consider the levels that do not exceed the smallest of the layers they cut. The largest of
    # these levels cuts exactly the layers above it.
    levels = torch.where(levels <= ordered, levels, 0.0).amax(dim=1).sqrt()
    total = squares.sum(dim=1)
    return torch.where((total > bound**2) & total.isfinite(), levels, torch.inf)


def cut_to_level(updates: Tensor, squares: Tensor, sizes: tuple[int, ...], bound: float) -> Tensor:
    """Cut updates [b, D] so that no layer's norm exceeds the update's `level`. Values that are not
    finite do not change.

    Args:
        updates: clients' raw updates, which are not changed.
        squares: squared l2 norms of the updates' layers, [b, K].
        sizes: number of coordinates of each layer.
        bound: l2 bound S of the whole update.

    Example:
        >>> update = torch.tensor([[0.6, 0.0, 2.0]])
        >>> cut_to_level(update, torch.tensor([[0.36, 4.0]]), (1, 2), 1.0).double().round(decimals=3).tolist()
        [[0.6, 0.0, 0.8]]
    """
    factors = (level(squares, bound)[:, None] / squares.sqrt()).clamp(max=1.0).nan_to_num(nan=1.0)
    repeats = torch.tensor(sizes, device=updates.device)
    return updates * torch.repeat_interleave(factors.to(updates.dtype), repeats, dim=1)


def cut_row_to_level(update: Tensor, sizes: tuple[int, ...], bound: float) -> Tensor:
    """Apply `cut_to_level` to one update [D] on the CPU, with norms that are accurate for layers of
    any size.

    Example:
        >>> cut_row_to_level(torch.tensor([0.0, 0.0, 2.0]), (1, 2), 1.0).tolist()
        [0.0, 0.0, 1.0]
    """
    return cut_to_level(update[None], _layers(sizes).squared_norms(update)[None], sizes, bound)[0]


@lru_cache(maxsize=16)
def _layers(sizes: tuple[int, ...]) -> LayerTable:
    return LayerTable.from_sizes({str(j): size for j, size in enumerate(sizes)})
